"""CURVE on ZeroMQ sockets: encryption, and the decision which keys get in.

    client's handshake ──► ZeroMQ ──► "may this key come in?" (ZAP) ──► ZapHandler, in the thread of the server's loop

ZeroMQ asks with https://rfc.zeromq.org/spec/27, over a socket inside the process, only for a client that has proved
that it holds its key. The answer sets `User-Id` of every message of the connection to that public key.
"""

import contextlib

import zmq
from zmq.utils import z85

from tba.common.log import get_logger
from tba.common.wire.keys import ClientKeys, KeyPair, ServerKeys

log = get_logger(__name__)

# Fixed by the protocol.
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"tba"
_REFUSED = 400
# Questions between two reads of the server's socket.
_MOST_AT_A_TIME = 100
Socket = zmq.Socket[bytes]


def new_pair(name: str) -> KeyPair:
    """Return a new key pair."""
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
        return f"it does not admit the key of {keys.own.name}: run there `tba keys authorize NAME {keys.own.public}`"
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
        """Answer some of the requests that are there: a flood must not keep the server busy."""
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
