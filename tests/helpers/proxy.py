"""A network that can fail: a TCP proxy in the test's process, between searchers and the buffer."""

import socket
import struct
import threading
from contextlib import suppress

_READ_BYTES = 1 << 16
# SO_LINGER: close with a reset.
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards every connection to `target`, a ZeroMQ endpoint.

    `silence` stops forwarding without closing anything, as when packets are dropped. Data in transit arrives after
    `heal` on connections that are still open then; connections dialled in between are never established. `cut` closes
    every connection and refuses new ones. `heal` ends either. `swallow` drops what arrives on the connections of now,
    and acknowledges it, as a proxy does whose other side is dead.
    """

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = threading.Event()
        self._open.set()
        self._refusing = False
        self._ended = False
        self._sockets: set[socket.socket] = set()
        self._swallowing: set[socket.socket] = set()
        # Two threads use each socket, so sockets are closed only after all threads have ended.
        self._used: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def silence(self) -> None:
        self._open.clear()

    def swallow(self) -> None:
        self._swallowing |= self._sockets

    def cut(self) -> None:
        self._refusing = True
        self._close_all()

    def heal(self) -> None:
        self._refusing = False
        self._open.set()

    def close(self) -> None:
        self._ended = True
        self.cut()
        self._open.set()
        # Wakes the accepting thread.
        with suppress(OSError):
            socket.create_connection(self._listener.getsockname()).close()
        for thread in list(self._threads):
            thread.join(60)
        for end in (*self._used, self._listener):
            end.close()

    def _spawn(self, work, *arguments) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            if self._ended:
                return near.close()
            if self._refusing:
                _reset(near)
                continue
            self._spawn(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        if not self._open.is_set():
            self._sockets.add(near)
            self._used.append(near)
            return None
        try:
            far = socket.create_connection(self._target)
        except OSError:
            return _reset(near)
        self._sockets |= {near, far}
        self._used += near, far
        self._spawn(self._pump, near, far)
        return self._pump(far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_READ_BYTES):
                self._open.wait()
                if source not in self._swallowing:
                    sink.sendall(data)
        self._open.wait()
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._sockets -= {source, sink}

    def _close_all(self) -> None:
        for end in list(self._sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()
