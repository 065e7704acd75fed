"""The network thread: receive, check and queue requests; send replies.

    socket ──► decode, check, split into columns ──► mailbox ──► (the writer)
    socket ◄── outbox ◄── (the syncer)

It needs no state of the run, so it works while the writer is in a transaction.
"""

import contextlib
from collections import deque
from collections.abc import Sequence

from tba.buffer.server.mailbox import Arrival, Mailbox
from tba.buffer.service.put_columns import PutColumns, to_columns
from tba.common.clock import Clock
from tba.common.errors import WireError
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.wire.channels import Peer, ServerChannel
from tba.common.wire.codec import Frames, decode_request, request_id_of

log = get_logger(__name__)

_POLL_SECONDS = 0.1
# Multiparts in one read of the socket.
_READ_LIMIT = 64
# Memory of a decoded request, and of each row of a put, in addition to its frames: measured, rounded up.
_OBJECT_BYTES = 2048
# Rejections that may wait for the writer; further messages wait in the senders.
_REJECTION_LIMIT = 1024


class Network:
    """Owns the channel while its thread runs.

    The writer answers `rejections`, malformed requests as (peer, request id, error code, sentence). `undeliverable`
    counts replies whose peer had disconnected.
    """

    def __init__(self, channel: ServerChannel, mailbox: Mailbox, clock: Clock) -> None:
        self.thread = Background("network", self._run, wake=channel.wake)
        self.rejections: deque[tuple[Peer, int, str, str]] = deque()
        self.undeliverable = 0
        self._channel = channel
        self._mailbox = mailbox
        self._clock = clock
        self._outbox: deque[tuple[Peer, Frames]] = deque()

    def send(self, replies: Sequence[tuple[Peer, Frames]]) -> None:
        """Queue replies. Called by the syncer."""
        self._outbox.extend(replies)
        self._channel.wake()

    def _run(self) -> None:
        while not self.thread.stopping.is_set():
            can_read = not self._mailbox.full and len(self.rejections) < _REJECTION_LIMIT
            received = self._channel.receive(_POLL_SECONDS, _READ_LIMIT if can_read else 0)
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
        objects = 1 + len(message) if isinstance(message, PutColumns) else 1
        size = sum(frame.nbytes for frame in frames) + _OBJECT_BYTES * objects
        return Arrival(peer, request.header, message, size, now, deadline)

    def _send_outbox(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                peer, frames = self._outbox.popleft()
                if not self._channel.send(peer, frames):
                    self.undeliverable += 1
