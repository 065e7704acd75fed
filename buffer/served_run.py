"""The run that is served: its file and settings, and what is remembered of it beside the file.

Invariant: the memory never says more than what is committed. If a transaction fails it is made anew.
"""

from tba.buffer.clients import Clients
from tba.buffer.history import History
from tba.buffer.index import SamplingIndex
from tba.buffer.leases import LeaseBook
from tba.buffer.policy import SamplingRules, warm_up
from tba.buffer.rate_limiter import RateLimiter
from tba.buffer.received import SequenceRanges
from tba.buffer.remover import Limits
from tba.buffer.store import Store
from tba.buffer.tables.runs import Run
from tba.common.clock import Clock
from tba.common.config import Config
from tba.common.errors import Refused

# Of steps, versions and prompts. The index keeps them in 32 bits; and the number after the last is told to others.
_NUMBERS = (1 << 31) - 1


class ServedRun:
    """What the handlers of requests share. They write to the store and, to the same effect, to the memory.

    Leasing, Puts and Training keep `clients`, `rules` and `rate`: `rebuild` must not make others of these.
    """

    def __init__(self, store: Store, run: Run, config: Config, clock: Clock, history: History) -> None:
        self.store = store
        self.run = run
        self.config = config
        self.clock = clock
        self.history = history
        self.rules = _rules(config)
        self._limits = _limits(config, run.seed)
        ratio = config.samples_per_insert if history.grows else None
        self.rate = RateLimiter(ratio, config.samples_per_insert_slack)
        self.clients = Clients(clock, config.buffer.lease_seconds)
        self.too_little_data = False  # the last batch that was asked for could not be sampled
        self.rebuild()

    def rebuild(self) -> None:
        """Make the memory anew from the committed database."""
        store, run = self.store, self.run
        self.versions = {ref.version: ref for ref in store.snapshots.all(run)}
        self.newest = self.versions[max(self.versions)] if self.versions else None
        self.steps_done = store.batches.steps_done(run)
        self.next_step = store.batches.recorded_steps(run)
        self.finished = store.runs.finished_step(run) is not None
        self.clients.admit_trainers(store.senders.trainers(run))
        self._know_prompts()
        epoch, place = store.visits.newest_place(run)
        self.leases = LeaseBook(run.seed, list(self.prompt_keys), epoch, place)
        self.leases.open = {visit.id: visit for visit in store.visits.open(run)}
        self._rebuild_index()
        self.trajectories, self.errors = store.trajectories.counts(run)
        self.sampled = store.batches.consumed(run)
        self._sender_ids: dict[str, int] = {}
        self.received: dict[str, SequenceRanges] = {}

    def _know_prompts(self) -> None:
        self.prompt_ids = self.store.prompts.ids(self.run)
        self.prompt_keys = {id_: key for key, id_ in self.prompt_ids.items()}

    def _rebuild_index(self) -> None:
        self.index = SamplingIndex(self._limits)
        for block in self.store.trajectories.blocks(self.run, self.history.policy_steps(self.versions)):
            self.index.extend(block)
        now, samples = self.history.step(self.steps_done), self.config.train.samples_per_prompt
        warm_up(self.index, self.rules, step=now, samples=samples)

    def add_prompts(self, offset: int, keys: list[str]) -> None:
        """More of the task's prompts, at positions from `offset` on."""
        self.store.prompts.add(self.run, offset, keys)
        self._know_prompts()
        self.leases.prompts = list(self.prompt_keys)

    def sender_id(self, sender: str) -> int:
        """The number of a sender that was heard."""
        if sender not in self._sender_ids:
            self._sender_ids[sender] = self.store.senders.number(self.run, sender, self.clients[sender].role)
        return self._sender_ids[sender]

    def ranges_of(self, sender: str) -> SequenceRanges:
        """The sequence numbers that are there from a sender."""
        if sender not in self.received:
            self.received[sender] = SequenceRanges(self.store.trajectories.sequence_ranges(self.sender_id(sender)))
        return self.received[sender]


def _rules(config: Config) -> SamplingRules:
    return SamplingRules(
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


def _limits(config: Config, seed: int) -> Limits:
    return Limits(
        prompt_cap=config.buffer.prompt_cap,
        dedup=config.buffer.dedup,
        keep=config.buffer.prompt_keep,
        max_rows=config.max_trajectories,
        max_bytes=config.max_payload_bytes,
        seed=seed,
    )


def refuse_beyond(what: str, *numbers: int) -> None:
    """Raise Refused: such a number cannot be stored, or would be found in the file at every later start."""
    if max(numbers) >= _NUMBERS:
        raise Refused("out_of_range", f"a {what} with the number {max(numbers)}, at most {_NUMBERS - 1} is possible")
