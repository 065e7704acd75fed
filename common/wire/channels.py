"""ZeroMQ sockets, with every limit explicit and encryption by CURVE. Only this module imports zmq.

The buffer binds a ROUTER; every client dials it with a DEALER. Sends never block: a peer that does not read loses
replies and repeats its requests, which are all idempotent.

    client's handshake ──► ZeroMQ ──► "may this key come in?" (ZAP) ──► ZapHandler, in the thread of the server's loop

ZeroMQ asks with https://rfc.zeromq.org/spec/27, over a socket inside the process, only for a client that has proved
that it holds its key. The answer sets `User-Id` of every message of the connection to that public key.
"""

import contextlib
import errno
import math
import os
import re
import socket as sockets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message, recv_monitor_message

from tba.common.errors import AddressInUse, ConfigError, TbaError
from tba.common.log import get_logger
from tba.common.system.process import allow_many_files
from tba.common.wire.codec import MAX_FRAME_BYTES, MAX_REQUEST_FRAME_BYTES
from tba.common.wire.keys import ClientKeys, KeyPair, ServerKeys
from tba.common.wire.socket_files import free_socket_file, is_local, keep_private, make_socket_directory
from tba.common.wire.trajectory import ARRAY_KINDS

Socket = zmq.Socket[bytes]
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# Fixed by the protocol.
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"tba"
_REFUSED = 400
_ADDRESS = "inproc://connections"
_UNKNOWN = "an unknown address"
# Events, and questions for keys, between two reads of the server's socket: a flood must not keep the server busy.
_MOST_AT_A_TIME = 100
# Of a connection: a valid multipart has at most 176 MiB.
_UNFINISHED_BYTES = 192 << 20
# Of all connections: if all searchers deliver what waited for the server, half a put of each is on its way. At a limit
# below that, none would ever arrive whole.
_ALL_UNFINISHED_BYTES = 1 << 30
_CHECK_SECONDS = 0.2
# With many connections: a check takes at most 1/40 of the time, and the longest time between two.
_CHECK_REST, _MOST_REST_SECONDS = 40, 1.0
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
    """The connections of a bound socket, for its thread. With `log_failures` a peer without a key is logged."""

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
        self.active: set[int] = set()
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

    def end_unfinished(self, *, all_read: bool) -> None:
        """Close connections, the largest first, whose messages take too much memory before they are whole.

        `all_read`: no whole message waits, so that a limit of all together holds too. Socket files have none.
        """
        now = time.monotonic()
        if now < self._next_check_at:
            return
        unfinished: list[tuple[int, int]] = []
        for descriptor, connection in self._open.items():
            received = _bytes_received(descriptor)
            if descriptor in self.active or received < connection.counted_from:
                connection.counted_from = received
            unfinished.append((received - connection.counted_from, descriptor))
        # Not CPU time: on busy cores this thread waits for others in the middle of a check, and replies wait for it.
        ended = time.monotonic()
        self._next_check_at = ended + max(_CHECK_SECONDS, min(_CHECK_REST * (ended - now), _MOST_REST_SECONDS))
        self.active.clear()
        total = sum(size for size, _ in unfinished)
        for size, descriptor in sorted(unfinished, reverse=True):
            if size <= _UNFINISHED_BYTES and not (all_read and total > _ALL_UNFINISHED_BYTES):
                break
            total -= size
            by = self._open[descriptor].address
            log.warning("connection closed", by=by, reason=f"a message has no end after {size >> 20} MiB")
            with contextlib.suppress(OSError), _borrowed(descriptor) as socket:
                # ZeroMQ's close then resets the connection. Without a reset a peer whose window is full waits a minute.
                socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _RESET)
                socket.shutdown(sockets.SHUT_RDWR)


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


def new_pair(name: str) -> KeyPair:
    public, secret = map(z85.decode, zmq.curve_keypair())
    return KeyPair(name, public.hex(), secret.hex())


def encrypt_client(socket: Socket, keys: ClientKeys) -> None:
    """Encrypt the connections of a socket that will be connected."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(keys.server))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(keys.own.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(keys.own.secret))


def explain_failure(event: int, value: int, keys: ClientKeys | None) -> str:
    """Return why a client's handshake has failed, as far as its monitor event tells."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == _REFUSED and keys is not None:
        command = f"tba keys authorize NAME {keys.own.public} --role ROLE"
        return f"it does not admit the key of {keys.own.name}: run there `{command}`"
    if keys is None:
        return "the connection is closed before it is set up: does it need keys (security.keys)?"
    return "the encrypted connection is not set up: does it have keys, and is buffer.pub the key of its node?"


class ZapHandler:
    """Decides which keys get in to a server, in its thread. `socket` is readable when there are requests."""

    def __init__(self, context: "zmq.Context[Socket]", server: Socket, keys: ServerKeys) -> None:
        self._keys = keys
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ZAP_ADDRESS)
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(keys.own.secret))
        server.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without an answer no client gets in.
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def handle(self) -> None:
        """Answer some of the requests that are there."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_MOST_AT_A_TIME):
                self._answer(self.socket.recv_multipart(zmq.NOBLOCK))

    def _answer(self, frames: list[bytes]) -> None:
        version, request, _domain, address, _routing_id, _mechanism, *credentials = frames
        public = credentials[0].hex() if len(credentials) == 1 else ""
        known = self._keys.admitted.find(public)
        if known is None:
            by = address.decode(errors="replace")
            log.warning("connection refused", by=by, key=public, reason="the key is not authorised")
        status = (b"200", b"") if known else (b"400", b"not authorised")
        self.socket.send_multipart([version, request, *status, public.encode() if known else b"", b""])


log = get_logger(__name__)

# Limits in messages, not bytes. A client keeps its unanswered requests in memory anyway. The server queues few requests
# per peer: requests that it does not read must wait in the senders. It accepts 192 requests of a peer, and queues twice
# as many replies: ZeroMQ gives back the room of a full queue half by half.
_HIGH_WATER_MARK = 1024
_UNREAD_REQUESTS = 16
_UNSENT_REPLIES = 384
# The most frames that a valid multipart has.
_MOST_FRAMES = 1 + len(ARRAY_KINDS)
# One read of the socket stops after the multipart that exceeds this.
_READ_BYTES = 4 << 20
# A frame over the codec's limit gets an error reply. A frame over this limit is not read: ZeroMQ disconnects the peer.
_HARD_FRAME_LIMIT = 2 * MAX_FRAME_BYTES
_HARD_REQUEST_LIMIT = 2 * MAX_REQUEST_FRAME_BYTES
# A connection that the network has broken, or whose server reads nothing, is ended by TCP: by the client within 24 s,
# which connects again, by the server in two minutes. A new connection is abandoned after 5 s and tried again. Otherwise
# the outage would outlast the network's: TCP retries at growing intervals, and ZeroMQ waits 30 s for the greeting.
# ZeroMQ's own pings are off: libzmq 4.3.5 ends the server's process if it reads a ping, or is due to send one, after a
# peer has left whose requests were not all read (out_event, libzmq #4841).
_CLIENT_SILENT_SECONDS, _SERVER_SILENT_SECONDS = 12, 60
_CONNECT_TIMEOUT_MS = 5_000
_LINGER_MS = 500
# Between two attempts of a client that is refused.
_REFUSED_SECONDS = 1.0

# A routing id is a letter, the client's secret and a number of its own. The letter, since none may begin with zero.
_SECRET_BYTES = 16
_ROUTING_ID_PREFIX = b"t"


class Peer(NamedTuple):
    """A connection, as the server sees it. `address` is for log lines: an IP address, or the uid, gid and pid."""

    routing_id: bytes
    address: str = ""
    # The public key that the connection has proved, empty without keys.
    key: str = ""

    @property
    def owner(self) -> bytes:
        """What another connection of the same client has in common: the key, or the secret in the routing id."""
        return self.key.encode() or self.routing_id[: len(_ROUTING_ID_PREFIX) + _SECRET_BYTES]


def new_secret() -> bytes:
    """Return a secret for the connections of one client: with it they may use the same sender names."""
    return os.urandom(_SECRET_BYTES)


class ServerChannel:
    """The listening side: receives multiparts from many peers and replies to each.

    `setting` is the configuration key of the address, for error messages; `unsent` is how many replies may wait for a
    peer. With `keys` only those get in that are authorised. The socket file of a dead server is replaced. Raises
    AddressInUse if another program listens at the address, ConfigError if it cannot be bound for another reason.
    """

    def __init__(
        self,
        address: str,
        *,
        setting: str = "buffer.address",
        unsent: int = _UNSENT_REPLIES,
        keys: ServerKeys | None = None,
    ) -> None:
        allow_many_files()
        # At its first frame without a copy, pyzmq starts a thread that needs descriptors: later there may be none.
        zmq.Frame(b"", copy=False)
        self.keys = keys
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _set_limits(self._socket, _SERVER_SILENT_SECONDS)
        self._socket.setsockopt(zmq.RCVHWM, _UNREAD_REQUESTS)
        self._socket.setsockopt(zmq.SNDHWM, unsent)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A client that reconnects takes the place of its old connection, which may seem alive for another minute.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _HARD_REQUEST_LIMIT)
        self._connections = Connections(self._context, self._socket, log_failures=keys is not None)
        self._zap = ZapHandler(self._context, self._socket, keys) if keys else None
        try:
            with free_socket_file(address):
                self._socket.bind(_interfaces(address))
                keep_private(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise _bind_error(setting, address, error) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._woken, self._waker = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._waker.connect("inproc://wake")
        # A ZeroMQ socket must not be used by two threads at a time.
        self._waking = threading.Lock()
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._poller.register(self._connections.events, zmq.POLLIN)
        if self._zap is not None:
            self._poller.register(self._zap.socket, zmq.POLLIN)
        self._reading = False

    def wake(self) -> None:
        """Make `receive` return immediately. The only method that other threads may call."""
        # A full queue is enough wake-ups.
        with self._waking, contextlib.suppress(zmq.Again):
            self._waker.send(b"", zmq.NOBLOCK)

    def receive(self, timeout_seconds: float, limit: int) -> list[tuple[Peer, list[memoryview]]]:
        """Return the multiparts that have arrived, up to `limit` of them or 4 MiB.

        Waits for the first one until the timeout or `wake`: only then is the list empty. Connections that come and go
        are dealt with meanwhile and do not end the wait. With a limit of 0 it waits without reading.
        """
        deadline = time.monotonic() + timeout_seconds
        if self._reading != bool(limit):
            self._reading = bool(limit)
            self._poller.register(self._socket, zmq.POLLIN if limit else 0)
        remaining = timeout_seconds
        while True:
            self._poller.poll(max(0, math.ceil(remaining * 1000)))
            self._connections.follow()
            if self._zap is not None:
                self._zap.handle()
            woken = False
            # Checked before each receive: catching zmq.Again costs as much as receiving a message.
            while _readable(self._woken):
                self._woken.recv(zmq.NOBLOCK)
                woken = True
            received = self._read(limit)
            self._connections.end_unfinished(all_read=not _readable(self._socket))
            remaining = deadline - time.monotonic()
            if received or woken or remaining <= 0:
                return received

    def _read(self, limit: int) -> list[tuple[Peer, list[memoryview]]]:
        received: list[tuple[Peer, list[memoryview]]] = []
        size = 0
        while len(received) < limit and size < _READ_BYTES and _readable(self._socket):
            peer, frames = self._receive_one()
            received.append((peer, frames))
            size += sum(frame.nbytes for frame in frames)
        return received

    def _receive_one(self) -> tuple[Peer, list[memoryview]]:
        """Return a multipart, which ZeroMQ delivers as a whole. Surplus frames are dropped but one, to be refused.

        Written out because `recv_multipart` queries the socket after each frame for what the frame itself knows.
        """
        routing_id = self._socket.recv(zmq.NOBLOCK)
        first = frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames = [first.buffer]
        while frame.more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) <= _MOST_FRAMES:
                frames.append(frame.buffer)
        try:
            descriptor, address = first.get(zmq.SRCFD), str(first.get("Peer-Address"))
            key = str(first.get("User-Id")) if self.keys else ""
        except zmq.ZMQError:
            # A connection of ZMTP 1.0, which any program can open, has no properties.
            return Peer(routing_id), frames
        assert isinstance(descriptor, int)
        self._connections.active.add(descriptor)
        return Peer(routing_id, address, key), frames

    def send(self, peer: Peer, frames: Sequence[bytes]) -> bool:
        """Send a reply. Returns False if the peer is gone or does not read: it will repeat its request."""
        try:
            self._socket.send_multipart([peer.routing_id, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return False
        return True

    def send_large(self, peer: Peer, frames: Sequence[bytes]) -> Callable[[], bool] | None:
        """Send a reply like `send`. Returns a function that says whether it has left the process, None for False."""
        # pyzmq copies a frame below 64 KiB and calls it done at once. The last frame leaves last, so it stands for all.
        *first, last = frames
        tracked = zmq.Frame(last, track=True, copy=False)
        # A frame that is kept would itself hold what is sent.
        tracker = tracked.tracker
        try:
            self._socket.send_multipart([peer.routing_id, *first, tracked], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return None
        return lambda: tracker is None or bool(tracker.done)

    def close(self) -> None:
        """Send what is queued for at most half a second, then close."""
        self._context.destroy(_LINGER_MS)


class ClientChannel:
    """The dialling side. Connects in the background and reconnects indefinitely.

    `setting` is the configuration key of the address, for error messages; `secret` is that of `new_secret`, which is
    only known to the client and the server. `trouble` says why the last handshake failed, empty if it did not. Raises
    ConfigError for an invalid address.
    """

    def __init__(
        self, address: str, *, setting: str = "buffer.address", secret: bytes = b"", keys: ClientKeys | None = None
    ) -> None:
        self.trouble = ""
        self._address = address
        self._keys = keys
        # When to dial again, monotonic, after a failure that ZeroMQ takes for final.
        self._dial_at = math.inf
        # Monotonic time of the last message, or of the connection.
        self._active_at = time.monotonic()
        make_socket_directory(address, in_memory_alone=True)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_limits(self._socket, _CLIENT_SILENT_SECONDS)
        # Unique, since a client may have several connections.
        routing_id = _ROUTING_ID_PREFIX + (secret or new_secret()) + os.urandom(4)
        self._socket.setsockopt(zmq.ROUTING_ID, routing_id)
        # Queue messages only on a live connection. The client repeats what a dead server did not answer, and knows
        # which of it is still needed.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        if keys is not None:
            encrypt_client(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILURES)
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
        """Number of connections so far. Requests sent on any but the last one may be lost."""
        while self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connections += 1
                self.trouble = ""
            else:
                self.trouble = explain_failure(message["event"], message["value"], self._keys)
                if message["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    self._dial_at = time.monotonic() + _REFUSED_SECONDS
        # The key may have been authorised meanwhile, or the server have got keys.
        if time.monotonic() >= self._dial_at:
            self._dial_at = math.inf
            self._dial()
        return self._connections

    def renew(self, silent_seconds: float) -> None:
        """Replace a connection on which nothing has arrived for so long. What was sent on it may be lost.

        TCP does not notice a dead server behind a proxy that acknowledges everything.
        """
        if time.monotonic() - self._active_at >= silent_seconds:
            self._dial()

    def _dial(self) -> None:
        self._active_at = time.monotonic()
        # ZeroMQ ignores a second connection to the same address.
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self._address)
        self._socket.connect(self._address)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a multipart. Returns False if there is no connection or the queue is full."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_seconds: float) -> list[memoryview] | None:
        """Return the next multipart, or None.

        None may come before the timeout: a new connection ends the wait, since the caller sends what waits for it.
        """
        self._poller.poll(max(0, round(timeout_seconds * 1000)))
        if not self._socket.poll(0):
            return None
        self._active_at = time.monotonic()
        return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]

    def close(self) -> None:
        """Send what is queued for at most half a second, then close."""
        self._socket.disable_monitor()
        self._context.destroy(_LINGER_MS)


def _readable(socket: "zmq.Socket[bytes]") -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


def _set_limits(socket: "zmq.Socket[bytes]", silent_seconds: int) -> None:
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, _HARD_FRAME_LIMIT)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, silent_seconds // 3)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, silent_seconds // 6)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 4)
    # In milliseconds: that of data which is not acknowledged.
    socket.setsockopt(zmq.TCP_MAXRT, silent_seconds * 1000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _CONNECT_TIMEOUT_MS)


def _interfaces(address: str) -> str:
    """Return what a server binds: for this machine's name, which /etc/hosts may call loopback, all interfaces."""
    name = sockets.gethostname()
    return address if is_local(address) else re.sub(rf"^tcp://{re.escape(name)}:", "tcp://*:", address)


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
