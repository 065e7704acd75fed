"""What the buffer does with each message, without sockets: requests in, answers out, in one transaction.

The handlers write through the store and update the memory beside it (index, leases, versions). If the
transaction fails, the memory is rebuilt from the file: it never says more than what is committed.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.buffer.clients import GONE, Clients
from tba.buffer.index import Entry, SamplingIndex
from tba.buffer.leases import LeaseBook, OpenVisit
from tba.buffer.policy import SamplingRules, Shortage, sample_groups
from tba.buffer.rows import NewRow, make_row
from tba.buffer.store import Run, Store
from tba.common import wire
from tba.common.clock import Clock
from tba.common.codec import MAX_FRAME_BYTES, Request, RequestHeader
from tba.common.config import Config
from tba.common.errors import Refused
from tba.common.log import get_logger
from tba.common.trajectory import ARRAY_KINDS, ROW_COLUMNS, slices, version_runs_of

log = get_logger(__name__)


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
        )
        self._started = clock.monotonic()
        self._clients = Clients(clock, config.buffer.lease_seconds)
        self.rejected: Counter[str] = Counter()  # messages that got an error reply, by code
        self._duplicates = 0
        self._put_times: list[tuple[float, int]] = []
        self._trainer_waits_for = ""
        self._handlers: dict[type[wire.Message], Callable[[Any, str, list[memoryview]], Answer | None]] = {
            wire.Hello: self._hello,
            wire.RegisterPrompts: self._register_prompts,
            wire.LeasePrompts: self._lease_prompts,
            wire.PutTrajectories: self._put_trajectories,
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
        self._versions = {ref.version: ref for ref in store.snapshots(run)}
        self._newest = self._versions[max(self._versions)] if self._versions else None
        self._steps_done = store.steps_done(run)
        self._finished = store.finished_step(run) is not None
        self._prompt_ids = store.prompt_ids(run)
        self._prompt_keys = {id_: key for key, id_ in self._prompt_ids.items()}
        epoch, place = store.newest_place(run)
        self._leases = LeaseBook(run.seed, list(self._prompt_keys), epoch, place)
        self._leases.open = {visit.id: visit for visit in store.open_visits(run)}
        self._index = SamplingIndex(cap=self._config.buffer.prompt_cap, dedup=self._config.buffer.dedup)
        for entry in store.entries(run, {version: ref.step for version, ref in self._versions.items()}):
            self._index.add(entry)
        self._trajectories, self._errors = store.counts(run)
        self._sender_ids: dict[str, int] = {}

    @property
    def run(self) -> Run:
        """The run that is served."""
        return self._run

    def state(self) -> wire.RunState:
        """What every reply carries."""
        return wire.RunState(weights=self._newest, step=self._steps_done, finished=self._finished)

    def hear(self, header: RequestHeader) -> None:
        """A sender is alive. Said once for each message that arrives, not when a waiting one is tried again."""
        self._clients.hear(header.sender, header.role)

    def handle(self, request: Request) -> Answer | None:
        """Answer a request, or None if it should be asked again when something has changed.

        Raises Refused with a code and a sentence for the sender.
        """
        header = request.header
        if header.run not in ("", self._run.uuid):
            raise Refused("wrong_run", f"this buffer serves run {self._run.name}; the sender belongs to another one")
        if isinstance(request.message, wire.GetStatus):
            return Answer(self.status())
        return self._handlers[type(request.message)](request.message, header.sender, request.frames)

    def expire_leases(self) -> None:
        """Take the leases of senders that fell silent, and forget senders that are long gone."""
        for sender in {visit.sender for visit in self._leases.open.values() if visit.sender is not None}:
            if self._clients.is_silent(sender):
                log.warning("leases expired", sender=sender, leases=self._leases.release(sender))
        self._clients.forget_long_gone()

    # ------------------------------------------------------------ any role

    def _hello(self, message: wire.Hello, sender: str, _: list[memoryview]) -> Answer:
        client = self._clients[sender]
        if client.role == "trainer" and (other := self._clients.other_trainer(sender)) is not None:
            raise Refused(
                "trainer_exists",
                f"a trainer on {other.host} is at work on run {self._run.name}: stop it, or give this run another "
                "run.name and buffer.address",
            )
        client.host = message.host
        self._sender_id(sender)
        self._store.describe_sender(sender, message.host, message.pid)
        self._clients.replace_earlier(sender)
        if client.role == "trainer":  # it may have been told to make more steps
            self._store.finish(self._run, None)
            self._finished = False
        newest = self._newest.version + 1 if self._newest else 0
        recorded = self._store.recorded_steps(self._run)
        return Answer(wire.Welcome(run_name=self._run.name, next_version=newest, recorded_steps=recorded))

    def _heartbeat(self, message: wire.Heartbeat, sender: str, _: list[memoryview]) -> Answer:
        client = self._clients[sender]
        client.activity, client.reason = message.activity, message.reason
        client.weights_version, client.metrics = message.weights_version, message.metrics
        return Answer(wire.Done())

    def _goodbye(self, _: wire.Goodbye, sender: str, __: list[memoryview]) -> Answer:
        self._leases.release(sender)
        client = self._clients[sender]
        client.activity, client.reason = GONE, "it said goodbye"
        return Answer(wire.Done())

    # ------------------------------------------------------------ searchers

    def _register_prompts(self, message: wire.RegisterPrompts, _: str, __: list[memoryview]) -> Answer:
        task, fingerprint, total = self._store.task_of(self._run)
        if message.total < self._config.train.prompts_per_step:
            raise Refused(
                "too_few_prompts",
                f"task {message.task} has {message.total} prompts and a batch needs "
                f"{self._config.train.prompts_per_step} different ones: lower train.prompts_per_step",
            )
        if task is None:
            total = message.total
            self._store.register_task(self._run, message.task, message.fingerprint, total)
        elif fingerprint != message.fingerprint:
            raise Refused(
                "other_prompts",
                f"run {self._run.name} works on {total} prompts of {task}; this searcher has other data "
                f"({message.total} prompts of {message.task}): use the same files on every node",
            )
        if len(self._prompt_ids) < total and message.keys:
            self._store.add_prompts(self._run, message.offset, message.keys)
            self._prompt_ids = self._store.prompt_ids(self._run)
            self._prompt_keys = {id_: key for key, id_ in self._prompt_ids.items()}
            self._leases.prompts = list(self._prompt_keys)
        known = len(self._prompt_ids)
        return Answer(wire.Registered(known=known, complete=known == total))

    def _lease_prompts(self, message: wire.LeasePrompts, sender: str, _: list[memoryview]) -> Answer | None:
        if not self._prompt_ids or len(self._prompt_ids) < self._store.task_of(self._run)[2]:
            raise Refused("no_prompts", "the prompts of the run are not registered yet")
        if self._clients[sender].activity == GONE:
            return Answer(wire.Leases(visits=[], reason="it said goodbye"))
        self._take_back(message.held, sender)
        lost = self._leases.lost_by(sender, set(message.held))
        room, reason = self._room_for_leases(message, sender)
        again = self._leases.unheld()[: max(0, room - len(lost))]
        for visit in again:
            self._store.lease_again(visit.id, sender, self._clock.wall())
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
                self._store.lease_again(visit.id, sender, self._clock.wall())
                visit.sender = sender

    def _has_old_weights(self, message: wire.LeasePrompts) -> bool:
        """The answer carries the news of the newest weights: it must not wait for work that needs them."""
        return self._newest is not None and message.weights_version != self._newest.version

    def _room_for_leases(self, message: wire.LeasePrompts, sender: str) -> tuple[int, str]:
        """How many prompts the rate limiter lets a searcher have now, and why not more."""
        limit = self._rules.max_staleness
        if self._finished:
            return 0, "the run is finished"
        if limit is None or len(self._index) < self._rules.min_fill:
            return message.want, ""
        oldest_useful = self._steps_done - limit
        version = self._versions.get(message.weights_version)
        if version is None or version.step < oldest_useful:
            return 0, f"weights v{message.weights_version} are too old for max_staleness {limit}"
        target = (limit + 1) * self._config.train.prompts_per_step
        underway = len(self._leases.leased_prompts() | self._index.fresh_prompts(oldest_useful))
        share = math.ceil(target / max(1, self._clients.live_searchers())) - self._leases.held_by(sender)
        room = max(0, min(message.want, target - underway, share))
        return room, f"{underway} of {target} prompts under way"

    def _new_visit(self, sender: str) -> OpenVisit:
        epoch, place, prompt = self._leases.next_place()
        id_ = self._store.add_visit(self._run, epoch, place, prompt, sender, self._clock.wall())
        visit = OpenVisit(id_, epoch, prompt, sender)
        self._leases.open[id_] = visit
        return visit

    def _put_trajectories(self, message: wire.PutTrajectories, sender: str, frames: list[memoryview]) -> Answer:
        rows = message.rows.model_dump()
        if self._clients[sender].role == "importer":
            prompt_ids = self._store.add_imported_prompts(self._run, sorted(set(rows["prompt_key"])))
            versions = self._imported_versions(rows, frames)
        else:
            prompt_ids = self._prompt_ids
            versions = [self._oldest(runs[:, 0].tolist()) for runs in version_runs_of(rows, frames)]
        if unknown := set(rows["prompt_key"]) - prompt_ids.keys():
            raise Refused("unknown_prompt", f"prompt {min(unknown)!r} is not registered in run {self._run.name}")
        blobs = zip(
            *(
                slices(rows[f"{kind.name}_count"], kind.unit_bytes, frame)
                for kind, frame in zip(ARRAY_KINDS, frames, strict=True)
            ),
            strict=True,
        )
        # Every row is made before the first is written: a put is refused whole or not at all.
        prepared = [
            make_row(
                {name: rows[name][i] for name in ROW_COLUMNS},
                blob,
                run=self._run.id,
                prompt=prompt_ids[rows["prompt_key"][i]],
                sender=self._sender_id(sender),
                sequence=message.first_sequence + i,
                version=versions[i],
                received_at=self._clock.wall(),
            )
            for i, blob in enumerate(blobs)
        ]
        stored = sum(map(self._put_one, prepared))
        self._close_visits(set(rows["lease"]))
        duplicates = len(prepared) - stored
        self._duplicates += duplicates
        self._clients[sender].trajectories += stored
        self._put_times.append((self._clock.monotonic(), stored))
        return Answer(wire.PutAck(first_sequence=message.first_sequence, stored=stored, duplicates=duplicates))

    def _oldest(self, versions: list[int]) -> int:
        """The version of the earliest step: after a resume that need not be the smallest."""
        if missing := set(versions) - self._versions.keys():
            raise Refused("unknown_version", f"policy version {min(missing)} was never announced")
        return min(versions, key=lambda version: (self._versions[version].step, version))

    def _imported_versions(self, rows: dict[str, Any], frames: list[memoryview]) -> list[int]:
        """A version number of another run names another policy, even if this run has that number too."""
        return [
            wire.NO_POLICY
            if "imported_version" in metadata or not self._versions.keys() >= set(runs[:, 0].tolist())
            else self._oldest(runs[:, 0].tolist())
            for metadata, runs in zip(rows["metadata"], version_runs_of(rows, frames), strict=True)
        ]

    def _put_one(self, row: NewRow) -> bool:
        id_ = self._store.put(row.columns, row.payload)
        if id_ is None:
            return False
        self._trajectories += 1
        self._errors += row.failed
        if not row.failed:
            step = self._versions[row.version].step if row.version != wire.NO_POLICY else 0
            self._index.add(Entry(id_, row.prompt, step, row.reward, row.dedup_hash))
        return True

    def _close_visits(self, leases: set[int]) -> None:
        mine = [lease for lease in leases if self._leases.open.pop(lease, None) is not None]
        self._store.close_visits(mine, self._clock.wall())

    # ------------------------------------------------------------ trainer

    def _sample_batch(self, message: wire.SampleBatch, _: str, __: list[memoryview]) -> Answer | None:
        if not self._store.has_batch(self._run, message.step):
            rng = np.random.default_rng([self._run.seed, message.step])
            groups = sample_groups(
                self._index, self._rules, step=message.step, groups=message.prompts, samples=message.samples, rng=rng
            )
            if isinstance(groups, Shortage):
                self._trainer_waits_for = groups.reason
                return None
            self._check_size([entry.id for group in groups for entry in group])
            self._store.record_batch(self._run, message.step, groups, self._clock.wall())
        self._trainer_waits_for = ""
        return self._recorded_batch(message)

    def _check_size(self, trajectories: list[int]) -> None:
        """A batch that fits no message must not be recorded: it could never be handed out."""
        for place, blobs in enumerate(zip(*self._store.payloads(trajectories), strict=True)):
            if (size := sum(map(len, blobs))) > MAX_FRAME_BYTES:
                raise Refused(
                    "oversize",
                    f"a batch with {size} bytes of {ARRAY_KINDS[place].name}, at most {MAX_FRAME_BYTES} fit a "
                    "message: lower train.prompts_per_step or search.max_tokens",
                )

    def _recorded_batch(self, message: wire.SampleBatch) -> Answer:
        rows = self._store.batch_rows(self._run, message.step, message.reference)
        blobs = list(zip(*self._store.payloads(rows["id"]), strict=True))
        counts = {
            f"{kind.name}_count": [len(blob) // kind.unit_bytes for blob in column]
            for kind, column in zip(ARRAY_KINDS, blobs, strict=True)
        }
        batch = wire.Batch(
            step=message.step,
            trajectory_ids=rows["id"],
            prompt_key=rows["prompt_key"],
            reward=rows["reward"],
            reward_parts=[json.loads(parts) for parts in rows["reward_parts"]],
            policy_version=rows["policy_version"],
            staleness=rows["staleness"],
            plain_sampling=[bool(plain) for plain in rows["plain_sampling"]],
            reference_logprobs=rows["reference_logprob"],
            **counts,
        )
        return Answer(batch, [b"".join(column) for column in blobs])

    def _report_step(self, message: wire.ReportStep, _: str, __: list[memoryview]) -> Answer:
        if not self._store.has_batch(self._run, message.step):
            raise Refused("unknown_step", f"no batch was handed out for step {message.step}")
        self._store.report(self._run, message, self._clock.wall())
        self._index.mark_trained(self._store.batch_trajectories(self._run, message.step))
        self._steps_done = max(self._steps_done, message.step + 1)
        return Answer(wire.Done())

    def _announce_snapshot(self, message: wire.AnnounceSnapshot, _: str, __: list[memoryview]) -> Answer:
        known = self._versions.get(message.weights.version)
        if known is not None and known != message.weights:
            raise Refused("version_taken", f"snapshot v{known.version} was announced before, with other content")
        self._store.add_snapshot(self._run, message, self._clock.wall())
        self._versions[message.weights.version] = message.weights
        self._newest = self._versions[max(self._versions)]
        return Answer(wire.Done())

    def _finish_run(self, message: wire.FinishRun, _: str, __: list[memoryview]) -> Answer:
        self._store.finish(self._run, message.step)
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
        self._put_times = [(at, rows) for at, rows in self._put_times if now - at < 10]
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
            puts_per_second=sum(rows for _, rows in self._put_times) / 10,
            database_bytes=self._store.database_bytes(),
            rejected=dict(self.rejected),
            trainer_waits_for=self._trainer_waits_for,
            clients=self._clients.status(self._leases.held_by),
        )

    def _sender_id(self, sender: str) -> int:
        if sender not in self._sender_ids:
            self._sender_ids[sender] = self._store.sender_id(self._run, sender, self._clients[sender].role)
        return self._sender_ids[sender]
