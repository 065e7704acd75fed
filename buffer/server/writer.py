"""The buffer process: two threads. This is the writer.

    network ──► mailbox ──► handle all that has arrived in one transaction, commit ──► network

While a group is written and synced, the network thread receives and checks the next one. Only the writer uses the
service and the database. Invariant: a reply leaves only after its transaction is on the disk.
"""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from tba.buffer.server.mailbox import Arrival, Mailbox, Parked
from tba.buffer.server.network import Network
from tba.buffer.service.admission import Admission, owner_of
from tba.buffer.service.run_state import ReplyBody
from tba.buffer.service.service import BufferService
from tba.buffer.service.stall import StallWatch
from tba.common.errors import Refused, StorageError, SyncFailed
from tba.common.log import get_logger
from tba.common.run_status import Facts, describe
from tba.common.system.process import notify_systemd
from tba.common.system.watchdog import Watchdog
from tba.common.wire import messages
from tba.common.wire.channels import Peer, ServerChannel
from tba.common.wire.codec import encode_reply

if TYPE_CHECKING:
    from tba.buffer.server.prometheus import MetricsEndpoint

log = get_logger(__name__)

_POLL_SECONDS = 0.1
# Without requests, this is also how often the files of the database are looked at.
_STALLS_SECONDS = 0.5


# To whom, to which request, and what.
_Reply = tuple[Peer, int, ReplyBody]
# None: the request is parked.
_Outcome = ReplyBody | Refused | None


class BufferServer:
    """Connects a channel with a service. `run` is the writer thread; `queue_bytes` limits unanswered requests."""

    def __init__(
        self,
        channel: ServerChannel,
        service: BufferService,
        *,
        queue_bytes: int,
        endpoint: "MetricsEndpoint | None" = None,
    ) -> None:
        self._channel = channel
        self._service = service
        self._clock = service.state.clock
        self._mailbox = Mailbox(queue_bytes)
        self._network = Network(channel, self._mailbox, self._clock)
        self._admission = Admission(service.state.clients, channel.keys.admitted if channel.keys else None)
        self._parked = Parked()
        self._stalls = StallWatch(self._clock)
        self._endpoint = endpoint
        self._look_for_stalls_at = -math.inf
        # When to look for overdue requests and expired leases again: that takes a look at all of them.
        self._look_at = self._expire_at = -math.inf

    def run(self, stop: Callable[[], bool]) -> None:
        """Serve until `stop()`. Raises the failure of the network thread."""
        self._service.state.clients.open()
        watchdog = Watchdog()
        thread = self._network.thread
        thread.start()
        try:
            while not stop() and not thread.failure:
                self.serve_group(_POLL_SECONDS)
                self._look_for_stalls()
                watchdog.beat()
        finally:
            thread.stop()
        thread.check()

    def _look_for_stalls(self) -> None:
        """Find the stall of the run twice a second, and show it to systemd."""
        now = self._clock.monotonic()
        if now < self._look_for_stalls_at:
            return
        self._look_for_stalls_at = now + _STALLS_SECONDS
        try:
            status = self._service.status()
        except SyncFailed:
            raise
        # The free space is unknown. A later request that needs it is refused.
        except StorageError as error:
            log.warning("no status of the run", reason=str(error))
            return
        self._stalls.update(status.stall)
        self._service.counters.stalled_seconds = self._stalls.seconds
        if self._endpoint is not None:
            self._endpoint.show_run(status, self._service.state.pace.steps, self._clock.wall())
        notify_systemd(f"STATUS=step {status.step}: {describe(Facts(status)).sentence}")

    def serve_group(self, timeout_seconds: float) -> None:
        """Handle one group of requests: take it, commit it, hand its replies to the network thread."""
        was_full = self._mailbox.full
        arrived = self._mailbox.take(timeout_seconds)
        if was_full:
            # The network may read again.
            self._channel.wake()
        arrived, replies = self._admit(arrived)
        # Leases expire only when the queue is empty: it may hold a heartbeat of their holder.
        if self._mailbox.empty and self._clock.monotonic() >= self._expire_at:
            self._expire_at = self._clock.monotonic() + _STALLS_SECONDS
            self._service.expire_leases()
        counters = self._service.counters
        counters.queued_bytes = self._mailbox.bytes
        if self._mailbox.dropped:
            counters.rejected["too_many"] = self._mailbox.dropped
        if self._network.undeliverable:
            counters.rejected["undeliverable"] = self._network.undeliverable
        refused = self._network.rejections
        replies += [self._rejection(*refused.popleft()) for _ in range(len(refused))]
        # These do not wait for the transaction of the rest. A goodbye does: it comes after what its sender wrote.
        quick: list[Arrival] = []
        rest: list[Arrival] = []
        for item in arrived:
            (quick if isinstance(item.message, messages.GetStatus | messages.Heartbeat) else rest).append(item)
        self._send(replies + self._answer(quick))
        started = time.monotonic()
        replies = self._answer(rest)
        # A key may have been revoked meanwhile.
        woken, refusals = self._admit(self._woken(has_news=bool(arrived)))
        replies += refusals + self._answer(woken)
        if any(arrival.is_batch for arrival in arrived):
            self._mailbox.note_batch(time.monotonic() - started)
        self._send(replies)
        # After the replies, which would wait for it longer than for their transaction.
        self._service.state.store.database.checkpoint()

    def _send(self, replies: list[_Reply]) -> None:
        if not replies:
            return
        run, state = self._service.state.run.uuid, self._service.state.for_replies()
        encoded = [
            (peer, encode_reply(body.message, id=id_, run=run, state=state, frames=body.frames))
            for peer, id_, body in replies
        ]
        self._network.send(encoded)

    def _admit(self, arrived: list[Arrival]) -> tuple[list[Arrival], list[_Reply]]:
        """Return the requests that their connections may send, whose senders count as seen, and refusals of others."""
        admitted, refusals = [], []
        for item in arrived:
            try:
                self._admission.check(item.peer, item.header)
            except Refused as refusal:
                refusals.append(self._rejection(item.peer, item.header.id, refusal.code, str(refusal)))
                continue
            header = item.header
            # A client of another run, which the service refuses, is none of this run's.
            is_own = header.run in ("", self._service.state.run.uuid)
            if is_own and not self._service.is_misdirected(item.message):
                self._service.state.clients.mark_seen(header.sender, header.role, item.at, owner_of(item.peer, header))
            self._parked.forget_older(item)
            admitted.append(item)
        return admitted, refusals

    def _woken(self, *, has_news: bool) -> list[Arrival]:
        """Remove and return the parked requests that may have an answer now, or are past their deadline.

        Leases wake when there is room for them. Any new request may have brought what a batch needs.
        """
        woken: list[Arrival] = []
        if leases := self._parked.of_type(messages.LeasePrompts.TYPE):
            waiting = ((sender, cast(messages.LeasePrompts, item.message)) for sender, item in leases.items())
            woken += [leases[sender] for sender in self._service.leasing.with_room(waiting)]
        if has_news:
            woken += self._parked.of_type(messages.SampleBatch.TYPE).values()
        for item in woken:
            self._parked.remove(item)
        now = self._clock.monotonic()
        if now >= self._look_at:
            self._look_at = now + _POLL_SECONDS
            woken += self._parked.take_overdue(now)
        return woken

    def _answer(self, group: list[Arrival]) -> list[_Reply]:
        """Commit a group and return the replies. If one request breaks it, each is handled by itself."""
        if not group:
            return []
        try:
            outcomes = self._commit(group)
        # Not the fault of a request, and no later commit could be trusted.
        except SyncFailed:
            raise
        except StorageError as error:
            log.error("commit failed", reason=str(error), requests=len(group))
            self._service.counters.storage_error = f"{error}; check that disk and the permissions of the directory"
            self._rebuild()
            return self._answer_without_space(group, error)
        except Exception:
            log.exception("a request failed", requests=len(group))
            self._rebuild()
            if len(group) == 1:
                sentence = f"the buffer failed on {group[0].header.type}: its log has the details"
                return [self._rejection(group[0].peer, group[0].header.id, "internal", sentence)]
            return [reply for item in group for reply in self._answer([item])]
        replies = [self._reply_to(item, outcome) for item, outcome in zip(group, outcomes, strict=True)]
        return [reply for reply in replies if reply is not None]

    def _answer_without_space(self, group: list[Arrival], error: StorageError) -> list[_Reply]:
        """Refuse the requests that write. The others failed only because they shared the transaction."""
        rest = [item for item in group if self._service.writes_nothing(item.message)]
        refused = [item for item in group if not self._service.writes_nothing(item.message)] or group
        replies = [self._rejection(item.peer, item.header.id, error.code, str(error)) for item in refused]
        return replies if refused is group else [*replies, *self._answer(rest)]

    def _commit(self, group: list[Arrival]) -> list[_Outcome]:
        if all(self._service.writes_nothing(item.message) for item in group):
            return [self._outcome(item) for item in group]
        with self._service.transaction():
            return [self._outcome(item) for item in group]

    def _outcome(self, item: Arrival) -> _Outcome:
        try:
            body = self._service.handle(item.header, item.message)
        except Refused as refusal:
            return refusal
        if body is None and item.deadline <= self._clock.monotonic():
            return self._service.timeout_reply(item.header, item.message)
        return body

    def _reply_to(self, item: Arrival, outcome: _Outcome) -> _Reply | None:
        if outcome is None and self._parked.add(item):
            return None
        if outcome is None:
            outcome = self._service.timeout_reply(item.header, item.message)
        if isinstance(outcome, Refused):
            return self._rejection(item.peer, item.header.id, outcome.code, str(outcome))
        return item.peer, item.header.id, outcome

    def _rejection(self, peer: Peer, id_: int, code: str, message: str) -> _Reply:
        self._service.counters.rejected[code] += 1
        return peer, id_, ReplyBody(messages.Failure(code=code, message=message[:4000]))

    def _rebuild(self) -> None:
        try:
            self._service.state.rebuild()
        # The file is gone or unreadable: without it the memory would be a guess.
        except Exception as error:
            raise StorageError(f"the database cannot be read back: {error}") from error
