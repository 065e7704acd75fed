"""The client of the buffer: sends requests, repeats those that got no answer, and keeps the newest run state.

    posted ──► sent ──► answered
                └── a new connection, no answer in time, or a passing failure ──► sent again (the same bytes)

Invariant: a posted request is repeated until it is answered, and it is answered to its caller once.
Used by one thread.
"""

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tba.common.channels import ClientChannel
from tba.common.clock import Clock, SystemClock
from tba.common.codec import Frames, Reply, decode_reply, encode_request
from tba.common.errors import BufferUnavailable, Refused, WireError
from tba.common.log import get_logger
from tba.common.wire import Failure, Message, Role, RunState

log = get_logger(__name__)

# Failures that pass by themselves, such as a full disk: the request is sent again.
TRANSIENT = frozenset({"storage"})
_RESEND_SECONDS = 3.0
_LONGEST_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.2
_CONNECT_POLL_SECONDS = 0.05
_WARN_SECONDS = 15.0
M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class _Pending:
    frames: Frames
    patience: float  # seconds until the request is sent again
    posted_at: float
    sent_at: float | None = None
    turn_at: float = -math.inf  # when one that was posted before it was last answered

    @property
    def due_at(self) -> float:
        """When to send it again, once it was sent."""
        assert self.sent_at is not None
        return max(self.sent_at, self.turn_at) + self.patience


class BufferClient:
    """One connection to the buffer. `sender` names this start of this process, unless it speaks for another."""

    def __init__(
        self, address: str, *, role: Role, name: str, sender: str = "", run: str = "", clock: Clock | None = None
    ) -> None:
        self.address = address
        self.role: Role = role
        self.sender = sender or f"{name}.{uuid.uuid4().hex[:8]}"
        self.run = run
        self.state: RunState | None = None
        self.trouble = ""  # the last passing failure, empty when all is well
        self._clock = clock or SystemClock()
        self._channel = ClientChannel(address)
        self._pending: dict[int, _Pending] = {}
        self._ahead: dict[int, Reply | None] = {}  # asked ahead, and the replies that came while others were awaited
        self._due_at = -math.inf  # monotonic: nothing that is pending has to be sent before
        self._connections = 0
        self._last_id = 0
        self._heard_at = self._clock.monotonic()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the buffer last answered anything."""
        return self._clock.monotonic() - self._heard_at

    @property
    def unanswered_seconds(self) -> float:
        """Seconds that something has been asked and nothing was heard, as of the last `poll`."""
        oldest = next(iter(self._pending.values()), None)
        return self._clock.monotonic() - max(self._heard_at, oldest.posted_at) if oldest else 0.0

    def post(self, message: Message, frames: Sequence[bytes] = ()) -> int:
        """Send without waiting. Returns the id that the reply will carry."""
        id_, encoded = self.encode(message, frames)
        self.post_encoded(id_, encoded, wait_seconds=getattr(message, "wait_seconds", 0.0))
        return id_

    def encode(self, message: Message, frames: Sequence[bytes] = ()) -> tuple[int, Frames]:
        """The id and the bytes of a request, to be posted once, now or later."""
        self._last_id += 1
        return self._last_id, encode_request(
            message, id=self._last_id, role=self.role, sender=self.sender, run=self.run, frames=frames
        )

    def post_encoded(self, id_: int, encoded: Frames, *, wait_seconds: float = 0.0) -> None:
        """Send without waiting what `encode` gave, of this client or of an earlier one of this sender."""
        self._last_id = max(self._last_id, id_)
        self._pending[id_] = _Pending(encoded, _RESEND_SECONDS + wait_seconds, self._clock.monotonic())
        self._due_at = -math.inf
        self._send_due()

    def is_pending(self, id_: int | None) -> bool:
        """Whether a posted request has no answer yet."""
        return id_ in self._pending

    def poll(self, timeout_seconds: float) -> list[Reply]:
        """The replies that have arrived; waits for the first one at most the timeout. Resends what is due."""
        replies = []
        frames = self._first_reply(timeout_seconds)
        while frames is not None:
            if (reply := self._accept(frames)) is not None:
                replies.append(reply)
            frames = self._channel.receive(0)
        return replies

    def call(
        self,
        message: Message,
        expect: type[M],
        *,
        deadline_seconds: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[M, list[memoryview]]:
        """Send and wait for the reply. Replies to other requests that arrive meanwhile are dropped.

        Raises Refused if the buffer says no, BufferUnavailable after the deadline or when `stop()`.
        """
        return self._wait_for(self.post(message), expect, deadline_seconds, stop)

    def ask_ahead(self, message: Message) -> int:
        """Send without waiting. The reply is kept for `collect`, also if it comes while another one is awaited."""
        id_ = self.post(message)
        self._ahead[id_] = None
        return id_

    def collect(self, id_: int, expect: type[M], stop: Callable[[], bool]) -> tuple[M, list[memoryview]]:
        """The reply to what was asked ahead, waiting as long as it takes; says so now and then.

        Raises BufferUnavailable only when `stop()`, Refused if the buffer says no.
        """
        return self._wait_for(id_, expect, None, stop)

    def _wait_for(
        self, wanted: int, expect: type[M], deadline_seconds: float | None, stop: Callable[[], bool]
    ) -> tuple[M, list[memoryview]]:
        started = self._clock.monotonic()
        warn_at = started + _WARN_SECONDS
        reply = self._ahead.pop(wanted, None)
        while reply is None:
            for other in self.poll(_POLL_SECONDS):
                if other.header.id == wanted:
                    reply = other
                elif other.header.id in self._ahead:
                    self._ahead[other.header.id] = other
            now = self._clock.monotonic()
            late = deadline_seconds is not None and now - started > deadline_seconds
            if reply is None and (late or stop()):
                self._pending.pop(wanted, None)
                why = self.trouble or f"no answer for {self.silent_seconds:.0f} s: is `tba buffer serve` running?"
                raise BufferUnavailable(f"the buffer at {self.address}: {why}")
            if reply is None and deadline_seconds is None and now > warn_at:
                log.warning("waiting for the buffer", silent_seconds=self.silent_seconds, reason=self.trouble)
                warn_at = now + _WARN_SECONDS
        return _expected(reply, expect), reply.frames

    def ask(self, message: Message, expect: type[M], stop: Callable[[], bool]) -> tuple[M, list[memoryview]]:
        """Send until it is answered, however long the buffer is away; says so now and then.

        Raises BufferUnavailable only when `stop()`, Refused if the buffer says no.
        """
        while True:
            try:
                return self.call(message, expect, deadline_seconds=_WARN_SECONDS, stop=stop)
            except BufferUnavailable as error:
                if stop():
                    raise
                log.warning("waiting for the buffer", request=message.TYPE, reason=str(error))

    def close(self) -> None:
        """Close the connection. What was posted and not answered is the caller's to keep."""
        self._channel.close()

    def _first_reply(self, timeout_seconds: float) -> list[memoryview] | None:
        """Wait for a reply, and send what becomes due meanwhile; look often while the buffer is not there."""
        deadline = self._clock.monotonic() + timeout_seconds
        # What has arrived counts first: after a long pause of the caller it would be asked for again.
        if (frames := self._channel.receive(0)) is not None:
            return frames
        while True:
            pause = _POLL_SECONDS if self._send_due() else _CONNECT_POLL_SECONDS
            remaining = deadline - self._clock.monotonic()
            frames = self._channel.receive(min(remaining, pause))
            if frames is not None or remaining <= pause:
                return frames

    def _send_due(self) -> bool:
        """Send what was never sent or waits for too long. False if there is no connection to send on."""
        now = self._clock.monotonic()
        self._notice_reconnection()
        if now < self._due_at:
            return True
        due_at = math.inf
        for pending in self._pending.values():
            if pending.sent_at is None or now >= pending.due_at:
                if not self._channel.send(pending.frames):
                    return False
                if pending.sent_at is not None:  # it may wait behind others: asking ever more often does not help
                    pending.patience = min(2 * pending.patience, _LONGEST_PATIENCE_SECONDS)
                pending.sent_at = now
            due_at = min(due_at, pending.due_at)
        self._due_at = due_at
        return True

    def _notice_reconnection(self) -> None:
        """What was under way when a connection ended may be lost: send it again at once, in the order of posting."""
        if self._channel.connections == self._connections:
            return
        first, self._connections = self._connections == 0, self._channel.connections
        for pending in self._pending.values() if not first else ():
            pending.sent_at = None
        self._due_at = -math.inf

    def _accept(self, frames: list[memoryview]) -> Reply | None:
        try:
            reply = decode_reply(frames)
        except WireError as error:
            log.warning("reply dropped", reason=str(error))
            return None
        self._heard_at = self._clock.monotonic()
        self.run = self.run or reply.header.run
        self.state = reply.header.state
        if isinstance(reply.message, Failure) and reply.message.code in TRANSIENT:
            self.trouble = reply.message.message
            return None
        self.trouble = ""
        if self._pending.pop(reply.header.id, None) is None:
            return None
        self._note_progress(reply.header.id)
        return reply

    def _note_progress(self, answered: int) -> None:
        """What was posted after this waits its turn at a busy server: to send it again would only add to that."""
        for id_, pending in self._pending.items():
            if id_ > answered:
                pending.turn_at = self._heard_at


def _expected(reply: Reply, expect: type[M]) -> M:
    if isinstance(reply.message, Failure):
        raise Refused(reply.message.code, reply.message.message)
    if not isinstance(reply.message, expect):
        raise Refused("unexpected", f"the buffer answered {reply.message.TYPE} where {expect.TYPE} was due")
    return reply.message
