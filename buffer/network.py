"""The server's side of the wire, in a thread of its own: receive, check, queue; and send what is answered.

    socket ──► decode, check, cut into columns ──► mailbox ──► (the writer)
    socket ◄── outbox ◄── (the syncer)

It knows nothing of the run, so that it can work while the writer is in a transaction.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

from tba.buffer.mailbox import Arrival, Mailbox
from tba.buffer.rows import PutColumns, service_message
from tba.common.channels import Peer, ServerChannel
from tba.common.clock import Clock
from tba.common.codec import Frames, decode_request, request_id_of
from tba.common.errors import WireError
from tba.common.log import get_logger

log = get_logger(__name__)

_TURN_SECONDS = 0.1
_READ_LIMIT = 64  # multiparts in one reading of the socket
_OBJECT_BYTES = 2048  # of a decoded request, and of each row of a put, beside its frames; measured, and some more
_BATCH_BYTES = 1 << 20  # of a reply that is worth holding puts back for
_LEAVING_SECONDS = 0.001  # between two looks at whether it has left
_SLOW_READER_SECONDS = 0.1  # that puts wait at most for a trainer that takes its batch slowly
_UNANSWERED = 1024  # refused messages that may wait for the writer; more wait in the senders


class Network:
    """Owns the channel while it runs. Malformed messages are handed to `rejections` to be answered.

    A rejection is (peer, id of the request, code, sentence). `undeliverable` counts replies whose peer was gone.
    """

    def __init__(self, channel: ServerChannel, mailbox: Mailbox, clock: Clock) -> None:
        self._channel = channel
        self._mailbox = mailbox
        self._clock = clock
        self._outbox: deque[tuple[Peer, Frames]] = deque()
        # Of each batch on its way: whether it has left, and when to wait for that no longer.
        self._leaving: deque[tuple[Callable[[], bool], float]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        # Held while Python decodes. Who holds it has the interpreter to himself: two busy threads hand it over
        # at every row that SQLite steps to, which makes reading a batch some twenty times as slow. The writer takes it
        # twice where a request for a batch has just come.
        self.decoding = threading.RLock()
        self.rejections: deque[tuple[Peer, int, str, str]] = deque()
        self.undeliverable = 0
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is answered, and end the thread."""
        self._stopping = True
        self._channel.wake()
        self._thread.join()

    def send(self, replies: Sequence[tuple[Peer, Frames]]) -> None:
        """Queue replies. Called by the syncer."""
        self._outbox.extend(replies)
        self._channel.wake()

    def expect(self, replies: Sequence[tuple[Peer, Frames]]) -> None:
        """Hold puts back until the batches among these have left. Called by the writer, before they are synced.

        A batch is megabytes that a trainer waits for; what is done for puts meanwhile takes the cores from them.
        """
        for _, frames in replies:
            if _is_batch(frames):
                self._mailbox.hold()

    def resume(self) -> None:
        """There is room in the mailbox again. Called by the writer."""
        self._channel.wake()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._send_outbox()
        except BaseException as error:  # noqa: BLE001  # raised by the writer, which must not wait for us for ever
            self.failure = error
            self._mailbox.wake()

    def _turn(self) -> None:
        reading = not (self._mailbox.full or self._leaving) and len(self.rejections) < _UNANSWERED
        patience = _LEAVING_SECONDS if self._leaving else _TURN_SECONDS
        received = self._channel.receive(patience, _READ_LIMIT if reading else 0)
        self._send_outbox()
        self._see_off()
        for peer, frames in received:
            with self.decoding:
                self._queue(peer, frames)

    def _queue(self, peer: Peer, frames: list[memoryview]) -> None:
        try:
            self._mailbox.add([self._arrival(peer, frames)])
        except WireError as error:
            self._reject(peer, frames, error.code, str(error))
        except Exception:  # a bug, or too little memory: if it ended the server, the next one would get it again
            log.exception("a message could not be read", frames=[frame.nbytes for frame in frames])
            self._reject(peer, frames, "internal", "the buffer failed on this message: its log has the details")

    def _reject(self, peer: Peer, frames: list[memoryview], code: str, sentence: str) -> None:
        self.rejections.append((peer, request_id_of(frames), code, sentence))
        self._mailbox.wake()

    def _arrival(self, peer: Peer, frames: list[memoryview]) -> Arrival:
        request = decode_request(frames)
        message = service_message(request)
        now = self._clock.monotonic()
        deadline = now + getattr(message, "wait_seconds", 0.0)
        objects = 1 + len(message) if isinstance(message, PutColumns) else 1
        size = sum(frame.nbytes for frame in frames) + _OBJECT_BYTES * objects
        return Arrival(peer, request.header, message, size, now, deadline)

    def _send_outbox(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                peer, frames = self._outbox.popleft()
                if _is_batch(frames):
                    self._send_batch(peer, frames)
                elif not self._channel.send(peer, frames):
                    self.undeliverable += 1

    def _send_batch(self, peer: Peer, frames: Frames) -> None:
        has_left = self._channel.send_followed(peer, frames)
        if has_left is None:
            self.undeliverable += 1
            self._mailbox.release()
        else:
            self._leaving.append((has_left, self._clock.monotonic() + _SLOW_READER_SECONDS))

    def _see_off(self) -> None:
        """Let the puts go on, once for each batch that was expected."""
        while self._leaving and (self._leaving[0][0]() or self._leaving[0][1] <= self._clock.monotonic()):
            self._leaving.popleft()
            self._mailbox.release()


def _is_batch(frames: Frames) -> bool:
    return sum(map(len, frames)) > _BATCH_BYTES
