"""What the buffer does with each message, without sockets: requests in, answers out, in one transaction.

    BufferService ──► Leasing, Puts, Training ──► ServedRun ──► Store

The handlers write through the store and update the memory beside it (index, leases, versions). If the
transaction fails, the memory is rebuilt from the file: it never says more than what is committed.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from tba.buffer.answer import Answer
from tba.buffer.clients import GONE
from tba.buffer.history import History
from tba.buffer.leasing import Leasing
from tba.buffer.puts import Puts
from tba.buffer.rows import PutColumns
from tba.buffer.served_run import ServedRun
from tba.buffer.store import Store
from tba.buffer.tables.runs import Run
from tba.buffer.training import Training
from tba.common import wire
from tba.common.clock import Clock
from tba.common.codec import RequestHeader
from tba.common.config import Config
from tba.common.errors import Refused
from tba.common.log import get_logger

log = get_logger(__name__)

_RATE_SECONDS = 10.0  # that `puts_per_second` is a mean over
_COMMITS = 100  # transactions that the status takes the mean of
WRITE_NOTHING = (wire.GetStatus, wire.Heartbeat, wire.Goodbye)  # and so they need neither space nor a transaction


class BufferService:
    """The buffer of one run. `handle` and `record_batch` belong into a `store.transaction()`, but for WRITE_NOTHING.

    The `history` that batches are sampled from is the run's own, if none is given.
    """

    def __init__(self, store: Store, run: Run, config: Config, clock: Clock, history: History | None = None) -> None:
        self._served = ServedRun(store, run, config, clock, history or History())
        self._store = store
        self._run = run
        self._clock = clock
        self._clients = self._served.clients
        self._leasing = Leasing(self._served)
        self._puts = Puts(self._served)
        self._training = Training(self._served)
        self._started = clock.monotonic()
        self.rejected: Counter[str] = Counter()  # messages that got an error reply, by code
        self._duplicates = 0
        self._put_times: deque[tuple[float, int]] = deque()  # (monotonic, rows) of the last seconds
        self.queued_bytes = 0  # told by the server, for the status
        self._commit_seconds: deque[float] = deque(maxlen=_COMMITS)
        self._handlers: dict[type[wire.Message | PutColumns], Callable[[Any, str], Answer | None]] = {
            PutColumns: self._puts.put,
            wire.Hello: self._hello,
            wire.RegisterPrompts: self._leasing.register_prompts,
            wire.LeasePrompts: self._leasing.lease_prompts,
            wire.SampleBatch: self._training.sample_batch,
            wire.ReportStep: self._training.report_step,
            wire.AnnounceSnapshot: self._training.announce_snapshot,
            wire.FinishRun: self._training.finish_run,
            wire.Heartbeat: self._heartbeat,
            wire.Goodbye: self._goodbye,
        }

    @property
    def run(self) -> Run:
        """The run that is served."""
        return self._run

    def open(self) -> None:
        """Messages can come from now on. To build the index may have taken longer than a sender has to come back."""
        self._clients.open()

    def rebuild(self) -> None:
        """Make the memory anew from the committed database."""
        self._served.rebuild()

    def state(self) -> wire.RunState:
        """What every reply carries."""
        return wire.RunState(weights=self._served.newest, step=self._served.steps_done, finished=self._served.finished)

    def hear(self, header: RequestHeader, at: float | None = None) -> None:
        """A sender was alive at this monotonic time. Said once for each message, not when a waiting one is retried."""
        self._clients.hear(header.sender, header.role, self._clock.monotonic() if at is None else at)

    def handle(self, header: RequestHeader, message: wire.Message | PutColumns) -> Answer | None:
        """Answer a message (of `rows.service_message`), or None if it should be asked again when something changed.

        Raises Refused with a code and a sentence.
        """
        self._refuse_stranger(header)
        if isinstance(message, wire.GetStatus):
            return Answer(self.status())
        return self._handlers[type(message)](message, header.sender)

    def record_batch(self, header: RequestHeader, message: wire.SampleBatch) -> bool:
        """The first half of `handle` for a batch: False if there is too little data for it. Raises Refused."""
        self._refuse_stranger(header)
        return self._training.record_batch(message)

    def read_batch(self, message: wire.SampleBatch) -> Answer:
        """The other half, which takes longer, and no transaction: the record is committed. Raises Refused."""
        return self._training.read_batch(message)

    def prepare_batches(self) -> None:
        """Do now what the next batch would have to wait for: it changes no batch."""
        self._training.prepare_batches()

    def _refuse_stranger(self, header: RequestHeader) -> None:
        if header.run not in ("", self._run.uuid):
            raise Refused("wrong_run", f"this buffer serves run {self._run.name}; the sender belongs to another one")
        if (host := self._clients.successor_host(header.sender)) is not None:
            raise Refused(
                "trainer_exists",
                f"a trainer on {host} took over run {self._run.name} while this one was not heard of: what this one "
                "did since then does not count",
            )

    def note_commit(self, seconds: float) -> None:
        """A transaction, with what was done in it, took so long."""
        self._commit_seconds.append(seconds)

    def note_put(self, sender: str, ack: wire.PutAck) -> None:
        """A put was committed: counted only now, since one that fails comes again."""
        client = self._clients[sender]
        client.trajectories += ack.stored
        client.duplicates += ack.duplicates
        self._duplicates += ack.duplicates
        self._put_times.append((self._clock.monotonic(), ack.stored))
        self._forget_old_puts()

    def expire_leases(self) -> None:
        """Take the leases of senders that fell silent, and forget senders that are long gone."""
        for sender in {visit.sender for visit in self._served.leases.open.values() if visit.sender is not None}:
            if self._clients.is_silent(sender):
                log.warning("leases expired", sender=sender, leases=self._served.leases.release(sender))
        self._clients.forget_long_gone()

    def _hello(self, message: wire.Hello, sender: str) -> Answer:
        client = self._clients[sender]
        if client.role == "trainer" and (other := self._clients.other_trainer(sender)) is not None:
            raise Refused(
                "trainer_exists",
                f"a trainer on {other.host} is at work on run {self._run.name}: stop it, or give this run another "
                "run.name and buffer.address",
            )
        client.host = message.host
        if client.activity == GONE:
            client.activity, client.reason = "connected", ""
        self._served.sender_id(sender)
        self._store.senders.describe(sender, message.host, message.pid)
        self._clients.replace_earlier(sender)
        if client.role == "trainer":
            self._clients.admit_trainers(self._store.senders.trainers(self._run))
            # It may have been told to make more steps.
            self._store.runs.finish(self._run, None)
            self._served.finished = False
        newest = self._served.newest.version + 1 if self._served.newest else 0
        recorded = self._store.batches.recorded_steps(self._run)
        return Answer(wire.Welcome(run_name=self._run.name, next_version=newest, recorded_steps=recorded))

    def _heartbeat(self, message: wire.Heartbeat, sender: str) -> Answer:
        client = self._clients[sender]
        if client.role == "trainer" and client.activity == GONE:
            # Said before the goodbye and handled after it, on another connection: only a hello brings it back.
            return Answer(wire.Done())
        client.activity, client.reason = message.activity, message.reason
        client.weights_version, client.metrics = message.weights_version, message.metrics
        return Answer(wire.Done())

    def _goodbye(self, _: wire.Goodbye, sender: str) -> Answer:
        self._served.leases.release(sender)
        client = self._clients[sender]
        client.activity, client.reason = GONE, "it said goodbye"
        return Answer(wire.Done())

    def sampleable(self) -> set[int]:
        """Ids of the trajectories that can be sampled."""
        return {entry.id for prompt in self._served.index.prompts() for entry in self._served.index.entries(prompt)}

    def waiting_answer(self, header: RequestHeader, message: wire.Message | PutColumns) -> Answer:
        """What a request hears whose time to wait is over."""
        if isinstance(message, wire.SampleBatch):
            return Answer(wire.NotReady(reason=self._training.waits_for))
        return Answer(wire.Leases(visits=[], reason=self._clients[header.sender].held_back))

    def status(self) -> wire.Status:
        """Counts and clients."""
        now = self._clock.monotonic()
        self._forget_old_puts()
        return wire.Status(
            run_name=self._run.name,
            step=self._served.steps_done,
            finished=self._served.finished,
            uptime_seconds=now - self._started,
            epoch=self._served.leases.epoch,
            prompts=len(self._served.prompt_ids),
            trajectories=self._served.trajectories,
            errors=self._served.errors,
            duplicates=self._duplicates,
            sampleable=len(self._served.index),
            puts_per_second=sum(rows for _, rows in self._put_times) / _RATE_SECONDS,
            database_bytes=self._store.database.size_bytes(),
            queued_bytes=self.queued_bytes,
            commit_seconds=sum(self._commit_seconds) / max(1, len(self._commit_seconds)),
            rejected=dict(self.rejected),
            trainer_waits_for=self._training.waits_for,
            clients=self._clients.status(self._served.leases.held_by),
        )

    def _forget_old_puts(self) -> None:
        while self._put_times and self._clock.monotonic() - self._put_times[0][0] >= _RATE_SECONDS:
            self._put_times.popleft()
