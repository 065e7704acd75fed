"""The sampling index, compared with a model of plain lists and with an index rebuilt from the same history."""

import dataclasses
import math
import sys
import tracemalloc
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tba.buffer.sampling.index import Entry, SamplingIndex, context_of, keyed_hash
from tba.buffer.sampling.sampler import Sampler, Shortage
from tba.common.config.buffer import BufferSection
from tba.common.wire.fields import MAX_PHASES, MAX_TOKENS
from tba.tests.helpers.index import add, block_of, entries_of, kept_ids
from tba.tests.runner import size, slow


def test_a_reservoir_is_a_uniform_sample_of_all_that_arrived():
    kept: list[int] = []
    for seed in range(300):
        index = SamplingIndex(BufferSection(prompt_cap=4, prompt_keep="reservoir"), seed=seed)
        for id_ in range(20):
            add(index, Entry(id_, 0, id_, 0.0, dedup_hash=id_))
        kept += kept_ids(index)
    counts = np.bincount(kept, minlength=20)
    assert counts.sum() == 1200
    # Chi-square with 19 degrees of freedom: p < 1e-5.
    assert ((counts - 60) ** 2 / 60).sum() < 56


def group_hash(seed: int, entry: Entry) -> int:
    return keyed_hash(seed, entry.prompt << 32 | entry.step)


def visits(count: int, *, seed: int, **limits: Any) -> SamplingIndex:
    """Return an index of visits of 2 responses, each at a step of its own. Every fourth visit is of another prompt."""
    index = SamplingIndex(BufferSection(**{"prompt_cap": 1000, "dedup": False} | limits), seed=seed)
    for visit in range(count):
        entries = [Entry(2 * visit + n, visit % 4, visit, 0.0, 2 * visit + n) for n in range(2)]
        index.extend(block_of(entries))
    return index


@pytest.mark.parametrize(("keep", "newest"), [("reservoir", 0), ("both", 8)])
def test_what_stays_of_the_run_is_a_uniform_sample_of_whole_visits_and_the_newest(keep, newest):
    counts = np.zeros(40, int)
    for seed in range(400):
        kept = kept_ids(visits(40, seed=seed, max_trajectories=16, keep=keep))
        assert len(kept) == 16
        assert kept[16 - newest :] == list(range(80 - newest, 80))
        ids = np.array(kept[: 16 - newest])
        assert list(ids[::2] + 1) == list(ids[1::2]), "responses of a visit stay together"
        counts[ids[::2] // 2] += 1
    sampled = counts[: 40 - newest // 2]
    expected = 400 * (8 - newest // 2) / len(sampled)
    # Chi-square with 39 or 35 degrees of freedom: p < 1e-5.
    assert ((sampled - expected) ** 2 / expected).sum() < 93
    # Old and new visits alike.
    assert sampled[:18].sum() == pytest.approx(18 * expected, rel=0.1)


@pytest.mark.parametrize("keep", ["reservoir", "both"])
def test_groups_of_the_largest_contexts_stay_or_leave_together(keep):
    largest = context_of((1 << 32) - 1, MAX_TOKENS, MAX_PHASES)
    for seed in range(20):
        index = SamplingIndex(BufferSection(prompt_cap=1000, max_trajectories=16, keep=keep), seed=seed)
        for visit in range(40):
            context = (1, context_of(1, 2, None), context_of(1, None, 0), largest)[visit % 4]
            index.extend(block_of([Entry(2 * visit + n, context, visit, 0.0, 2 * visit + n) for n in range(2)]))
        ids = np.array(kept_ids(index))
        assert len(ids) == 16
        assert list(ids[::2] + 1) == list(ids[1::2])


@pytest.mark.parametrize("keep", ["newest", "reservoir", "both"])
def test_what_left_the_run_may_be_missing_in_a_rebuild(keep):
    """Tokens that cannot be sampled are archived: an index without their rows goes on as one that had them."""
    limits = BufferSection(prompt_cap=1000, max_trajectories=150, keep=keep)
    used, rebuilt = SamplingIndex(limits, seed=1), SamplingIndex(limits, seed=1)
    entries = [Entry(id_, id_ % 7, id_ // 5, 0.0, id_) for id_ in range(3000)]
    for entry in entries[:2000]:
        add(used, entry)
    for entry in entries[:2000]:
        if entry.id in used:
            add(rebuilt, entry)
    for entry in entries[2000:]:
        add(used, entry)
        add(rebuilt, entry)
        assert len(used) == len(rebuilt) == 150
    assert kept_ids(used) == kept_ids(rebuilt)
    assert used.left["max_trajectories"] == 2850


# ------------------------------------------------------------ any sequence


class Model:
    """The index written with plain lists: everything is recomputed from the whole history."""

    def __init__(self, limits: BufferSection, seed: int) -> None:
        self.limits, self.seed = limits, seed
        self.history: list[Entry] = []
        self.trained: set[int] = set()

    def kept(self) -> list[Entry]:
        limits: BufferSection = self.limits
        most_rows, most_bytes = (
            math.inf if limit == "unbounded" else limit for limit in (limits.max_trajectories, limits.max_payload_bytes)
        )
        kept: list[Entry] = []
        first_safe = 0
        for entry in self.history:
            if limits.dedup:
                kept = [old for old in kept if (old.prompt, old.dedup_hash) != (entry.prompt, entry.dedup_hash)]
            kept.append(entry)
            group = [old for old in kept if old.prompt == entry.prompt]
            if len(group) > limits.prompt_cap:
                worst = {
                    "newest": lambda old: old.id,
                    "best": lambda old: (old.reward, old.id),
                    "reservoir": lambda old: -keyed_hash(self.seed, old.id),
                }[limits.prompt_keep]
                kept.remove(min(group, key=worst))
            while len(kept) > most_rows or sum(old.payload_bytes for old in kept) > most_bytes:
                if limits.keep == "newest":
                    del kept[0]
                    continue
                # The newest half of the room, or nothing, is safe. What has left it does not return.
                safe = (int(most_rows) + 1) // 2 if limits.keep == "both" else 0
                first_safe = max(first_safe, kept[-safe].id if safe else entry.id + 1)
                old = [old for old in kept if old.id < first_safe]
                kept.remove(max(old, key=lambda old: (group_hash(self.seed, old), old.id)))
        return [dataclasses.replace(entry, trained=entry.id in self.trained) for entry in kept]

    def untrained(self, min_step: int, need: int) -> set[int]:
        groups = defaultdict(list)
        for entry in self.kept():
            if entry.step >= min_step:
                groups[entry.prompt].append(entry)
        return {p for p, group in groups.items() if len(group) >= need and not all(entry.trained for entry in group)}


common = {
    "prompt_cap": st.integers(1, 4),
    "dedup": st.booleans(),
    "prompt_keep": st.sampled_from(["newest", "best", "reservoir"]),
}
limits = st.builds(
    BufferSection,
    max_trajectories=st.just("unbounded") | st.integers(1, 12),
    max_payload_bytes=st.just("unbounded") | st.integers(1, 60),
    **common,
) | st.builds(BufferSection, max_trajectories=st.integers(1, 12), keep=st.sampled_from(["reservoir", "both"]), **common)
sampling_rules = st.builds(
    BufferSection,
    recency_fraction=st.sampled_from([0.0, 0.5, 1.0]),
    recency_window=st.just("auto") | st.integers(0, 3),
    inverse_temperature=st.sampled_from([0.0, 1.5, 1e9]),
    max_staleness=st.just("unbounded") | st.integers(0, 4),
    prompt_priority=st.sampled_from(["uniform", "recency", "softmax", "rank"]),
    trajectory_priority=st.sampled_from(["uniform", "recency", "softmax", "rank"]),
    flat_group_weight=st.sampled_from([0.0, 0.3, 1.0]),
    varied_fraction=st.sampled_from([0.3, 1.0]),
    replacement=st.sampled_from(["if_needed", "never", "always"]),
)


prompts = st.integers(0, 5)
rows = st.tuples(prompts, st.integers(0, 3), st.integers(-1, 2), st.integers(-2, 2))


class IndexMachine(RuleBasedStateMachine):
    """Puts, trained marks, batches, compactions and restarts in any order, while the policy's step changes."""

    @initialize(limits=limits, rules=sampling_rules, need=st.integers(1, 2), seed=st.integers(0, 3))
    def start(self, limits: BufferSection, rules: BufferSection, need: int, seed: int) -> None:
        self.model, self.sampling, self.need = Model(limits, seed), rules, need
        self.sampler, self.step = Sampler(SamplingIndex(limits, seed=seed), rules), 0
        self.index = self.sampler.index

    @rule(rows=st.lists(rows, min_size=1, max_size=4))
    def put(self, rows: list[tuple[int, int, int, int]]) -> None:
        for row in rows:
            add(self.index, dataclasses.replace(self.entry(*row)))

    @rule(prompt=prompts, rows=st.lists(rows, min_size=2, max_size=6))
    def put_group(self, prompt: int, rows: list[tuple[int, int, int, int]]) -> None:
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
        self.index.mark_trained(ids)
        self.model.trained.update(set(ids) & {entry.id for entry in self.model.history})

    @rule(steps=st.sampled_from([-1, 1, 1, 2, 5]))
    def change_step(self, steps: int) -> None:
        self.step = max(0, self.step + steps)

    @rule()
    def refresh(self) -> None:
        self.sampler.untrained_prompts(self.step, 1)

    @rule()
    def compact(self) -> None:
        self.index.compact()

    @rule()
    def restart(self) -> None:
        self.sampler = Sampler(self.rebuilt(), self.sampling)
        self.index = self.sampler.index

    @rule(groups=st.integers(1, 6), samples=st.integers(1, 3))
    def sample(self, groups: int, samples: int) -> None:
        """A sampler in use draws the batch that one of a rebuilt index draws, from what is eligible in the model."""
        used, rebuilt = (
            sampler.sample(step=self.step, groups=groups, samples=samples, rng=np.random.default_rng(self.step))
            for sampler in (self.sampler, Sampler(self.rebuilt(), self.sampling))
        )
        assert used == rebuilt
        eligible = self.eligible(samples)
        if isinstance(used, Shortage):
            assert len(eligible) < groups
        else:
            assert len({group[0].prompt for group in used.groups}) == groups
            assert all(entry in eligible[group[0].prompt] for group in used.groups for entry in group)

    @invariant()
    def equals_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        kept = self.model.kept()
        found = [entry for entries in entries_of(self.index).values() for entry in entries]
        assert sorted(found, key=lambda entry: entry.id) == kept
        assert len(self.index) == len(kept)
        assert self.index.payload_bytes == sum(entry.payload_bytes for entry in kept)
        found = self.sampler.untrained_prompts(self.step - 2, self.need).tolist()
        assert len(found) == len(set(found))
        assert set(found) == self.model.untrained(self.step - 2, self.need)

    def rebuilt(self) -> SamplingIndex:
        index = SamplingIndex(self.model.limits, seed=self.model.seed)
        for entry in self.model.history:
            add(index, dataclasses.replace(entry, trained=entry.id in self.model.trained))
        return index

    def eligible(self, samples: int) -> dict[int, list[Entry]]:
        groups, limit = defaultdict[int, list[Entry]](list), self.sampling.max_staleness
        for entry in self.model.kept():
            if limit == "unbounded" or self.step - entry.step <= limit:
                groups[entry.prompt].append(entry)
        need = samples if self.sampling.replacement == "never" else 1
        return {prompt: group for prompt, group in groups.items() if len(group) >= need}


IndexMachine.TestCase.settings = settings(
    max_examples=size(80, 250), stateful_step_count=40, deadline=None, derandomize=True
)
TestAnySequence = pytest.mark.slow(IndexMachine.TestCase)


# ------------------------------------------------------------ scale

RULES: dict[str, Any] = {"recency_fraction": 0.5, "recency_window": 3, "inverse_temperature": 1.0, "max_staleness": 50}


def crowded(prompts: int, each: int, **changes: Any) -> SamplingIndex:
    index = SamplingIndex(BufferSection(**changes))
    for id_ in range(prompts * each):
        add(index, Entry(id_, 5000 + id_ % prompts, id_ * 40 // (prompts * each), id_ % 11 / 11, id_ * 7919 % 2**61))
    return index


@pytest.mark.slow
@pytest.mark.parametrize(("limits", "rule"), [({"prompt_keep": "reservoir"}, "rank"), ({"prompt_cap": 8}, "softmax")])
def test_a_trajectory_takes_at_most_100_bytes(limits, rule):
    """With 8 trajectories per prompt, including the sampler and the growth slack, as the allocator counts it."""
    rules = BufferSection(**RULES, prompt_priority=rule)
    tracemalloc.start()
    index = crowded(1500, 11 if "prompt_cap" in limits else 8, **limits)
    sampler = Sampler(index, rules)
    for step in (40, 41):
        sampler.sample(step=step, groups=64, samples=8, rng=np.random.default_rng(step))
        sampler.untrained_prompts(step - 2, need=1)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == 8 * 1500
    assert used / len(index) <= 100


def lines_run(sampler: Sampler, step: int) -> int:
    """Return how many lines of Python one batch executes; a comprehension counts once per element."""
    lines = 0

    def count(*_: object):
        nonlocal lines
        lines += 1
        return count

    sys.settrace(count)
    try:
        sampler.sample(step=step, groups=16, samples=4, rng=np.random.default_rng(0))
        sampler.untrained_prompts(step, need=1)
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("rule", ["recency", "rank", *slow("uniform", "softmax")])
def test_a_batch_has_no_python_loop_over_all_prompts_or_trajectories(rule):
    """With 16 times the data and the same number of changed prompts, it executes less than twice the lines."""
    rules = BufferSection(**RULES, prompt_priority=rule)
    work = []
    for prompts in (512, 8192):
        index = crowded(prompts, 2)
        sampler = Sampler(index, rules)
        sampler.sample(step=50, groups=16, samples=4, rng=np.random.default_rng(0))
        for n in range(32):
            add(index, Entry(10**6 + n, 5000 + 3 * n, 50, n % 3, n))
        index.mark_trained(range(100))
        work.append(lines_run(sampler, step=50))
    assert work[1] < 2 * work[0]
