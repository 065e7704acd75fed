"""The sampling index against a model of plain lists, and against one rebuilt from the same history."""

import dataclasses
import sys
import tracemalloc
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tba.buffer.index import Entry, SamplingIndex
from tba.buffer.policy import SamplingRules, Shortage, sample_groups
from tba.buffer.remover import Limits, keyed_hash

from .index_lab import add, block_of


def index_of(rows: list[tuple[int, float]], **limits: object) -> SamplingIndex:
    """Rows are (prompt, reward); ids count from 0, steps are the ids, every response is 10 bytes."""
    index = SamplingIndex(Limits(**{"prompt_cap": 100, "dedup": False, **limits}))
    for id_, (prompt, reward) in enumerate(rows):
        add(index, Entry(id_, prompt, id_, reward, dedup_hash=id_, payload_bytes=10))
    return index


def ids(index: SamplingIndex, prompt: int = 0) -> list[int]:
    return [entry.id for entry in index.entries(prompt)]


def test_newest_drops_the_oldest():
    index = index_of([(0, 0.0)] * 5, prompt_cap=3)
    assert ids(index) == [2, 3, 4]


def test_best_drops_the_lowest_reward_and_of_equal_ones_the_oldest():
    index = index_of([(0, reward) for reward in (2.0, 1.0, 1.0, 3.0, 1.0, 0.0)], prompt_cap=3, keep="best")
    assert ids(index) == [0, 3, 4]


def test_a_reservoir_keeps_the_smallest_keyed_hashes():
    index = index_of([(0, 0.0)] * 50, prompt_cap=5, keep="reservoir", seed=3)
    assert ids(index) == sorted(sorted(range(50), key=lambda id_: keyed_hash(3, id_))[:5])


def test_a_reservoir_holds_old_and_new_alike():
    kept = [
        id_ for seed in range(300) for id_ in ids(index_of([(0, 0.0)] * 20, prompt_cap=4, keep="reservoir", seed=seed))
    ]
    counts = np.bincount(kept, minlength=20)
    assert counts.sum() == 1200
    assert ((counts - 60) ** 2 / 60).sum() < 56  # chi-square, 19 degrees of freedom: p < 1e-5


def test_total_rows_drop_the_oldest_of_all_prompts():
    index = index_of([(0, 0.0), (1, 0.0), (0, 0.0), (2, 0.0)], max_rows=2)
    assert (ids(index, 0), ids(index, 1), ids(index, 2)) == ([2], [], [3])
    assert index.prompts() == [0, 2]


def test_total_bytes_drop_the_oldest_of_all_prompts():
    index = index_of([(0, 0.0), (1, 0.0), (0, 0.0), (2, 0.0)], max_bytes=35)
    assert index.prompts() == [0, 1, 2]
    assert ids(index, 0) == [2]
    assert index.payload_bytes == 30


def test_trained_marks_follow_an_entry_through_a_squeeze():
    index = index_of([(n % 7, 0.0) for n in range(5000)], prompt_cap=10)
    index.mark_taken([4990, 4995, 3])
    index.squeeze()
    trained = [entry.id for prompt in range(7) for entry in index.entries(prompt) if entry.taken]
    assert sorted(trained) == [4990, 4995]
    assert len(index.slots) == len(index) == 70


def test_gone_slots_never_pile_up():
    index = SamplingIndex(Limits(prompt_cap=4, dedup=True))
    for id_ in range(20_000):
        add(index, Entry(id_, id_ % 1000, 0, 0.0, dedup_hash=id_))
        assert len(index.slots) - len(index) <= max(1024, len(index.slots) // 4)


# ------------------------------------------------------------ any sequence


class Model:
    """The index as one would write it with lists: everything is recomputed from the whole history."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.history: list[Entry] = []
        self.taken: set[int] = set()

    def kept(self) -> list[Entry]:
        limits, kept = self.limits, []
        for entry in self.history:
            if limits.dedup:
                kept = [old for old in kept if (old.prompt, old.dedup_hash) != (entry.prompt, entry.dedup_hash)]
            kept.append(entry)
            group = [old for old in kept if old.prompt == entry.prompt]
            if len(group) > limits.prompt_cap:
                worst = {
                    "newest": lambda old: old.id,
                    "best": lambda old: (old.reward, old.id),
                    "reservoir": lambda old: -keyed_hash(limits.seed, old.id),
                }[limits.keep]
                kept.remove(min(group, key=worst))
            while (limits.max_rows is not None and len(kept) > limits.max_rows) or (
                limits.max_bytes is not None and sum(old.payload_bytes for old in kept) > limits.max_bytes
            ):
                del kept[0]
        return [dataclasses.replace(entry, taken=entry.id in self.taken) for entry in kept]

    def fresh(self, min_step: int, need: int) -> set[int]:
        groups = defaultdict(list)
        for entry in self.kept():
            if entry.step >= min_step:
                groups[entry.prompt].append(entry)
        return {p for p, group in groups.items() if len(group) >= need and not all(entry.taken for entry in group)}


limits = st.builds(
    Limits,
    prompt_cap=st.integers(1, 4),
    dedup=st.booleans(),
    keep=st.sampled_from(["newest", "best", "reservoir"]),
    max_rows=st.none() | st.integers(1, 12),
    max_bytes=st.none() | st.integers(1, 60),
    seed=st.integers(0, 3),
)
sampling_rules = st.builds(
    SamplingRules,
    recency_fraction=st.sampled_from([0.0, 0.5, 1.0]),
    recency_window=st.integers(0, 3),
    inverse_temperature=st.sampled_from([0.0, 1.5, 1e9]),
    max_staleness=st.none() | st.integers(0, 4),
    min_fill=st.just(0),
    prompt_priority=st.sampled_from(["uniform", "recency", "softmax", "rank"]),
    trajectory_priority=st.sampled_from(["uniform", "recency", "softmax", "rank"]),
    flat_group_weight=st.sampled_from([0.0, 0.3, 1.0]),
    replacement=st.sampled_from(["if_needed", "never", "always"]),
)


prompts = st.integers(0, 5)
rows = st.tuples(prompts, st.integers(0, 3), st.integers(-1, 2), st.integers(-2, 2))


class IndexMachine(RuleBasedStateMachine):
    """Puts, trainings, batches, squeezes and restarts in any order, while the policy's step moves on."""

    @initialize(limits=limits, rules=sampling_rules, need=st.integers(1, 2))
    def start(self, limits: Limits, rules: SamplingRules, need: int) -> None:
        self.model, self.rules, self.need = Model(limits), rules, need
        self.index, self.step = SamplingIndex(limits), 0

    @rule(rows=st.lists(rows, min_size=1, max_size=4))
    def put(self, rows: list[tuple[int, int, int, int]]) -> None:
        for row in rows:
            add(self.index, dataclasses.replace(self.entry(*row)))

    @rule(prompt=prompts, rows=st.lists(rows, min_size=2, max_size=6))
    def put_block(self, prompt: int, rows: list[tuple[int, int, int, int]]) -> None:
        entries = [self.entry(prompt, *rest) for _, *rest in rows]
        self.index.extend(block_of(entries))

    def entry(self, prompt: int, age: int, reward: int, dedup: int) -> Entry:
        id_, step = 2 * len(self.model.history) + 1, max(0, self.step - age)
        entry = Entry(id_, prompt << 20, step, float(reward), dedup, payload_bytes=5 + prompt)
        self.model.history.append(entry)
        return entry

    @rule(back=st.lists(st.integers(0, 10), max_size=4))
    def train(self, back: list[int]) -> None:
        ids = [2 * len(self.model.history) + 1 - n for n in back]
        self.index.mark_taken(ids)
        self.model.taken.update(set(ids) & {entry.id for entry in self.model.history})

    @rule(steps=st.sampled_from([-1, 1, 1, 2, 5]))
    def move_on(self, steps: int) -> None:
        self.step = max(0, self.step + steps)

    @rule()
    def catch_up(self) -> None:
        if self.index.board is not None:
            self.index.board.catch_up()

    @rule()
    def squeeze(self) -> None:
        self.index.squeeze()

    @rule()
    def restart(self) -> None:
        self.index = self.rebuilt()

    @rule(groups=st.integers(1, 6), samples=st.integers(1, 3))
    def sample(self, groups: int, samples: int) -> None:
        """A warm index gives the batch that a rebuilt one gives, from what the model holds eligible."""
        warm, cold = (
            sample_groups(
                index, self.rules, step=self.step, groups=groups, samples=samples, rng=np.random.default_rng(self.step)
            )
            for index in (self.index, self.rebuilt())
        )
        assert warm == cold
        eligible = self.eligible(samples)
        if isinstance(warm, Shortage):
            assert len(eligible) < groups
        else:
            assert len({group[0].prompt for group in warm}) == groups
            assert all(entry in eligible[entry.prompt] for group in warm for entry in group)

    @invariant()
    def equals_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        kept = self.model.kept()
        found = [entry for prompt in self.index.prompts() for entry in self.index.entries(prompt)]
        assert sorted(found, key=lambda entry: entry.id) == kept
        assert len(self.index) == len(kept)
        assert self.index.payload_bytes == sum(entry.payload_bytes for entry in kept)
        assert self.index.fresh_prompts(self.step - 2, self.need) == self.model.fresh(self.step - 2, self.need)

    def rebuilt(self) -> SamplingIndex:
        index = SamplingIndex(self.model.limits)
        for entry in self.model.history:
            add(index, dataclasses.replace(entry, taken=entry.id in self.model.taken))
        return index

    def eligible(self, samples: int) -> dict[int, list[Entry]]:
        groups, limit = defaultdict(list), self.rules.max_staleness
        for entry in self.model.kept():
            if limit is None or self.step - entry.step <= limit:
                groups[entry.prompt].append(entry)
        need = samples if self.rules.replacement == "never" else 1
        return {prompt: group for prompt, group in groups.items() if len(group) >= need}


IndexMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None, derandomize=True)
TestAnySequence = IndexMachine.TestCase


# ------------------------------------------------------------ scale

RULES = SamplingRules(recency_fraction=0.5, recency_window=3, inverse_temperature=1.0, max_staleness=50, min_fill=0)


def crowded(prompts: int, each: int, **changes: object) -> SamplingIndex:
    index = SamplingIndex(Limits(**{"prompt_cap": 100, "dedup": True, **changes}))
    for id_ in range(prompts * each):
        add(index, Entry(id_, 5000 + id_ % prompts, id_ * 40 // (prompts * each), id_ % 11 / 11, id_ * 7919 % 2**61))
    return index


@pytest.mark.parametrize(
    ("limits", "rule"), [({}, "uniform"), ({"keep": "reservoir"}, "rank"), ({"prompt_cap": 8}, "rank")]
)
def test_a_trajectory_takes_at_most_100_bytes(limits, rule):
    """At 8 of a prompt, the sampler's view and every growth slack included, as the allocator counts it."""
    rules = dataclasses.replace(RULES, prompt_priority=rule)
    tracemalloc.start()
    index = crowded(4100, 11 if "prompt_cap" in limits else 8, **limits)  # 4,100: the trees have just doubled
    for step in (40, 41):
        sample_groups(index, rules, step=step, groups=64, samples=8, rng=np.random.default_rng(step))
        index.fresh_prompts(step - 2)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == 8 * 4100
    assert taken / len(index) <= 100


@pytest.mark.parametrize("keep", ["newest", "best", "reservoir"])
def test_a_long_block_costs_what_its_rows_cost(keep):
    """Of 8,192 responses to one prompt 100 stay: who leaves is never looked for among all that came."""
    entries = [Entry(id_, 0, 0, id_ % 7, id_) for id_ in range(8192)]
    lengths = []
    index = SamplingIndex(Limits(prompt_cap=100, dedup=True, keep=keep))
    remove, index._remove = (
        index._remove,
        lambda place, where: (lengths.append(index._count[place]), remove(place, where)),
    )
    index.extend(block_of(entries))
    assert len(index) == 100
    assert keep == "newest" or max(lengths) == 101


def lines_run(index: SamplingIndex, rules: SamplingRules, step: int) -> int:
    """Lines of Python that one batch executes; a comprehension counts once for each element."""
    lines = 0

    def count(*_: object):
        nonlocal lines
        lines += 1
        return count

    sys.settrace(count)
    try:
        sample_groups(index, rules, step=step, groups=16, samples=4, rng=np.random.default_rng(0))
        index.fresh_prompts(step)
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("rule", ["uniform", "recency", "softmax", "rank"])
def test_a_batch_scans_neither_prompts_nor_trajectories(rule):
    """64 times the data costs less than twice the work, with as many changed prompts in between."""
    rules = dataclasses.replace(RULES, prompt_priority=rule)
    work = []
    for prompts in (512, 32_768):
        index = crowded(prompts, 2)
        sample_groups(index, rules, step=50, groups=16, samples=4, rng=np.random.default_rng(0))
        index.fresh_prompts(50)
        for n in range(32):
            add(index, Entry(10**6 + n, 5000 + 3 * n, 50, n % 3, n))
        index.mark_taken(range(100))
        work.append(lines_run(index, rules, step=50))
    assert work[1] < 2 * work[0]
