"""The accepted connections of a server's socket: log failed handshakes, and end messages without end.

ZeroMQ hands over a multipart when its last frame has arrived. It limits the size of a frame and not their number, so a
peer that never sends a last frame would fill the memory of the server.
"""

import contextlib
import socket as sockets
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from tba.common.log import get_logger

log = get_logger(__name__)

Socket = zmq.Socket[bytes]
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_ADDRESS = "inproc://connections"
_UNKNOWN = "an unknown address"
# Events between two reads of the server's socket: a flood of connections must not keep the server busy.
_MOST_AT_A_TIME = 100
# Of a connection: a valid multipart has at most 176 MiB.
_UNFINISHED_BYTES = 192 << 20
# Of all connections: if all searchers deliver what waited for the server, half a put of each is on its way. At a limit
# below that, none would ever arrive whole.
_ALL_UNFINISHED_BYTES = 1 << 30
_CHECK_SECONDS = 0.2
# tcpi_bytes_received of struct tcp_info (linux/tcp.h).
_BYTES_RECEIVED = slice(128, 136)
# struct linger: on, for 0 seconds.
_RESET = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class _Connection:
    """`counted_from`: the bytes that it had sent when its last message was received, or later."""

    address: str
    counted_from: int = 0


class Connections:
    """The connections of a bound socket by file descriptor. Used by the thread that uses the socket.

    With `log_failures` a failed handshake is logged: the peer has not proved a key.
    """

    def __init__(self, context: "zmq.Context[Socket]", socket: Socket, *, log_failures: bool) -> None:
        self._log_failures = log_failures
        socket.monitor(_ADDRESS, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES)
        self.events = context.socket(zmq.PAIR)
        # With a limit ZeroMQ's thread would wait for this one.
        self.events.setsockopt(zmq.RCVHWM, 0)
        self.events.connect(_ADDRESS)
        self._open: dict[int, _Connection] = {}
        # Whether the connection that ends next has failed.
        self._failed = False
        # The descriptors from which a whole message has arrived since the last check.
        self._active: set[int] = set()
        self._next_check_at = 0.0

    def follow(self) -> None:
        """Take note of some of the connections that have come and gone."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_MOST_AT_A_TIME):
                self._note(self.events.recv_multipart(zmq.NOBLOCK))

    def _note(self, frames: list[bytes]) -> None:
        """A failure comes immediately before the end of its connection."""
        message = parse_monitor_message(frames)
        event, value = message["event"], message["value"]
        if event == zmq.EVENT_ACCEPTED:
            self._open[value] = _Connection(_address_of(value))
        elif event == zmq.EVENT_DISCONNECTED:
            connection = self._open.pop(value, None)
            if self._failed and self._log_failures:
                by = connection.address if connection else _UNKNOWN
                log.warning("connection refused", by=by, reason="it did not prove a key")
            self._failed = False
        # Refusals of keys are logged with the key.
        elif event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._failed = True

    def note_message(self, descriptor: int) -> None:
        """Note that a whole message has arrived from a connection."""
        self._active.add(descriptor)

    def end_unfinished(self, *, all_read: bool) -> None:
        """Close connections, the largest first, whose messages take too much memory before they are whole.

        `all_read`: no whole message waits. Only then is all that has arrived since the last one unfinished, and there
        is also a limit for all connections together. Socket files, which only this user can reach, have none.
        """
        now = time.monotonic()
        if now < self._next_check_at:
            return
        self._next_check_at = now + _CHECK_SECONDS
        unfinished: list[tuple[int, int]] = []
        for descriptor, connection in self._open.items():
            received = _bytes_received(descriptor)
            if descriptor in self._active or received < connection.counted_from:
                connection.counted_from = received
            unfinished.append((received - connection.counted_from, descriptor))
        self._active.clear()
        total = sum(size for size, _ in unfinished)
        for size, descriptor in sorted(unfinished, reverse=True):
            if size <= _UNFINISHED_BYTES and not (all_read and total > _ALL_UNFINISHED_BYTES):
                break
            total -= size
            by = self._open[descriptor].address
            log.warning("connection closed", by=by, reason=f"a message has no end after {size >> 20} MiB")
            _shut_down(descriptor)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[sockets.socket]:
    """Yield the socket of a connection, which stays ZeroMQ's: its methods raise OSError if it is closed already.

    Its number may mean a file by then. A copy of that must not be opened: closing it would release SQLite's locks.
    """
    # The family is not asked for, and that of IPv6 has room for both kinds of addresses.
    connection = sockets.socket(sockets.AF_INET6, sockets.SOCK_STREAM, 0, descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _address_of(descriptor: int) -> str:
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        # That of a socket file is a text, mostly an empty one.
        if isinstance(peer := connection.getpeername(), tuple):
            return str(peer[0])
    return _UNKNOWN


def _bytes_received(descriptor: int) -> int:
    """Return the bytes that have arrived, 0 if it is not a TCP connection or ZeroMQ has closed it."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _BYTES_RECEIVED.stop)
        return int.from_bytes(info[_BYTES_RECEIVED], "little")
    return 0


def _shut_down(descriptor: int) -> None:
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        # ZeroMQ's close then resets the connection. Without a reset a peer whose window is full waits for a minute.
        connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _RESET)
        connection.shutdown(sockets.SHUT_RDWR)
