"""The memory of the run that is served, alongside its file.

Invariant: the memory never holds more than what is committed. If a transaction fails, it is rebuilt from the file.
"""

from dataclasses import dataclass, field

from tba.buffer.sampling.index import Block, SamplingIndex, context_of
from tba.buffer.sampling.rate_limiter import RateLimiter
from tba.buffer.sampling.sampler import Sampler
from tba.buffer.service.clients import Clients
from tba.buffer.service.curriculum import Curriculum
from tba.buffer.service.leases import LeaseBook
from tba.buffer.service.pace import DataLag, Pace
from tba.buffer.store.store import Store
from tba.buffer.store.tables.runs import Run
from tba.common.clock import Clock
from tba.common.config import Config
from tba.common.errors import Refused
from tba.common.log import get_logger
from tba.common.wire import messages
from tba.common.wire.fields import MAX_CLIENTS

log = get_logger(__name__)

# Limit of steps, versions and prompts: the index keeps them in 32 bits, and clients receive the number after the last.
_NUMBERS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ReplyBody:
    """A reply message and its array frames. Handlers return None instead to park the request."""

    message: messages.Message
    frames: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AsOf:
    """A recorded run at one step: its data does not age. `policy_steps` are the optimiser steps by version."""

    step: int
    policy_steps: dict[int, int]


class RunState:
    """What the request handlers share. They write each change to the store and to this memory.

    `rebuild` may replace any attribute: handlers read `state.x` each time and keep no copy.
    """

    def __init__(self, store: Store, run: Run, config: Config, clock: Clock, as_of: AsOf | None = None) -> None:
        self.store = store
        self.run = run
        self.config = config
        self.clock = clock
        self.as_of = as_of
        self.rate = RateLimiter(None if as_of else config.samples_per_insert, config.samples_per_insert_slack)
        self.clients = Clients(clock, config.buffer.lease_seconds)
        self.pace = Pace(clock)
        self.lag = DataLag(clock)
        # Whether the last requested batch could not be sampled.
        self.too_little_data = False
        # Whether the next batch and the next snapshot may be of any number: a trainer may have continued elsewhere.
        self.may_skip_steps = self.may_skip_versions = True
        self.rebuild()
        # The newest snapshot when the trainer, or this server, started: its files may be gone.
        self.earlier_version = self.newest.version if self.newest else None

    def rebuild(self) -> None:
        """Read everything back from the committed database."""
        store, run = self.store, self.run
        self.versions = {ref.version: ref for ref in store.snapshots.all(run)}
        self.newest = self.versions[max(self.versions)] if self.versions else None
        self.steps_done = store.batches.steps_done(run)
        self.next_step = store.batches.recorded_steps(run)
        self.finished = store.runs.finished_step(run) is not None
        self.clients.admit_trainers(store.senders.trainers(run))
        self.task = store.runs.task(run)
        self.prompt_ids = store.prompts.ids(run)
        self.prompt_keys = {id_: key for key, id_ in self.prompt_ids.items()}
        epoch, visited = store.visits.newest_epoch(run)
        decisions = store.visits.decisions(run, epoch)
        self.leases = LeaseBook(run.seed, list(self.prompt_keys), epoch, visited, store.visits.open(run), decisions)
        self._rebuild_index()
        self.trajectories, self.errors = store.trajectories.counts(run)
        self.sampled = store.batches.consumed(run)
        # (sender, acknowledgement) of each put in the transaction in progress.
        self.uncommitted_puts: list[tuple[str, messages.PutAck]] = []
        self.uncommitted_errors: list[str] = []
        self._sender_ids: dict[str, int] = {}
        # The number after the largest stored sequence number, of senders that have put since the start.
        self.next_sequences: dict[str, int] = {}

    def _rebuild_index(self) -> None:
        announced = {version: ref.step for version, ref in self.versions.items()}
        steps_of = self.as_of.policy_steps if self.as_of else announced
        settings, train = self.config.buffer, self.config.train
        self.index = SamplingIndex(settings, seed=self.run.seed)
        self.curriculum = Curriculum(self.config.curriculum, guided=self.config.search.guided > 0)
        for parts, (ids, versions, *columns) in self.store.trajectories.blocks(self.run):
            context = context_of(*parts)
            self.index.extend(Block(context, ids, [steps_of.get(version, 0) for version in versions], *columns))
        # Also from answers that were compacted: the index no longer has them.
        answers = self.store.trajectories.answers(self.run) if self.curriculum.is_on else ()
        for prompt, version, reward, guided in answers:
            self.curriculum.note(prompt, [version], [reward], guided=guided is not None)
        samples, publish_every = train.samples_per_prompt, train.publish_every
        self.sampler = Sampler(self.index, settings, publish_every=publish_every, samples=samples)

    def begin_epoch(self) -> None:
        """Begin the next epoch. It keeps at least the prompts of the batches that may be under way together."""
        leases, config = self.leases, self.config
        epoch, least = leases.epoch + 1, config.train.prompts_per_step * ((config.max_staleness or 0) + 1)
        decisions = self.curriculum.decide(epoch, leases.shuffled(epoch), least)
        self.store.visits.decide(self.run, epoch, decisions)
        leases.begin(epoch, decisions)
        if decisions:
            skipped, postponed = len(leases.skipped), len(leases.postponed)
            log.info("epoch begins", epoch=epoch, prompts=len(leases.prompts), skipped=skipped, postponed=postponed)

    def add_prompts(self, keys: list[str], texts: list[str | None], answers: list[str | None]) -> None:
        """Add the next prompts of the task, whose keys are new; `texts` and `answers` may be empty."""
        known = len(self.prompt_ids)
        self.store.prompts.add(self.run, known, keys, texts, answers)
        new = self.store.prompts.ids(self.run, known)
        self.prompt_ids.update(new)
        self.prompt_keys.update((id_, key) for key, id_ in new.items())
        self.leases.prompts.extend(new.values())

    def sender_id(self, sender: str) -> int:
        """Return the database id of a sender that is in `clients`; adds it to the database if it is new."""
        if sender not in self._sender_ids:
            # Drop those of senders that left, so that the cache stays bounded.
            if len(self._sender_ids) >= 2 * MAX_CLIENTS:
                self._sender_ids = {name: id_ for name, id_ in self._sender_ids.items() if name in self.clients}
                stops = self.next_sequences.items()
                self.next_sequences = {name: stop for name, stop in stops if name in self.clients}
            self._sender_ids[sender] = self.store.senders.number(self.run, sender, self.clients[sender].role)
        return self._sender_ids[sender]

    def stored_sequences(self, sender: str, first: int, count: int) -> dict[int, tuple[int, int]]:
        """Return (prompt, dedup_hash) of stored rows with these numbers. The usual put needs no query."""
        if sender not in self.next_sequences:
            self.next_sequences[sender] = self.store.trajectories.next_sequence(self.sender_id(sender))
        if first >= self.next_sequences[sender]:
            return {}
        return self.store.trajectories.stored_sequences(self.sender_id(sender), first, count)

    def shortage_of_space(self) -> str:
        """Return a sentence below `buffer.min_free_mib`: the WAL needs room so that stored data stays readable."""
        floor = self.config.buffer.min_free_mib << 20
        free, _ = self.store.database.disk_space()
        if free >= floor:
            return ""
        return (
            f"{free >> 20} MiB are free on the disk of {self.store.path}, buffer.min_free_mib is {floor >> 20}: make "
            "room, or run `tba buffer prune --tokens`"
        )

    def for_replies(self) -> messages.RunState:
        """Return the part of the state that every reply carries."""
        return messages.RunState(self.newest, self.steps_done, self.finished, self.clients.heartbeat_seconds)


def refuse_beyond(what: str, *numbers: int) -> None:
    """Raise Refused for a number that does not fit: once stored, it would fail every later start."""
    if max(numbers) >= _NUMBERS:
        raise Refused("out_of_range", f"a {what} with the number {max(numbers)}, at most {_NUMBERS - 1} is possible")
