"""What the buffer does with each message, without sockets: requests in, answers out, in one transaction.

The handlers write through the store and update the memory beside it (index, leases, versions). If the
transaction fails, the memory is rebuilt from the file: it never says more than what is committed.
"""

import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.buffer.batches import check_size, recorded_batch
from tba.buffer.clients import GONE, Clients
from tba.buffer.index import Entry, SamplingIndex
from tba.buffer.leases import LeaseBook, OpenVisit
from tba.buffer.policy import SamplingRules, Shortage, sample_groups, warm_up
from tba.buffer.rate_limiter import RateLimiter
from tba.buffer.received import SequenceRanges
from tba.buffer.remover import Limits
from tba.buffer.rows import PutColumns, RunColumns, database_rows, put_columns
from tba.buffer.store import Store
from tba.buffer.tables.runs import Run
from tba.common import wire
from tba.common.clock import Clock
from tba.common.codec import Request, RequestHeader
from tba.common.config import Config
from tba.common.errors import Refused
from tba.common.log import get_logger

log = get_logger(__name__)

_FREE_SPACE_SECONDS = 1.0
# Of steps, versions and prompts. The index keeps them in 32 bits; and the number after the last is told to others.
_NUMBERS = (1 << 31) - 1
_RATE_SECONDS = 10.0  # that `puts_per_second` is a mean over
_COMMITS = 100  # transactions that the status takes the mean of


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply with its array frames. None instead of an Answer: nothing to say yet."""

    message: wire.Message
    frames: list[bytes] = field(default_factory=list)


class BufferService:
    """The buffer of one run. `handle` must be called within `store.transaction()`."""

    def __init__(self, store: Store, run: Run, config: Config, clock: Clock) -> None:
        self._store = store
        self._run = run
        self._config = config
        self._clock = clock
        self._rules = SamplingRules(
            recency_fraction=config.buffer.recency_fraction,
            recency_window=config.buffer.recency_window,
            inverse_temperature=config.buffer.inverse_temperature,
            max_staleness=config.max_staleness,
            min_fill=config.buffer.min_fill,
            prompt_priority=config.buffer.prompt_priority,
            trajectory_priority=config.buffer.trajectory_priority,
            rank_exponent=config.buffer.rank_exponent,
            flat_group_weight=config.buffer.flat_group_weight,
            replacement=config.buffer.replacement,
            recency_fraction_final=config.recency_fraction_final,
            recency_anneal_steps=config.buffer.recency_anneal_steps,
        )
        self._limits = Limits(
            prompt_cap=config.buffer.prompt_cap,
            dedup=config.buffer.dedup,
            keep=config.buffer.prompt_keep,
            max_rows=config.max_trajectories,
            max_bytes=config.max_payload_bytes,
            seed=run.seed,
        )
        self._rate = RateLimiter(config.samples_per_insert, config.samples_per_insert_slack)
        self._started = clock.monotonic()
        self._clients = Clients(clock, config.buffer.lease_seconds)
        self.rejected: Counter[str] = Counter()  # messages that got an error reply, by code
        self._duplicates = 0
        self._put_times: deque[tuple[float, int]] = deque()  # (monotonic, rows) of the last seconds
        self.queued_bytes = 0  # told by the server, for the status
        self._commit_seconds: deque[float] = deque(maxlen=_COMMITS)
        self._free = (-math.inf, 0)  # when the free space was looked at, and what it was
        self._trainer_waits_for = ""
        self._too_little_data = False  # the last batch that was asked for could not be sampled
        self._handlers: dict[type[wire.Message], Callable[[Any, str], Answer | None]] = {
            wire.Hello: self._hello,
            wire.RegisterPrompts: self._register_prompts,
            wire.LeasePrompts: self._lease_prompts,
            wire.SampleBatch: self._sample_batch,
            wire.ReportStep: self._report_step,
            wire.AnnounceSnapshot: self._announce_snapshot,
            wire.FinishRun: self._finish_run,
            wire.Heartbeat: self._heartbeat,
            wire.Goodbye: self._goodbye,
        }
        self.rebuild()

    def rebuild(self) -> None:
        """Make the memory anew from the committed database."""
        store, run = self._store, self._run
        self._versions = {ref.version: ref for ref in store.snapshots.all(run)}
        self._newest = self._versions[max(self._versions)] if self._versions else None
        self._steps_done = store.batches.steps_done(run)
        self._next_step = store.batches.recorded_steps(run)
        self._finished = store.runs.finished_step(run) is not None
        self._clients.admit_trainers(store.senders.trainers(run))
        self._prompt_ids = store.prompts.ids(run)
        self._prompt_keys = {id_: key for key, id_ in self._prompt_ids.items()}
        epoch, place = store.visits.newest_place(run)
        self._leases = LeaseBook(run.seed, list(self._prompt_keys), epoch, place)
        self._leases.open = {visit.id: visit for visit in store.visits.open(run)}
        self._index = SamplingIndex(self._limits)
        for entry in store.trajectories.entries(run, self._policy_steps()):
            self._index.add(entry)
        now, samples = self._history_step(self._steps_done), self._config.train.samples_per_prompt
        warm_up(self._index, self._rules, step=now, samples=samples)
        self._trajectories, self._errors = store.trajectories.counts(run)
        self._sampled = store.batches.consumed(run)
        self._sender_ids: dict[str, int] = {}
        self._received: dict[str, SequenceRanges] = {}

    @property
    def run(self) -> Run:
        """The run that is served."""
        return self._run

    def state(self) -> wire.RunState:
        """What every reply carries."""
        return wire.RunState(weights=self._newest, step=self._steps_done, finished=self._finished)

    def hear(self, header: RequestHeader, at: float | None = None) -> None:
        """A sender was alive at this monotonic time. Said once for each message, not when a waiting one is retried."""
        self._clients.hear(header.sender, header.role, self._clock.monotonic() if at is None else at)

    def handle(self, request: Request, put: PutColumns | None = None) -> Answer | None:
        """Answer a request, or None if it should be asked again when something has changed.

        `put` are the columns of a put, if they are made already. Raises Refused with a code and a sentence.
        """
        header = request.header
        if header.run not in ("", self._run.uuid):
            raise Refused("wrong_run", f"this buffer serves run {self._run.name}; the sender belongs to another one")
        if (host := self._clients.successor_host(header.sender)) is not None:
            raise Refused(
                "trainer_exists",
                f"a trainer on {host} took over run {self._run.name} while this one was not heard of: what this one "
                "did since then does not count",
            )
        if isinstance(request.message, wire.GetStatus):
            return Answer(self.status())
        if isinstance(request.message, wire.PutTrajectories):
            return self._put_trajectories(put or put_columns(request.message, request.frames), header.sender)
        return self._handlers[type(request.message)](request.message, header.sender)

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
        for sender in {visit.sender for visit in self._leases.open.values() if visit.sender is not None}:
            if self._clients.is_silent(sender):
                log.warning("leases expired", sender=sender, leases=self._leases.release(sender))
        self._clients.forget_long_gone()

    # ------------------------------------------------------------ any role

    def _hello(self, message: wire.Hello, sender: str) -> Answer:
        client = self._clients[sender]
        if client.role == "trainer" and (other := self._clients.other_trainer(sender)) is not None:
            raise Refused(
                "trainer_exists",
                f"a trainer on {other.host} is at work on run {self._run.name}: stop it, or give this run another "
                "run.name and buffer.address",
            )
        client.host = message.host
        self._sender_id(sender)
        self._store.senders.describe(sender, message.host, message.pid)
        self._clients.replace_earlier(sender)
        if client.role == "trainer":
            self._clients.admit_trainers(self._store.senders.trainers(self._run))
            # It may have been told to make more steps.
            self._store.runs.finish(self._run, None)
            self._finished = False
        newest = self._newest.version + 1 if self._newest else 0
        recorded = self._store.batches.recorded_steps(self._run)
        return Answer(wire.Welcome(run_name=self._run.name, next_version=newest, recorded_steps=recorded))

    def _heartbeat(self, message: wire.Heartbeat, sender: str) -> Answer:
        client = self._clients[sender]
        client.activity, client.reason = message.activity, message.reason
        client.weights_version, client.metrics = message.weights_version, message.metrics
        return Answer(wire.Done())

    def _goodbye(self, _: wire.Goodbye, sender: str) -> Answer:
        self._leases.release(sender)
        client = self._clients[sender]
        client.activity, client.reason = GONE, "it said goodbye"
        return Answer(wire.Done())

    # ------------------------------------------------------------ searchers

    def _register_prompts(self, message: wire.RegisterPrompts, _: str) -> Answer:
        _refuse_beyond("task", message.total)
        task, fingerprint, total = self._store.runs.task(self._run)
        if message.total < self._config.train.prompts_per_step:
            raise Refused(
                "too_few_prompts",
                f"task {message.task} has {message.total} prompts and a batch needs "
                f"{self._config.train.prompts_per_step} different ones: lower train.prompts_per_step",
            )
        if task is None:
            total = message.total
            self._store.runs.register_task(self._run, message.task, message.fingerprint, total)
        elif fingerprint != message.fingerprint:
            raise Refused(
                "other_prompts",
                f"run {self._run.name} works on {total} prompts of {task}; this searcher has other data "
                f"({message.total} prompts of {message.task}): use the same files on every node",
            )
        if len(self._prompt_ids) < total and message.keys:
            self._store.prompts.add(self._run, message.offset, message.keys)
            self._prompt_ids = self._store.prompts.ids(self._run)
            self._prompt_keys = {id_: key for key, id_ in self._prompt_ids.items()}
            self._leases.prompts = list(self._prompt_keys)
        known = len(self._prompt_ids)
        return Answer(wire.Registered(known=known, complete=known == total))

    def _lease_prompts(self, message: wire.LeasePrompts, sender: str) -> Answer | None:
        if not self._prompt_ids or len(self._prompt_ids) < self._store.runs.task(self._run)[2]:
            raise Refused("no_prompts", "the prompts of the run are not registered yet")
        if self._clients[sender].activity == GONE:
            return Answer(wire.Leases(visits=[], reason="it said goodbye"))
        self._take_back(message.held, sender)
        lost = self._leases.lost_by(sender, set(message.held))
        room, reason = self._room_for_leases(message, sender)
        again = self._leases.unheld()[: max(0, room - len(lost))]
        for visit in again:
            self._store.visits.lease_again(visit.id, sender, self._clock.wall())
            visit.sender = sender
        new = [self._new_visit(sender) for _ in range(room - len(lost) - len(again))]
        if not (visits := [*lost, *again, *new]) and message.want and not self._has_old_weights(message):
            self._clients[sender].held_back = reason
            return None
        granted = [
            wire.Visit(lease=visit.id, epoch=visit.epoch, prompt_key=self._prompt_keys[visit.prompt])
            for visit in visits
        ]
        return Answer(wire.Leases(visits=granted, reason=reason))

    def _take_back(self, held: list[int], sender: str) -> None:
        """A sender that was silent for too long, and is at work, keeps what nobody else has got meanwhile."""
        for visit in (self._leases.open.get(lease) for lease in held):
            if visit is not None and visit.sender is None:
                self._store.visits.lease_again(visit.id, sender, self._clock.wall())
                visit.sender = sender

    def _has_old_weights(self, message: wire.LeasePrompts) -> bool:
        """The answer carries the news of the newest weights: it must not wait for work that needs them."""
        return self._newest is not None and message.weights_version != self._newest.version

    def _room_for_leases(self, message: wire.LeasePrompts, sender: str) -> tuple[int, str]:
        """How many prompts the rate limiter lets a searcher have now, and why not more."""
        limit = self._rules.max_staleness
        if self._finished:
            return 0, "the run is finished"
        if len(self._index) < self._rules.min_fill:
            return message.want, ""
        if (room := self._room_by_rate()) == 0:
            return 0, "searchers are ahead of buffer.samples_per_insert"
        if limit is None:
            return min(message.want, room), ""
        oldest_useful = self._next_step - limit  # the batch that is not chosen yet is who will use it
        version = self._versions.get(message.weights_version)
        if version is None or version.step < oldest_useful:
            return 0, f"weights v{message.weights_version} are too old for max_staleness {limit}"
        target = (limit + 1) * self._config.train.prompts_per_step
        need = self._rules.need(self._config.train.samples_per_prompt)
        underway = len(self._leases.leased_prompts() | self._index.fresh_prompts(oldest_useful, need))
        share = math.ceil(target / max(1, self._clients.living("searcher"))) - self._leases.held_by(sender)
        room = max(0, min(message.want, room, target - underway, share))
        return room, f"{underway} of {target} prompts under way"

    def _room_by_rate(self) -> int:
        """How many prompts the ratio of samples to inserts leaves room for.

        Nobody is held back while a trainer lacks prompts, not trajectories: what was inserted may be too few
        prompts, or too much alike, for a batch. One that has gone lacks nothing.
        """
        each = self._config.search.samples_per_prompt
        room = self._rate.room(self._trajectories, self._leases.held() * each, self._sampled)
        lacking = self._too_little_data and self._clients.living("trainer")
        return sys.maxsize if room is None or lacking else room // each

    def _new_visit(self, sender: str) -> OpenVisit:
        epoch, place, prompt = self._leases.next_place()
        id_ = self._store.visits.add(self._run, epoch, place, prompt, sender, self._clock.wall())
        visit = OpenVisit(id_, epoch, prompt, sender)
        self._leases.open[id_] = visit
        return visit

    def _put_trajectories(self, put: PutColumns, sender: str) -> Answer:
        """Every row is checked before the first is added: a put is refused whole or not at all."""
        self._refuse_without_space()
        if self._clients[sender].role == "importer":
            prompts, versions = self._imported_prompts(put), self._imported_versions(put)
        else:
            prompts, versions = self._prompts_of(put), [self._oldest(versions) for versions in put.versions]
        number, received = self._sender_id(sender), self._ranges_of(sender)
        missing = received.missing(put.first_sequence, len(put))
        if missing:
            ids = self._store.trajectories.new_ids(len(missing))
            places = [sequence - put.first_sequence for sequence in missing]
            every = ids if len(ids) == len(put) else range(len(put))
            known = RunColumns(self._run.id, number, self._clock.wall(), every, prompts, versions)
            self._add(put, known, ids, places)
            received.add(put.first_sequence, len(put))
            self._close_visits({(put.rows.lease[place], prompts[place]) for place in places}, sender)
        ack = wire.PutAck(first_sequence=put.first_sequence, stored=len(missing), duplicates=len(put) - len(missing))
        return Answer(ack)

    def _add(self, put: PutColumns, known: RunColumns, ids: Sequence[int], places: Sequence[int]) -> None:
        """Write the rows at `places` of a put, under these ids, and have them sampled."""
        rows, payloads = database_rows(put, known), put.payload
        if len(places) < len(put):  # some of them are there already
            rows = [(id_, *rows[place][1:]) for id_, place in zip(ids, places, strict=True)]
            payloads = [payloads[place] for place in places]
        self._store.trajectories.add(rows, payloads)
        if (references := put.rows.reference_logprob) is not None:
            known_logprobs = ((id_, references[place]) for id_, place in zip(ids, places, strict=True))
            self._store.trajectories.add_references(
                [(id_, wire.INITIAL_REFERENCE, logprob) for id_, logprob in known_logprobs if logprob is not None]
            )
        self._trajectories += len(places)
        columns = (put.rows.error, known.versions, known.prompts, put.rows.reward, put.dedup_hash, put.payload_bytes)
        values = list(zip(*columns, strict=True))
        for id_, place in zip(ids, places, strict=True):
            error, version, prompt, reward, dedup_hash, size = values[place]
            if error is not None:
                self._errors += 1
                continue
            step = self._versions[version].step if version != wire.NO_POLICY else 0
            self._index.add(Entry(id_, prompt, step, reward, dedup_hash, False, size))

    def _refuse_without_space(self) -> None:
        """A full disk is a state to come out of: what is on it must stay readable, and the log needs room."""
        floor = self._config.buffer.min_free_mib << 20
        if floor and (free := self._free_bytes()) < floor:
            raise Refused(
                "storage",
                f"{free >> 20} MiB are free on the disk of {self._store.path}, buffer.min_free_mib is {floor >> 20}: "
                "make room, or run `tba buffer compact`",
            )

    def _free_bytes(self) -> int:
        at, free = self._free
        if (now := self._clock.monotonic()) - at > _FREE_SPACE_SECONDS:
            at, free = self._free = (now, self._store.database.free_bytes())
        return free

    def _prompts_of(self, put: PutColumns) -> list[int]:
        try:
            return [self._prompt_ids[key] for key in put.rows.prompt_key]
        except KeyError as error:
            raise Refused(
                "unknown_prompt", f"prompt {error.args[0]!r} is not registered in run {self._run.name}"
            ) from error

    def _oldest(self, versions: list[int]) -> int:
        """The version of the earliest step: after a resume that need not be the smallest."""
        try:
            if len(versions) == 1:
                return self._versions[versions[0]].version
            return min(versions, key=lambda version: (self._versions[version].step, version))
        except KeyError as error:
            raise Refused("unknown_version", f"policy version {error.args[0]} was never announced") from error

    def _imported_prompts(self, put: PutColumns) -> list[int]:
        ids = self._store.prompts.add_imported(self._run, sorted(set(put.rows.prompt_key)))
        return [ids[key] for key in put.rows.prompt_key]

    def _imported_versions(self, put: PutColumns) -> list[int]:
        """A version number of another run names another policy, even if this run has that number too."""
        return [
            wire.NO_POLICY
            if "imported_version" in metadata or not self._versions.keys() >= set(versions)
            else self._oldest(versions)
            for metadata, versions in zip(put.rows.metadata, put.versions, strict=True)
        ]

    def _ranges_of(self, sender: str) -> SequenceRanges:
        if sender not in self._received:
            self._received[sender] = SequenceRanges(self._store.trajectories.sequence_ranges(self._sender_id(sender)))
        return self._received[sender]

    def _close_visits(self, answered: set[tuple[int, int]], sender: str) -> None:
        """End the visits that these pairs (lease, prompt) answer, unless another sender has got them meanwhile."""
        done = [lease for lease, prompt in answered if self._leases.close(lease, prompt, sender)]
        if done:
            self._store.visits.close(done, self._clock.wall())

    # ------------------------------------------------------------ trainer

    def _sample_batch(self, message: wire.SampleBatch, _: str) -> Answer | None:
        _refuse_beyond("step", message.step)
        if not self._store.batches.has(self._run, message.step) and (shortage := self._choose_batch(message)):
            # A trainer that asks ahead is still at work on the step before.
            self._trainer_waits_for = shortage.reason if message.step <= self._steps_done else ""
            return None
        self._trainer_waits_for = ""
        return Answer(*recorded_batch(self._store, self._run, message))

    def _choose_batch(self, message: wire.SampleBatch) -> Shortage | None:
        """Sample a batch and record it, or say what is missing."""
        # Not the largest: a trainer may come back from an earlier step than the record, or ours may be an old copy.
        self._next_step = message.step
        if reason := self._rate.shortage(self._trajectories, self._sampled, message.prompts * message.samples):
            return Shortage(reason)
        now = self._history_step(message.step)
        rng = np.random.default_rng([self._run.seed, message.step])
        groups = sample_groups(
            self._index,
            self._rules,
            step=now,
            groups=message.prompts,
            samples=message.samples,
            rng=rng,
            train_step=message.step,
        )
        self._too_little_data = isinstance(groups, Shortage)
        if isinstance(groups, Shortage):
            return groups
        check_size(self._store, [entry.id for group in groups for entry in group])
        self._store.batches.record(self._run, message.step, groups, self._clock.wall(), stale_from=now)
        self._index.mark_taken(entry.id for group in groups for entry in group)
        self._next_step = message.step + 1
        self._sampled += message.prompts * message.samples
        return None

    def _history_step(self, step: int) -> int:
        """The step that the age of data counts from, for the batch of a step."""
        return step

    def _policy_steps(self) -> dict[int, int]:
        """The optimiser step of each policy version."""
        return {version: ref.step for version, ref in self._versions.items()}

    def _report_step(self, message: wire.ReportStep, _: str) -> Answer:
        if not self._store.batches.has(self._run, message.step):
            raise Refused("unknown_step", f"no batch was handed out for step {message.step}")
        self._store.batches.report(self._run, message, self._clock.wall())
        self._steps_done = max(self._steps_done, message.step + 1)
        return Answer(wire.Done())

    def _announce_snapshot(self, message: wire.AnnounceSnapshot, _: str) -> Answer:
        _refuse_beyond("snapshot", message.weights.version, message.weights.step)
        known = self._versions.get(message.weights.version)
        if known is not None and known != message.weights:
            raise Refused("version_taken", f"snapshot v{known.version} was announced before, with other content")
        self._store.snapshots.add(self._run, message, self._clock.wall())
        self._versions[message.weights.version] = message.weights
        self._newest = self._versions[max(self._versions)]
        return Answer(wire.Done())

    def _finish_run(self, message: wire.FinishRun, _: str) -> Answer:
        self._store.runs.finish(self._run, message.step)
        self._finished = True
        return Answer(wire.Done())

    # ------------------------------------------------------------ status

    def sampleable(self) -> set[int]:
        """Ids of the trajectories that can be sampled."""
        return {entry.id for prompt in self._index.prompts() for entry in self._index.entries(prompt)}

    def waiting_answer(self, request: Request) -> Answer:
        """What a request hears whose time to wait is over."""
        if isinstance(request.message, wire.SampleBatch):
            return Answer(wire.NotReady(reason=self._trainer_waits_for))
        return Answer(wire.Leases(visits=[], reason=self._clients[request.header.sender].held_back))

    def status(self) -> wire.Status:
        """Counts and clients."""
        now = self._clock.monotonic()
        self._forget_old_puts()
        return wire.Status(
            run_name=self._run.name,
            step=self._steps_done,
            finished=self._finished,
            uptime_seconds=now - self._started,
            epoch=self._leases.epoch,
            prompts=len(self._prompt_ids),
            trajectories=self._trajectories,
            errors=self._errors,
            duplicates=self._duplicates,
            sampleable=len(self._index),
            puts_per_second=sum(rows for _, rows in self._put_times) / _RATE_SECONDS,
            database_bytes=self._store.database.size_bytes(),
            queued_bytes=self.queued_bytes,
            commit_seconds=sum(self._commit_seconds) / max(1, len(self._commit_seconds)),
            rejected=dict(self.rejected),
            trainer_waits_for=self._trainer_waits_for,
            clients=self._clients.status(self._leases.held_by),
        )

    def _forget_old_puts(self) -> None:
        while self._put_times and self._clock.monotonic() - self._put_times[0][0] >= _RATE_SECONDS:
            self._put_times.popleft()

    def _sender_id(self, sender: str) -> int:
        if sender not in self._sender_ids:
            self._sender_ids[sender] = self._store.senders.number(self._run, sender, self._clients[sender].role)
        return self._sender_ids[sender]


def _refuse_beyond(what: str, *numbers: int) -> None:
    """Such a number cannot be stored, or would be found in the file at every later start."""
    if max(numbers) >= _NUMBERS:
        raise Refused("out_of_range", f"a {what} with the number {max(numbers)}, at most {_NUMBERS - 1} is possible")
