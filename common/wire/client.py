"""The client of the buffer: sends requests, repeats unanswered ones, and keeps the newest run state.

    posted ──► sent ──► answered
                └── reconnection, timeout, or a transient failure ──► sent again (the same bytes)

Invariant: a posted request is repeated until it is answered, and its caller gets one reply. A client is used by one
thread.
"""

import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tba.common.clock import Clock, SystemClock
from tba.common.errors import BufferUnavailable, Refused, WireError
from tba.common.log import get_logger
from tba.common.system.process import extend_start, notify_systemd
from tba.common.wire.channels import ClientChannel, new_secret
from tba.common.wire.codec import (
    MAX_FRAME_BYTES,
    Frames,
    Reply,
    ReplyHeader,
    decode_reply,
    encode_request,
    request_id_of,
)
from tba.common.wire.fields import Role
from tba.common.wire.keys import ClientKeys
from tba.common.wire.messages import PROTOCOL_VERSION, Failure, Hello, Message, RunState

log = get_logger(__name__)

# What is repaired on the node of the buffer: a full disk, a key that was revoked, another database in the place of the
# run's. The request is sent again.
TRANSIENT = frozenset({"storage", "not_authorised", "wrong_run"})
# A database that is put back comes earlier. Then another run is meant: a service manager's restart joins it.
_WRONG_RUN_SECONDS = 600.0
_RESEND_SECONDS = 3.0
_LONGEST_TIMEOUT_SECONDS = 30.0
# Longer than a busy server takes.
_SILENT_SECONDS = 20.0
_POLL_SECONDS = 0.2
_CONNECT_POLL_SECONDS = 0.05
_WARN_SECONDS = 15.0
# Without any connection yet, the buffer has probably not been started.
_FIRST_WARN_SECONDS = 2.0
M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class _Pending:
    """A request without a reply; `timeout` counts from when it, or one before it, was sent or answered."""

    frames: Frames
    timeout: float
    posted_at: float
    sent_at: float | None = None
    progress_at: float = -math.inf

    @property
    def due_at(self) -> float:
        """When to send the request again, once it was sent."""
        assert self.sent_at is not None
        return max(self.sent_at, self.progress_at) + self.timeout


class BufferClient:
    """One connection to the buffer.

    `sender` is the wire identity: by default unique for this start of the process, or that of a client to act for. The
    buffer lets only connections with the `secret` of its first one use it. `trouble` is the sentence of the last
    transient failure, empty once a request succeeds.
    """

    def __init__(
        self,
        address: str,
        *,
        role: Role,
        name: str,
        sender: str = "",
        secret: bytes = b"",
        run: str = "",
        keys: ClientKeys | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.address = address
        self.role: Role = role
        self.sender = sender or f"{name}.{uuid.uuid4().hex[:8]}"
        self.secret = secret or new_secret()
        self.run = run
        self.keys = keys
        self.state: RunState | None = None
        self.trouble = ""
        # Monotonic time since which the buffer has served another run; None if it serves that of this client.
        self._wrong_since: float | None = None
        self._clock = clock or SystemClock()
        self._channel = ClientChannel(address, secret=self.secret, keys=keys)
        self._pending: dict[int, _Pending] = {}
        # Requests of `ask_ahead`, with the replies that arrived while another was awaited.
        self._ahead: dict[int, Reply | None] = {}
        # Monotonic time before which no pending request needs to be sent.
        self._due_at = -math.inf
        self._connections = 0
        self._last_id = 0
        self._last_reply_at = self._clock.monotonic()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last reply of the buffer."""
        return self._clock.monotonic() - self._last_reply_at

    @property
    def unanswered_seconds(self) -> float:
        """Seconds that a request has been pending without any reply arriving, as of the last `poll`."""
        oldest = next(iter(self._pending.values()), None)
        return self._clock.monotonic() - max(self._last_reply_at, oldest.posted_at) if oldest else 0.0

    def post(self, message: Message, frames: Sequence[bytes] = ()) -> int:
        """Send a request without waiting. Returns its id, which the reply carries."""
        id_, encoded = self.encode(message, frames)
        self.post_encoded(id_, encoded, wait_seconds=getattr(message, "wait_seconds", 0.0))
        return id_

    def encode(self, message: Message, frames: Sequence[bytes] = ()) -> tuple[int, Frames]:
        """Return the id and the frames of a request, to be posted once, now or later."""
        self._last_id += 1
        return self._last_id, encode_request(
            message, id=self._last_id, role=self.role, sender=self.sender, run=self.run, frames=frames
        )

    def post_encoded(self, id_: int, encoded: Frames, *, wait_seconds: float = 0.0) -> None:
        """Send the frames from `encode` without waiting. They may be of an earlier client of this sender."""
        self._last_id = max(self._last_id, id_)
        self._pending[id_] = _Pending(encoded, _RESEND_SECONDS + wait_seconds, self._clock.monotonic())
        self._due_at = -math.inf
        self._send_due()

    def is_pending(self, id_: int | None) -> bool:
        """Whether a posted request has no reply yet."""
        return id_ in self._pending

    def poll(self, timeout_seconds: float) -> list[Reply]:
        """Return the replies that have arrived, and resend requests that are due.

        Waits for the first until the timeout: only then is the list empty.
        """
        deadline = time.monotonic() + timeout_seconds
        # Received replies first: after a long pause of the caller their requests would be sent again.
        replies = self._received(0.0)
        while not replies:
            # Without a connection, look for one more often.
            pause = _POLL_SECONDS if self._send_due() else _CONNECT_POLL_SECONDS
            remaining = deadline - time.monotonic()
            replies = self._received(min(remaining, pause))
            if remaining <= 0:
                break
        return replies

    def call(
        self,
        message: Message,
        expect: type[M],
        *,
        frames: Sequence[bytes] = (),
        deadline_seconds: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[M, list[memoryview]]:
        """Send a request and wait for its reply; replies to other posts are dropped. Without a deadline, forever.

        Raises Refused if the buffer refuses, BufferUnavailable after the deadline or when `stop()`.
        """
        return self._wait_for(self.post(message, frames), expect, deadline_seconds, stop)

    def ask_ahead(self, message: Message) -> int:
        """Send a request without waiting. Its reply is kept for `collect`, even if it arrives during another call."""
        id_ = self.post(message)
        self._ahead[id_] = None
        return id_

    def collect(self, id_: int, expect: type[M], stop: Callable[[], bool]) -> tuple[M, list[memoryview]]:
        """Return the reply to a request of `ask_ahead`. Raises BufferUnavailable when `stop()`, or Refused."""
        return self._wait_for(id_, expect, None, stop)

    def _wait_for(
        self, wanted: int, expect: type[M], deadline_seconds: float | None, stop: Callable[[], bool]
    ) -> tuple[M, list[memoryview]]:
        started = self._clock.monotonic()
        warn_at = started + (_WARN_SECONDS if self._channel.connections else _FIRST_WARN_SECONDS)
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
                why = self.obstacle or f"no answer for {self.silent_seconds:.0f} s: is `tba buffer serve` running?"
                raise BufferUnavailable(f"the buffer at {self.address}: {why}")
            if reply is None and deadline_seconds is None and now > warn_at:
                reason = self.obstacle or f"{self.address} does not answer: is `tba buffer serve` running?"
                log.warning("waiting for the buffer", silent_seconds=self.silent_seconds, reason=reason)
                notify_systemd(f"STATUS=waiting for the buffer: {reason}")
                extend_start()
                warn_at = now + _WARN_SECONDS
        if isinstance(reply.message, Failure):
            raise Refused(reply.message.code, reply.message.message)
        if not isinstance(reply.message, expect):
            raise Refused("unexpected", f"the buffer answered {reply.message.TYPE}, expected {expect.TYPE}")
        return reply.message, reply.frames

    def close(self) -> None:
        """Close the connection. Unanswered requests are lost unless the caller keeps them."""
        self._channel.close()

    @property
    def obstacle(self) -> str:
        """Why requests are not answered, empty if that is not known."""
        return self.trouble or self._channel.trouble

    def _received(self, wait_seconds: float) -> list[Reply]:
        """Return the replies that have arrived. Waits for a first message, which may be none that is wanted."""
        replies = []
        frames = self._channel.receive(wait_seconds)
        while frames is not None:
            if (reply := self._accept(frames)) is not None:
                replies.append(reply)
            frames = self._channel.receive(0)
        return replies

    def _send_due(self) -> bool:
        """Send requests that were never sent or have timed out. Returns False if there is no connection."""
        now = self._clock.monotonic()
        self._notice_reconnection()
        if now < self._due_at:
            return True
        due_at = math.inf
        for pending in self._pending.values():
            if pending.sent_at is None or now >= pending.due_at:
                if pending.sent_at is not None and now - pending.posted_at >= _SILENT_SECONDS:
                    self._channel.renew(_SILENT_SECONDS)
                if not self._channel.send(pending.frames):
                    return False
                # Exponential backoff: the request may only be queued behind others.
                if pending.sent_at is not None:
                    pending.timeout = min(2 * pending.timeout, _LONGEST_TIMEOUT_SECONDS)
                pending.sent_at = now
            due_at = min(due_at, pending.due_at)
        self._due_at = due_at
        return True

    def _notice_reconnection(self) -> None:
        """After a reconnection send every pending request again, in the order of posting: any may be lost."""
        if self._channel.connections == self._connections:
            return
        first, self._connections = self._connections == 0, self._channel.connections
        for pending in self._pending.values() if not first else ():
            pending.sent_at = None
        self._due_at = -math.inf

    def _unreadable(self, frames: list[memoryview], error: WireError) -> Reply | None:
        """Return a Failure instead of a malformed reply to a pending request: repeated, it would be malformed again."""
        id_ = request_id_of(frames, MAX_FRAME_BYTES)
        if self._pending.pop(id_, None) is None:
            log.warning("reply dropped", reason=str(error))
            return None
        state = self.state or RunState(weights=None, step=0, finished=False)
        header = ReplyHeader(v=PROTOCOL_VERSION, type=Failure.TYPE, id=id_, run=self.run, state=state)
        sentence = f"the buffer at {self.address} sent a reply that cannot be read: {error}"
        return Reply(header, Failure(code=error.code, message=sentence), [])

    def _may_pass(self, code: str) -> bool:
        """Whether a failure of this code, "" for none, may pass without a restart of this process."""
        if code != "wrong_run":
            self._wrong_since = None
            return code in TRANSIENT
        self._wrong_since = self._wrong_since or self._last_reply_at
        return self._last_reply_at - self._wrong_since <= _WRONG_RUN_SECONDS

    def _accept(self, frames: list[memoryview]) -> Reply | None:
        try:
            reply = decode_reply(frames)
        except WireError as error:
            return self._unreadable(frames, error)
        self._last_reply_at = self._clock.monotonic()
        self.run = self.run or reply.header.run
        # Not that of another run.
        if reply.header.run in ("", self.run):
            self.state = reply.header.state
        failure = reply.message if isinstance(reply.message, Failure) else None
        if self._may_pass(failure.code if failure else "") and failure:
            self.trouble = failure.message
            log.warning("the buffer refuses a request, which is sent again", by=self.address, reason=self.trouble)
            return None
        self.trouble = ""
        if self._pending.pop(reply.header.id, None) is None:
            return None
        # Restart the timeout of later requests: a busy server is working through the queue to them.
        for id_, pending in self._pending.items():
            if id_ > reply.header.id:
                pending.progress_at = self._last_reply_at
        return reply


def make_hello(run_name: str = "") -> Hello:
    """Return the introduction of this process, to the buffer of a run, by default of any."""
    return Hello(host=socket.gethostname(), pid=os.getpid(), run_name=run_name)
