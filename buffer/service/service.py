"""Dispatch each request to its handler. No sockets: requests in, replies out, in one transaction.

    BufferService ──► ingest, leasing, training ──► RunState ──► Store

Handlers write through the store and update the memory alongside it (`run_state`).
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from tba.buffer.service import ingest, training
from tba.buffer.service.clients import GONE
from tba.buffer.service.leasing import Leasing
from tba.buffer.service.pace import Counters
from tba.buffer.service.put_columns import PutColumns
from tba.buffer.service.run_state import AsOf, ReplyBody, RunState, refuse_beyond
from tba.buffer.service.stall import find_stall
from tba.buffer.service.training import RecordBatch
from tba.buffer.store.store import Store
from tba.buffer.store.tables.runs import Run
from tba.common.clock import Clock
from tba.common.config import Config
from tba.common.errors import Refused
from tba.common.log import get_logger
from tba.common.wire import fields, messages
from tba.common.wire.codec import RequestHeader
from tba.common.wire.messages import MAX_ARCHIVED, Archive, GetStatus, Movable, PutEvaluation, Status

log = get_logger(__name__)

# These need neither space nor a transaction.
_WRITE_NOTHING = (GetStatus, messages.Heartbeat, messages.Goodbye)
# Any client may send these, and they bind it to nothing.
_NO_WORK = (*_WRITE_NOTHING, messages.Hello, messages.RegisterPrompts)


class BufferService:
    """The buffer of one run. `handle` must run inside `transaction()`, except for what `writes_nothing`.

    `as_of` is a step of a recorded run to train from; `record_batch` replaces the drawing of batches.
    """

    def __init__(
        self,
        store: Store,
        run: Run,
        config: Config,
        clock: Clock,
        *,
        as_of: AsOf | None = None,
        record_batch: RecordBatch | None = None,
    ) -> None:
        self.state = state = RunState(store, run, config, clock, as_of)
        self.counters = Counters(clock)
        self.leasing = leasing = Leasing(state)
        record_batch = record_batch or partial(training.draw_batch, state)
        self._handlers: dict[type[messages.Message | PutColumns], Callable[[Any, str], ReplyBody | None]] = {
            PutColumns: partial(ingest.store_rows, state),
            messages.Hello: self._hello,
            messages.RegisterPrompts: leasing.register_prompts,
            messages.LeasePrompts: leasing.lease_prompts,
            messages.SampleBatch: partial(training.sample_batch, state, record_batch),
            messages.ReportStep: partial(training.report_step, state),
            messages.AnnounceSnapshot: partial(training.announce_snapshot, state),
            messages.FinishRun: partial(training.finish_run, state),
            messages.Heartbeat: self._heartbeat,
            messages.Goodbye: self._goodbye,
            Archive: self._archive,
            PutEvaluation: self._put_evaluation,
            GetStatus: lambda *_: ReplyBody(self.status()),
        }

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit and count what the handlers write inside. After a failure the caller calls `state.rebuild()`."""
        self.state.uncommitted_puts.clear()
        self.state.uncommitted_errors.clear()
        started = time.perf_counter()
        with self.state.store.transaction():
            yield
        self.counters.note_commit(time.perf_counter() - started)
        # Counted after the commit: a put that fails comes again.
        errors, stored = self.state.uncommitted_errors, sum(ack.stored for _, ack in self.state.uncommitted_puts)
        self.state.pace.note_rows(stored, errors)
        for sender, ack in self.state.uncommitted_puts:
            client = self.state.clients[sender]
            client.trajectories += ack.stored
            client.duplicates += ack.duplicates
            self.counters.note_put(stored=ack.stored, duplicates=ack.duplicates)

    def writes_nothing(self, message: messages.Message | PutColumns) -> bool:
        """Whether a message needs neither space nor a transaction."""
        is_known = isinstance(message, messages.RegisterPrompts) and self.leasing.knows(message)
        return is_known or isinstance(message, _WRITE_NOTHING)

    def is_misdirected(self, message: messages.Message | PutColumns) -> bool:
        """Whether a message is the hello of a client that looks for another run, and is none of this run's."""
        return isinstance(message, messages.Hello) and message.run_name not in ("", self.state.run.name)

    def handle(self, header: RequestHeader, message: messages.Message | PutColumns) -> ReplyBody | None:
        """Return the reply to a message of `to_columns`; None parks the request. Raises Refused."""
        run = self.state.run
        if self.is_misdirected(message):
            return ReplyBody(messages.Welcome(run_name=run.name, next_version=0, recorded_steps=0))
        if header.run not in ("", run.uuid):
            raise Refused(
                "wrong_run",
                f"it serves another run, {run.name} {run.uuid}: put the database back, or restart this process",
            )
        if (host := self.state.clients.successor_host(header.sender)) is not None:
            raise Refused(
                "trainer_exists",
                f"a trainer on {host} took over run {run.name} while this one was silent: the steps it made since then "
                "do not count",
            )
        if header.sender not in self.state.clients and not isinstance(message, GetStatus):
            raise Refused(
                "too_many_clients",
                f"the buffer has {fields.MAX_CLIENTS} clients, the most it remembers: stop some, or try later",
            )
        reply = self._handlers[type(message)](message, header.sender)
        if not isinstance(message, _NO_WORK):
            self.state.clients[header.sender].has_worked = True
        return reply

    def handle_durably(self, header: RequestHeader, message: messages.Message | PutColumns) -> ReplyBody | None:
        """Handle a single request in a transaction of its own. Raises Refused."""
        self.state.clients.mark_seen(header.sender, header.role)
        if self.writes_nothing(message):
            return self.handle(header, message)
        with self.transaction():
            return self.handle(header, message)

    def timeout_reply(self, header: RequestHeader, message: messages.Message | PutColumns) -> ReplyBody:
        """Return the reply to a parked request whose `wait_seconds` have passed."""
        if isinstance(message, messages.SampleBatch):
            return ReplyBody(messages.NotReady(reason=self.state.pace.waits_for))
        return ReplyBody(messages.Leases(visits=[], reason=self.state.clients[header.sender].held_back))

    def expire_leases(self) -> None:
        """End the leases of senders that fell silent, and forget senders that are long gone."""
        leases, clients = self.state.leases, self.state.clients
        for sender in leases.holders():
            if clients.is_silent(sender):
                log.warning("leases expired", sender=sender, leases=leases.release(sender))
        clients.forget_long_gone()

    def movable(self, message: Archive) -> Movable:
        """Return the next trajectories whose tokens nothing needs."""
        found = self.state.store.trajectories.with_payload(message.after, MAX_ARCHIVED)
        return Movable(self._old(message, found), found[-1] if len(found) == MAX_ARCHIVED else None)

    def _old(self, message: Archive, trajectories: list[int]) -> list[int]:
        left = [id_ for id_ in trajectories if id_ not in self.state.index]
        return self.state.store.trajectories.old(self.state.run, left, message.since_step)

    def status(self) -> Status:
        """Return counts, clients and the stall, as `tba status` shows them."""
        state = self.state
        free, total = state.store.database.disk_space()
        status = Status(
            run_name=state.run.name,
            step=state.steps_done,
            finished=state.finished,
            epoch=state.leases.epoch,
            prompts=len(state.prompt_ids),
            trajectories=state.trajectories,
            errors=state.errors,
            sampleable=len(state.index),
            database_bytes=state.store.database.size_bytes(),
            batches_without_recent_data=state.lag.batches,
            no_recent_data=state.lag.sentence,
            clients=state.clients.status(state.leases.held_by),
            newest_version=state.newest.version if state.newest else None,
            earlier_version=state.earlier_version,
            refuses_puts=self.counters.storage_error or state.shortage_of_space(),
            disk_bytes=total,
            free_bytes=free,
            skipped_prompts=len(state.leases.skipped),
            postponed_prompts=len(state.leases.postponed),
            **state.pace.fields(),
            **self.counters.fields(),
        )
        return msgspec.structs.replace(status, stall=find_stall(status))

    def _hello(self, message: messages.Hello, sender: str) -> ReplyBody:
        state = self.state
        client = state.clients[sender]
        if client.role == "trainer" and (other := state.clients.other_trainer(sender)) is not None:
            raise Refused(
                "trainer_exists",
                f"a trainer on {other.host} is at work on run {state.run.name}: stop it, or give this run another "
                "run.name and buffer.address",
            )
        client.host = message.host
        if client.activity == GONE:
            state.clients.show(sender, "connected")
            state.clients.recount()
        state.sender_id(sender)
        state.store.senders.describe(sender, message.host, message.pid)
        state.clients.replace_earlier(sender)
        if client.role == "trainer":
            state.clients.admit_trainers(state.store.senders.trainers(state.run))
            state.may_skip_steps = state.may_skip_versions = True
            state.earlier_version = state.newest.version if state.newest else None
            # A finished run may continue with more steps.
            state.store.runs.finish(state.run, None)
            state.finished = False
        next_version = state.newest.version + 1 if state.newest else 0
        recorded = state.store.batches.recorded_steps(state.run)
        return ReplyBody(messages.Welcome(run_name=state.run.name, next_version=next_version, recorded_steps=recorded))

    def _put_evaluation(self, message: PutEvaluation, _: str) -> ReplyBody:
        refuse_beyond("snapshot", message.version, message.step)
        self.state.store.evaluations.put(self.state.run, message)
        return ReplyBody(messages.Done())

    def _archive(self, message: Archive, _: str) -> ReplyBody:
        if not message.url:
            return ReplyBody(self.movable(message))
        # Not all may still be: since the question, a trainer may have requested an earlier batch.
        old = self._old(message, message.trajectories)
        self.state.store.trajectories.archive(self.state.run, message, old, self.state.clock.wall())
        return ReplyBody(Movable(old))

    def _heartbeat(self, message: messages.Heartbeat, sender: str) -> ReplyBody:
        client = self.state.clients[sender]
        # A trainer's heartbeat has its own connection, so it may arrive after the goodbye that was sent later. Only a
        # hello makes such a client live again.
        if client.role == "trainer" and client.activity == GONE:
            return ReplyBody(messages.Done())
        self.state.clients.show(sender, message.activity, message.reason)
        client.weights_version, client.metrics = message.weights_version, message.metrics
        client.serves, client.warning = message.serves, message.warning
        if message.serves:
            return ReplyBody(messages.Sources(addresses=self.state.clients.sources_of(message.serves)))
        return ReplyBody(messages.Done())

    def _goodbye(self, _: messages.Goodbye, sender: str) -> ReplyBody:
        self.state.leases.release(sender)
        self.state.clients.show(sender, GONE)
        self.state.clients.recount()
        return ReplyBody(messages.Done())
