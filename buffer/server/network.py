"""The network thread: receive, check and queue requests; send replies.

    socket ──► decode, check, split into columns ──► mailbox ──► (the writer)
    socket ◄── outbox ◄── (the writer)

It needs no state of the run, so it works while the writer is in a transaction.
"""

import sys
from collections import deque
from collections.abc import Callable, Sequence

from tba.buffer.server.mailbox import Arrival, Mailbox
from tba.buffer.service.put_columns import PutColumns, to_columns
from tba.common.clock import Clock
from tba.common.errors import WireError
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.wire.channels import Peer, ServerChannel
from tba.common.wire.codec import Frames, decode_request, request_id_of
from tba.common.wire.messages import Message

log = get_logger(__name__)

_POLL_SECONDS = 0.1
# Multiparts in one read of the socket.
_READ_LIMIT = 64
# Memory of a decoded request, and of each row of a put, in addition to its frames: measured, rounded up.
_OBJECT_BYTES = 2048
# Bytes of an element of a list or a map: an integer, or a short text and its place.
_ELEMENT_BYTES = 96
# The columns of a put whose values may be of any length: a text may be four times as long in memory as on the wire.
_TEXTS = ("text", "error", "reward_parts", "metadata")
# Rejections that may wait for the writer; further messages wait in the senders.
_REJECTION_LIMIT = 1024
# Of larger replies, such as a batch, many leases or the status of many clients, few are in flight to one peer.
_LARGE_BYTES = 8 << 10
# While the next large reply waits for the one before, which leaves the process within milliseconds if the peer reads.
_AHEAD_POLL_SECONDS = 0.005


def _decoded_bytes(message: Message | PutColumns) -> int:
    """Return approximately what a decoded message takes in memory in addition to its frames."""
    if isinstance(message, PutColumns):
        texts = sum(sum(map(sys.getsizeof, message.columns[name])) for name in _TEXTS)
        return _OBJECT_BYTES * len(message) + texts
    values = (getattr(message, name) for name in message.__struct_fields__)
    return _ELEMENT_BYTES * sum(len(value) for value in values if isinstance(value, list | dict))


def _is_large(frames: Frames) -> bool:
    return sum(map(len, frames)) > _LARGE_BYTES


class Network:
    """Owns the channel while its thread runs.

    The writer answers `rejections`: (peer, request id, error code, sentence). `undeliverable` counts lost replies.
    """

    def __init__(self, channel: ServerChannel, mailbox: Mailbox, clock: Clock) -> None:
        self.thread = Background("network", self._run, wake=channel.wake)
        self.rejections: deque[tuple[Peer, int, str, str]] = deque()
        self.undeliverable = 0
        self._channel = channel
        self._mailbox = mailbox
        self._clock = clock
        self._outbox: deque[tuple[Peer, Frames]] = deque()
        # Large replies on their way, with a function that says whether one has left the process; and for each of their
        # peers the next one, if there is one. A peer that asks and does not read costs the memory of two, not of many.
        self._leaving: dict[Peer, Callable[[], bool]] = {}
        self._ahead: dict[Peer, Frames] = {}

    def send(self, replies: Sequence[tuple[Peer, Frames]]) -> None:
        """Queue replies. Called by the writer."""
        self._outbox.extend(replies)
        self._channel.wake()

    def _run(self) -> None:
        while not self.thread.stopping.is_set():
            can_read = not self._mailbox.full and len(self.rejections) < _REJECTION_LIMIT
            wait = _AHEAD_POLL_SECONDS if self._ahead else _POLL_SECONDS
            received = self._channel.receive(wait, _READ_LIMIT if can_read else 0)
            self._send_ahead()
            self._send_outbox()
            for peer, frames in received:
                self._queue(peer, frames)
        self._send_outbox()

    def _queue(self, peer: Peer, frames: list[memoryview]) -> None:
        try:
            self._mailbox.add(self._arrival(peer, frames))
        except WireError as error:
            self._reject(peer, frames, error.code, str(error))
        # A bug, or too little memory. The sender repeats an unanswered request, so ending the server would only
        # repeat the failure in the next one.
        except Exception:
            log.exception("a message could not be read", frames=[frame.nbytes for frame in frames])
            self._reject(peer, frames, "internal", "the buffer failed on this message: its log has the details")

    def _reject(self, peer: Peer, frames: list[memoryview], code: str, sentence: str) -> None:
        self.rejections.append((peer, request_id_of(frames), code, sentence))
        self._mailbox.wake()

    def _arrival(self, peer: Peer, frames: list[memoryview]) -> Arrival:
        request = decode_request(frames)
        message = to_columns(request)
        now = self._clock.monotonic()
        deadline = now + getattr(message, "wait_seconds", 0.0)
        size = sum(frame.nbytes for frame in frames) + _OBJECT_BYTES + _decoded_bytes(message)
        return Arrival(peer, request.header, message, size, now, deadline)

    def _send_outbox(self) -> None:
        while self._outbox:
            peer, frames = self._outbox.popleft()
            if _is_large(frames) and peer in self._leaving:
                self._ahead[peer] = frames
            else:
                self._send(peer, frames)

    def _send_ahead(self) -> None:
        """Send the large replies that had to wait for an earlier one of their peer."""
        for peer in [peer for peer, has_left in self._leaving.items() if has_left()]:
            del self._leaving[peer]
            if peer in self._ahead:
                self._send(peer, self._ahead.pop(peer))

    def _send(self, peer: Peer, frames: Frames) -> None:
        if _is_large(frames):
            has_left = self._channel.send_large(peer, frames)
            if has_left is not None:
                self._leaving[peer] = has_left
                return
        elif self._channel.send(peer, frames):
            return
        self.undeliverable += 1
