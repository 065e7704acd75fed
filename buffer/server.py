"""The buffer process: a pipeline of three threads, of which this is the middle one, the writer.

    network ──► mailbox ──► handle a group in one transaction, commit ──► syncer ──► network

While one group is synced to the disk, the next is being written and the one after it received and checked; the record
of a batch is synced while its trajectories are read. A fourth thread, the checkpointer, copies the log into the
database.
The service, its memory and the database belong to the writer alone.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tba.buffer.answer import Answer
from tba.buffer.mailbox import Arrival, Mailbox
from tba.buffer.network import Network
from tba.buffer.service import WRITE_NOTHING, BufferService
from tba.buffer.store import Store
from tba.buffer.syncer import Checkpointer, Syncer
from tba.common.channels import Peer, ServerChannel
from tba.common.clock import Clock
from tba.common.codec import encode_reply
from tba.common.errors import Refused, StorageError, SyncFailed
from tba.common.log import get_logger
from tba.common.wire import Failure, PutAck, SampleBatch

log = get_logger(__name__)

_TURN_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _Reply:
    peer: Peer
    id: int
    answer: Answer


class _Recorded:
    """Instead of an answer: the batch is recorded, and can be read once that is committed."""


_Outcome = Answer | _Recorded | Refused | None


class BufferServer:
    """Joins a channel, a store and a service. `run` is the writer's thread."""

    def __init__(
        self, channel: ServerChannel, store: Store, service: BufferService, clock: Clock, *, queue_bytes: int
    ) -> None:
        self._store = store
        self._service = service
        self._clock = clock
        self._mailbox = Mailbox(queue_bytes)
        self._network = Network(channel, self._mailbox, clock)
        self._syncer = Syncer(store.log.sync, self._network.send)
        self._checkpointer = Checkpointer(store.log, self._mailbox)
        self._parked: list[Arrival] = []
        self._recorded: list[Arrival] = []  # requests for batches that are committed and not yet read
        self._unprepared = False  # a batch was read since the last `prepare_batches`

    def run(self, stop: Callable[[], bool]) -> None:
        """Serve until `stop()`. Raises what ended another thread, if anything did."""
        self._service.open()
        self._network.start()
        self._syncer.start()
        self._checkpointer.start()
        try:
            while not stop() and self._failure is None:
                self.turn(_TURN_SECONDS)
        finally:
            self._checkpointer.stop()
            self._syncer.stop()
            self._network.stop()
        if self._failure is not None:
            raise self._failure

    @property
    def _failure(self) -> BaseException | None:
        return self._network.failure or self._syncer.failure or self._checkpointer.failure

    def turn(self, timeout_seconds: float) -> None:
        """One group: take, commit, answer."""
        was_full = self._mailbox.full
        arrived = self._mailbox.take(timeout_seconds)
        if was_full:
            self._network.resume()
        self._service.queued_bytes = self._mailbox.bytes
        for arrival in arrived:
            self._service.hear(arrival.header, arrival.at)
        if self._mailbox.empty:  # else a sign of life may be among what waits
            self._service.expire_leases()
        self._forget_repeated(arrived)
        due = self._due(arrived)
        # A request that waits for data is tried again with every group; nothing pauses for that.
        asks_batch = any(isinstance(item.message, SampleBatch) for item in arrived)
        with self._batch_first() if asks_batch else contextlib.nullcontext():
            self._pass_on([*self._rejections(), *self._answer(due)])
        if self._unprepared and not self._mailbox.held:
            self._prepare()

    @contextlib.contextmanager
    def _batch_first(self) -> Iterator[None]:
        """Meanwhile nothing is decoded, and the log is not copied unless it is long."""
        self._mailbox.hold()
        try:
            with self._network.decoding:
                yield
        finally:
            self._mailbox.release()

    def _prepare(self) -> None:
        """A batch has left: do what the next one would have to wait for."""
        self._unprepared = False
        try:
            self._service.prepare_batches()
        except Exception:
            log.exception("the next batch could not be prepared")
            self._rebuild()

    def _pass_on(self, replies: list[_Reply]) -> None:
        """To the syncer, which has the records of batches on the disk while these are read here."""
        recorded, self._recorded = self._recorded, []
        if replies or recorded:
            self._sync_and_send(replies)
        if recorded:
            with self._batch_first():
                self._sync_and_send([self._read(item) for item in recorded])
            self._unprepared = True

    def _sync_and_send(self, replies: list[_Reply]) -> None:
        state, run = self._service.state(), self._service.run.uuid
        encoded = [
            (item.peer, encode_reply(item.answer.message, id=item.id, run=run, state=state, frames=item.answer.frames))
            for item in replies
        ]
        self._network.expect(encoded)
        self._syncer.add(encoded)

    def _due(self, arrived: list[Arrival]) -> list[Arrival]:
        """What to try now: if something has changed, all that waits; else only those whose time is over."""
        now = self._clock.monotonic()
        due = [*arrived, *(parked for parked in self._parked if arrived or parked.deadline <= now)]
        self._parked = [] if arrived else [parked for parked in self._parked if parked.deadline > now]
        return due

    def _forget_repeated(self, arrived: Sequence[Arrival]) -> None:
        """A sender waits for one answer of a kind: a newer request replaces the one that waits."""
        again = {(new.header.sender, new.header.type) for new in arrived}
        self._parked = [old for old in self._parked if (old.header.sender, old.header.type) not in again]

    def _answer(self, group: list[Arrival]) -> list[_Reply]:
        """Commit a group; the replies to it. If one request breaks it, the others are done one by one."""
        if not group:
            return []
        try:
            outcomes = self._commit(group)
        except SyncFailed:  # no request's fault
            raise
        except StorageError as error:
            log.error("commit failed", reason=str(error), requests=len(group))
            self._rebuild()
            return self._answer_without_space(group, error)
        except Exception:
            log.exception("a request failed", requests=len(group))
            self._rebuild()
            return self._answer_one_by_one(group)
        replies = [self._reply_to(item, outcome) for item, outcome in zip(group, outcomes, strict=True)]
        return [reply for reply in replies if reply is not None]

    def _answer_without_space(self, group: list[Arrival], error: StorageError) -> list[_Reply]:
        """Refuse what writes; the rest of the group failed only with it."""
        rest = [item for item in group if isinstance(item.message, WRITE_NOTHING)]
        refused = [item for item in group if not isinstance(item.message, WRITE_NOTHING)] or group
        replies = [self._rejection(item.peer, item.header.id, error.code, str(error)) for item in refused]
        return replies if refused is group else [*replies, *self._answer(rest)]

    def _commit(self, group: list[Arrival]) -> list[_Outcome]:
        if all(isinstance(item.message, WRITE_NOTHING) for item in group):
            return [self._outcome(item) for item in group]
        started = time.perf_counter()
        with self._store.transaction():
            outcomes = [self._outcome(item) for item in group]
        self._service.note_commit(time.perf_counter() - started)
        for item, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, Answer) and isinstance(outcome.message, PutAck):
                self._service.note_put(item.header.sender, outcome.message)
        return outcomes

    def _answer_one_by_one(self, group: list[Arrival]) -> list[_Reply]:
        if len(group) == 1:
            return [self._internal(group[0])]
        return [reply for item in group for reply in self._answer([item])]

    def _outcome(self, item: Arrival) -> _Outcome:
        answer: _Outcome
        try:
            if isinstance(item.message, SampleBatch):
                answer = _Recorded() if self._service.record_batch(item.header, item.message) else None
            else:
                answer = self._service.handle(item.header, item.message)
        except Refused as refusal:
            return refusal
        if answer is None and item.deadline <= self._clock.monotonic():
            return self._service.waiting_answer(item.header, item.message)
        return answer

    def _read(self, item: Arrival) -> _Reply:
        """The batch that was recorded for this request."""
        header = item.header
        assert isinstance(item.message, SampleBatch)
        try:
            return _Reply(item.peer, header.id, self._service.read_batch(item.message))
        except Refused as refusal:
            return self._rejection(item.peer, header.id, refusal.code, str(refusal))
        except StorageError as error:
            log.error("a batch could not be read", reason=str(error))
            return self._rejection(item.peer, header.id, error.code, str(error))
        except Exception:
            log.exception("a batch could not be read")
            return self._internal(item)

    def _reply_to(self, item: Arrival, outcome: _Outcome) -> _Reply | None:
        if outcome is None:
            self._parked.append(item)
            return None
        if isinstance(outcome, _Recorded):
            self._recorded.append(item)
            return None
        id_ = item.header.id
        if isinstance(outcome, Refused):
            return self._rejection(item.peer, id_, outcome.code, str(outcome))
        return _Reply(item.peer, id_, outcome)

    def _rejections(self) -> list[_Reply]:
        """What the network refused."""
        refused = self._network.rejections
        if self._network.undeliverable:
            self._service.rejected["undeliverable"] = self._network.undeliverable
        return [self._rejection(*refused.popleft()) for _ in range(len(refused))]

    def _internal(self, item: Arrival) -> _Reply:
        header = item.header
        sentence = f"the buffer failed on {header.type}: its log has the details"
        return self._rejection(item.peer, header.id, "internal", sentence)

    def _rejection(self, peer: Peer, id_: int, code: str, message: str) -> _Reply:
        self._service.rejected[code] += 1
        return _Reply(peer, id_, Answer(Failure(code=code, message=message[:4000])))

    def _rebuild(self) -> None:
        try:
            self._service.rebuild()
        except Exception as error:  # the file is gone or unreadable: going on would be guessing
            raise StorageError(f"the database cannot be read back: {error}") from error
