"""ZeroMQ sockets, with every limit explicit. The only module that imports zmq.

The buffer binds a ROUTER; everybody else dials it with a DEALER. Sends never block: a peer that does
not read loses replies and asks again, since every request is idempotent.
"""

import contextlib
import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from tba.common.codec import MAX_FRAME_BYTES
from tba.common.errors import AddressInUse, ConfigError, TbaError
from tba.common.trajectory import ARRAY_KINDS

# Messages, not bytes. Replies are small, and what waits in a client is held there anyway until it is answered; but of
# requests the server takes few from each peer: those that it does not read have to wait in the senders.
_HIGH_WATER_MARK = 1024
_UNREAD_REQUESTS = 16
_MOST_FRAMES = 1 + len(ARRAY_KINDS)  # that mean anything
_READ_BYTES = 4 << 20  # read at once, and one multipart more
# A frame over the codec's limit gets an error reply; one over this is not even read: the peer is cut off.
_HARD_FRAME_LIMIT = 2 * MAX_FRAME_BYTES
# A peer that a network cut took away without a word is noticed 12 s after its last sign of life at the latest: either
# side pings every 2 s, and ends a connection on which 10 s after a ping nothing came. A new connection that does not
# come about is given up after 5 s and tried again, else the wait would go on for long after the cut: TCP asks again
# ever more rarely, and ZeroMQ would wait 30 s for the greeting.
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000
_CONNECT_TIMEOUT_MS = 5_000
_LINGER_MS = 500
# Who binds a socket file holds the lock on its directory for milliseconds; others may hold one for ever.
_LOCK_SECONDS = 2.0
_LOCK_RETRY_SECONDS = 0.02

Peer = bytes


class ServerChannel:
    """The listening side: receives multiparts of many peers and answers each.

    `setting` is the configuration key that names the address; `unsent` is how many answers may wait for a peer.
    Raises AddressInUse if another program listens there, ConfigError if it cannot be bound at all. The socket file of
    a server that died is taken over.
    """

    def __init__(self, address: str, *, setting: str = "buffer.address", unsent: int = _HIGH_WATER_MARK) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _set_limits(self._socket)
        self._socket.setsockopt(zmq.RCVHWM, _UNREAD_REQUESTS)
        self._socket.setsockopt(zmq.SNDHWM, unsent)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            with _free_socket_file(address):
                self._socket.bind(address)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise _bind_error(setting, address, error) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._woken, self._waker = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._waker.connect("inproc://wake")
        self._waking = threading.Lock()  # a ZeroMQ socket bears only one thread at a time
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._reading = False

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return self.address.startswith(("ipc://", "tcp://127.", "tcp://[::1]"))

    def wake(self) -> None:
        """Let `receive` return now. The one method that other threads may call."""
        with self._waking, contextlib.suppress(zmq.Again):  # it has been told often enough
            self._waker.send(b"", zmq.NOBLOCK)

    def receive(self, timeout_seconds: float, limit: int) -> list[tuple[Peer, list[memoryview]]]:
        """What has arrived, up to `limit` multiparts and 4 MiB; waits for the first, or `wake`, at most the timeout."""
        received: list[tuple[Peer, list[memoryview]]] = []
        size = 0
        if self._reading != bool(limit):
            self._reading = bool(limit)
            self._poller.register(self._socket, zmq.POLLIN if limit else 0)
        self._poller.poll(max(0, round(timeout_seconds * 1000)))
        # Asked before each receive: an exception for "nothing there" costs as much as a message.
        while _readable(self._woken):
            self._woken.recv(zmq.NOBLOCK)
        while len(received) < limit and size < _READ_BYTES and _readable(self._socket):
            peer, frames = self._receive_one()
            received.append((peer, frames))
            size += sum(frame.nbytes for frame in frames)
        return received

    def _receive_one(self) -> tuple[Peer, list[memoryview]]:
        """A multipart, which ZeroMQ hands over whole. Of too many frames the first are kept, to be refused.

        `recv_multipart` asks the socket after each frame whether there are more, which each frame has asked already.
        """
        peer = self._socket.recv(zmq.NOBLOCK)
        frames: list[memoryview] = []
        more = True
        while more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) <= _MOST_FRAMES:
                frames.append(frame.buffer)
            more = frame.more
        return peer, frames

    def send(self, peer: Peer, frames: Sequence[bytes]) -> bool:
        """Answer a peer. False if it has gone or does not read: the answer is lost, and it will ask again."""
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return False
        return True

    def send_followed(self, peer: Peer, frames: Sequence[bytes]) -> Callable[[], bool] | None:
        """`send` of a large answer; returns whether all of it is with the operating system, or lost with its peer.

        None if it could not be sent.
        """
        # A tracker of the whole multipart would follow its last frame alone.
        parts = [zmq.Frame(frame, track=True) for frame in frames]
        try:
            self._socket.send_multipart([peer, *parts], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return None
        tracker = zmq.MessageTracker(*parts)
        return lambda: tracker.done

    def close(self) -> None:
        """Send what is queued for at most half a second, then close."""
        self._context.destroy(_LINGER_MS)


class ClientChannel:
    """The dialling side. Connects in the background and reconnects for ever.

    `setting` is the configuration key that names the address. Raises ConfigError if the address is not one.
    """

    def __init__(self, address: str, *, setting: str = "buffer.address") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_limits(self._socket)
        # Only a live connection takes messages: what was meant for a dead server is sent again by the
        # client, which knows what is still wanted.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._connections = 0
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{setting} {address!r} cannot be dialled: {error}") from error

    @property
    def connections(self) -> int:
        """How many connections there have been: what was sent on one before the last may be lost."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._connections += 1
        return self._connections

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a multipart; False if there is no connection or the queue is full."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_seconds: float) -> list[memoryview] | None:
        """The next multipart, or None if none arrives in time or there is a new connection."""
        self._poller.poll(max(0, round(timeout_seconds * 1000)))
        if not self._socket.poll(0):
            return None
        return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]

    def close(self) -> None:
        """Send what is queued for at most half a second, then close."""
        self._socket.disable_monitor()
        self._context.destroy(_LINGER_MS)


def _readable(socket: "zmq.Socket[bytes]") -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


def _set_limits(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, _HARD_FRAME_LIMIT)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _CONNECT_TIMEOUT_MS)


@contextlib.contextmanager
def _free_socket_file(address: str) -> Iterator[None]:
    """Make sure that nobody listens at the file of an ipc address, while the block binds it.

    ZeroMQ unlinks what is there and binds the name anew: whoever listened would hear of nobody any more, and not know
    it. The lock on the directory is for two servers that start at once. Raises OSError.
    """
    if not address.startswith("ipc://") or address.startswith(("ipc://@", "ipc://*")):  # abstract, or a new file
        yield
        return
    path = Path(address.removeprefix("ipc://"))
    with _locked(path.parent):
        if path.exists() and not path.is_socket():
            raise FileExistsError(errno.EEXIST, "the file is no socket")
        if _listens(path):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        yield


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock on a directory, where it can be had. Raises BlockingIOError if another keeps it, OSError."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # one that may not be read may be written to all the same, which to bind it will say
        yield
        return
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        except OSError:  # some network file systems lock no directories
            return None
        time.sleep(_LOCK_RETRY_SECONDS)


def _listens(path: Path) -> bool:
    """Whether somebody accepts connections at a socket file, or may: what cannot be asked is not to be taken away."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # it would wait where too many wait already
        try:
            probe.connect(str(path))
        except OSError as error:
            # Without a number: longer than a name can be, which to bind it will say.
            return error.errno not in (None, errno.ENOENT, errno.ECONNREFUSED)
    return True


def _bind_error(setting: str, address: str, error: OSError | zmq.ZMQError) -> TbaError:
    if isinstance(error, BlockingIOError):
        return AddressInUse(
            f"{setting} {address} cannot be bound: another program keeps a lock on its directory (`lsof` or `fuser` "
            "names it); stop that or choose another address"
        )
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"{setting} {address} is in use: another program listens there; stop it or choose another address"
        )
    return ConfigError(f"{setting} {address!r} cannot be bound: {error.strerror or error}")
