"""What the sampler draws: frequencies by chi-square tests with fixed seeds, and the staleness where the data is old.

The expected chances are computed here from plain lists, by the definitions in `BufferSection`.
"""

import itertools
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tba
from tba.buffer.sampling.index import Block, Entry, SamplingIndex
from tba.buffer.sampling.sampler import Draw, Sampler, Shortage
from tba.buffer.service import pace
from tba.common.config import Config
from tba.common.config.buffer import BufferSection
from tba.tests.helpers.index import add
from tba.tests.runner import slow

# Enough to reject, nine times in ten, chances of 30 outcomes that are off by 17 % each (chi-square, p = 1e-4): an error
# in a rule changes them by far more.
DRAWS = 2000
STEP = 10
# prompt -> (step, reward, trained) of each trajectory. The rewards of prompts 4 and 5 are flat; 0, 1 and 4 have recent
# data; that of 0 and 4 is in no recorded batch. Prompts 2 and 3 are in the tier of age that ends 4 steps behind the
# window, and 5 is in the last one.
HISTORY = {
    0: [(10, 0.0, False), (2, 1.0, True)],
    1: [(9, 1.0, True), (9, 0.5, True), (1, 0.9, False)],
    2: [(5, 0.2, False), (4, 0.1, False)],
    3: [(6, -1.0, False), (3, 0.4, True)],
    4: [(9, 0.6, False), (9, 0.6, True)],
    5: [(0, 1.0, False)],
}
PROMPTS = list(HISTORY)
FLAT = {4, 5}
AGE = {0: 0, 4: 0, 1: 1, 2: 2, 3: 2, 5: 3}
MEAN = {prompt: sum(reward for _, reward, _ in rows) / len(rows) for prompt, rows in HISTORY.items()}

ONE_PROMPT = [(10, 0.5, False), (3, 2.0, False), (9, -1.0, False), (9, 0.5, False), (2, 1.0, True)]


def rules(**changes: Any) -> BufferSection:
    return BufferSection(**{"recency_fraction": 0.0, "recency_window": 1, "inverse_temperature": 1.3} | changes)


def index_of(history: Mapping[int, list[tuple[int, float, bool]]]) -> SamplingIndex:
    index = SamplingIndex(BufferSection(dedup=False))
    rows = [(prompt, *row) for prompt, group in history.items() for row in group]
    for id_, (prompt, step, reward, trained) in enumerate(rows):
        add(index, Entry(id_, prompt, step, reward, id_, trained))
    return index


def batches(history: Mapping[int, list[tuple[int, float, bool]]], rules: BufferSection, *, groups: int, samples: int):
    """Yield DRAWS batches."""
    sampler, rng = Sampler(index_of(history), rules), np.random.default_rng(1234)
    for _ in range(DRAWS):
        found = sampler.sample(step=STEP, groups=groups, samples=samples, rng=rng)
        assert isinstance(found, Draw)
        yield found.groups


def first_prompts(
    history: Mapping[int, list[tuple[int, float, bool]]], rules: BufferSection, *, groups: int = 1, samples: int = 1
) -> Counter[tuple[int, ...]]:
    """Return how often a batch has these prompts, in their order."""
    found = batches(history, rules, groups=groups, samples=samples)
    return Counter(tuple(group[0].prompt for group in batch) for batch in found)


def assert_drawn_as_declared(drawn: Counter[Any], declared: Mapping[Any, float]) -> None:
    """A chi-square test at p = 1e-4, by the approximation of Wilson and Hilferty; impossible outcomes are errors."""
    assert sum(declared.values()) == pytest.approx(1)
    possible = {outcome: DRAWS * chance for outcome, chance in declared.items() if chance > 0}
    assert set(drawn) <= set(possible)
    statistic = sum((drawn[outcome] - expected) ** 2 / expected for outcome, expected in possible.items())
    freedom = max(1, len(possible) - 1)
    assert statistic <= freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def normalised(weights: Mapping[int, float]) -> dict[Hashable, float]:
    total = sum(weights.values())
    return {outcome: weight / total for outcome, weight in weights.items()}


def by_factor(weights: dict[int, float], flat_weight: float) -> dict[int, float]:
    """Return weights times the factor for flat prompts; with a factor of 0 these count only if there are no others."""
    if flat_weight == 0:
        return {p: w for p, w in weights.items() if p not in FLAT} or weights
    return {p: w * (flat_weight if p in FLAT else 1) for p, w in weights.items()}


def across(rule: str, left: list[int], flat_weight: float) -> dict[Hashable, float]:
    """Return the declared chance of each prompt that is left, for one group of a batch."""
    if rule == "rank":
        order = sorted(PROMPTS, key=lambda p: (p in FLAT and flat_weight < 1, -MEAN[p], p))
        return normalised({p: (order.index(p) + 1) ** -1 for p in left})
    if rule == "recency":
        youngest = min(AGE[p] for p in left)
        return normalised(by_factor({p: 1.0 for p in left if AGE[p] == youngest}, flat_weight))
    temperature = 1.3 if rule == "softmax" else 0.0
    return normalised(by_factor({p: math.exp(temperature * MEAN[p]) for p in left}, flat_weight))


def mixed(recency_fraction: float, rule: str, left: list[int], flat_weight: float = 1.0) -> dict[Hashable, float]:
    """Return the chances where a group is drawn by the recency rule with a probability, else by another rule."""
    recency, priority = across("recency", left, flat_weight), across(rule, left, flat_weight)
    return {p: recency_fraction * recency.get(p, 0.0) + (1 - recency_fraction) * priority.get(p, 0.0) for p in PROMPTS}


def in_order(groups: int, chances: Callable[[list[int]], Mapping[Hashable, float]]) -> dict[Hashable, float]:
    """Return the declared chance of each sequence of different prompts."""
    declared: dict[Hashable, float] = {}
    for sequence in itertools.permutations(PROMPTS, groups):
        left, chance = list(PROMPTS), 1.0
        for prompt in sequence:
            chance *= chances(left).get(prompt, 0.0)
            left.remove(prompt)
        declared[sequence] = chance
    return declared


@pytest.mark.parametrize("flat_weight", [0.4, *slow(1.0, 0.0)])
@pytest.mark.parametrize(("rule", "groups"), [("uniform", 2), ("recency", 6), ("softmax", 2), ("rank", 2)])
def test_prompts_are_drawn_as_declared(rule, groups, flat_weight):
    """Compares the first prompts of a batch in their order, so it also tests draws without replacement."""
    settings = rules(prompt_priority=rule, flat_group_weight=flat_weight)
    drawn = first_prompts(HISTORY, settings, groups=groups)
    assert_drawn_as_declared(drawn, in_order(groups, lambda left: across(rule, left, flat_weight)))


@pytest.mark.parametrize(
    ("rule", "fraction", "tiers"),
    [
        ("uniform", 0.3, [{0, 3}, {1, 2, 4, 5}]),
        # The fifth has the variance of the sixth, 0.
        ("uniform", 0.7, [set(PROMPTS)]),
        ("recency", 0.5, [{0}, {4}, {1}, {3}, {2}, {5}]),
    ],
)
def test_prompts_whose_rewards_vary_most_are_drawn_first(rule, fraction, tiers):
    settings = rules(prompt_priority=rule, varied_fraction=fraction)
    drawn = first_prompts(HISTORY, settings, groups=3)

    def chances(left):
        return normalised(dict.fromkeys(next(found for tier in tiers if (found := tier & set(left))), 1.0))

    assert_drawn_as_declared(drawn, in_order(3, chances))


@pytest.mark.parametrize(("fraction", "groups", "rule"), [(0.3, 1, "softmax"), (0.5, 3, "softmax"), (0.5, 3, "rank")])
def test_each_group_is_drawn_by_the_recency_rule_with_a_probability_from_the_prompts_that_are_left(
    fraction, groups, rule
):
    settings = rules(recency_fraction=fraction, prompt_priority=rule)
    drawn = first_prompts(HISTORY, settings, groups=groups)
    assert_drawn_as_declared(drawn, in_order(groups, lambda left: mixed(fraction, rule, left)))


def test_prompts_over_the_staleness_limit_are_not_ranked_and_those_of_equal_score_by_first_appearance():
    order = sorted((0, 1, 3, 4), key=lambda p: -MEAN[p])
    equal = {prompt: [(10, 1.0, False)] for prompt in range(3)}
    for history, ranked, limits in ((HISTORY, order, {"max_staleness": 4}), (equal, [0, 1, 2], {})):
        drawn = first_prompts(history, rules(prompt_priority="rank", **limits))
        chances = normalised({prompt: 1 / rank for rank, prompt in enumerate(ranked, 1)})
        assert_drawn_as_declared(drawn, {(prompt,): chance for prompt, chance in chances.items()})


def within(rule: str) -> dict[int, float]:
    """Return the declared weight of each trajectory of ONE_PROMPT."""
    rewards = [reward for _, reward, _ in ONE_PROMPT]
    if rule == "recency":
        return {n: 1.0 for n, (step, _, _) in enumerate(ONE_PROMPT) if STEP - step <= 1}
    if rule == "softmax":
        return {n: math.exp(1.3 * reward) for n, reward in enumerate(rewards)}
    if rule == "rank":
        order = sorted(range(len(rewards)), key=lambda n: (-rewards[n], -n))
        return {n: (order.index(n) + 1) ** -1 for n in range(len(rewards))}
    return dict.fromkeys(range(len(rewards)), 1.0)


@pytest.mark.parametrize("replacement", ["if_needed", *slow("never", "always")])
@pytest.mark.parametrize("rule", ["uniform", "recency", "softmax", "rank"])
def test_trajectories_are_drawn_as_declared(rule, replacement):
    """Two of a prompt, in the order in which they are drawn."""
    settings = rules(trajectory_priority=rule, replacement=replacement)
    found = batches({0: ONE_PROMPT}, settings, groups=1, samples=2)
    drawn = Counter(tuple(entry.id for entry in group) for (group,) in found)
    weights, declared = within(rule), {}
    for first, second in itertools.product(weights, repeat=2):
        rest = weights if replacement == "always" else {n: w for n, w in weights.items() if n != first}
        declared[first, second] = normalised(weights)[first] * normalised(rest).get(second, 0.0)
    assert_drawn_as_declared(drawn, declared)


def test_with_too_few_trajectories_they_are_drawn_with_replacement_as_declared():
    settings = rules(trajectory_priority="softmax")
    found = batches({0: ONE_PROMPT[:2]}, settings, groups=1, samples=3)
    drawn = Counter(tuple(entry.id for entry in group) for (group,) in found)
    chance = normalised({0: math.exp(1.3 * 0.5), 1: math.exp(1.3 * 2.0)})
    declared = {ids: math.prod(chance[n] for n in ids) for ids in itertools.product((0, 1), repeat=3)}
    assert_drawn_as_declared(drawn, declared)


@pytest.mark.parametrize("scale", [1e3, 1e9])
def test_softmax_draws_in_the_order_of_very_large_rewards(scale):
    """All weights but the largest are 0 in floating point; the order is still right."""
    history = {prompt: [(10, scale * prompt, False), (10, scale * (prompt + 0.25), False)] for prompt in range(5)}
    settings = rules(inverse_temperature=1.0, prompt_priority="softmax")
    batch = next(batches(history, settings, groups=5, samples=2))
    assert [[entry.id for entry in group] for group in batch] == [[2 * n + 1, 2 * n] for n in (4, 3, 2, 1, 0)]


def test_equal_rewards_are_drawn_alike_however_large_their_weights_are():
    """The logarithm of a weight is so large here that noise added to it would be rounded away."""
    history = {prompt: [(10, 1e9, False)] * 3 for prompt in range(3)}
    settings = rules(inverse_temperature=1e8, prompt_priority="softmax", recency_fraction=0.0)
    found = batches(history, settings, groups=1, samples=1)
    drawn = Counter(group[0].id for (group,) in found)
    assert_drawn_as_declared(drawn, dict.fromkeys(range(9), 1 / 9))


def test_without_replacement_a_prompt_is_recent_if_a_whole_group_is():
    # Prompt 0 has one recent entry, never trained on; prompt 1 has two, both trained on.
    history = {0: [(10, 0.0, False), (0, 0.0, True)], 1: [(10, 0.0, True), (9, 0.0, True)]}
    settings = rules(recency_fraction=1.0, replacement="never")
    drawn = itertools.islice(batches(history, settings, groups=1, samples=2), 20)
    assert {group[0].prompt for (group,) in drawn} == {1}


ROW = (STEP, 0.0, False)
SHORTAGES = [
    ({0: [ROW, ROW], 1: [ROW]}, {"replacement": "never"}, "1 of 2 prompts have 2 different trajectories"),
    ({0: [(5, 0.0, False)], 1: [ROW]}, {"max_staleness": 0}, "1 of 2 prompts have trajectories at staleness <= 0"),
    ({0: [ROW] * 4, 1: [ROW] * 5}, {"min_fill": 10}, "9 of 10 trajectories for the first fill"),
    ({0: [ROW] * 5, 1: [ROW] * 5}, {"min_fill": 10}, None),
]


@pytest.mark.parametrize(("history", "settings", "reason"), SHORTAGES)
def test_a_batch_that_cannot_be_drawn_says_what_is_missing(history, settings, reason):
    found = Sampler(index_of(history), rules(**settings)).sample(
        step=STEP, groups=2, samples=2, rng=np.random.default_rng(0)
    )
    assert (found.reason if isinstance(found, Shortage) else None) == reason


# ---------------------------------------------------------------- recency


NODE = Path(tba.__file__).parent / "examples/gsm8k/node.toml"
# The training set of GSM8K; the trainer consumes 7 groups a step, and the searchers deliver more.
SET_SIZE = 7473
NEW_GROUPS = 12
STEPS = 300


def node(**changes: object) -> Config:
    settings = tomllib.loads(NODE.read_text(encoding="utf-8"))
    settings["buffer"].update(changes)
    return Config.model_validate(settings)


def draws(config: Config, lag: int, *, steps: int = STEPS, new_groups: int = NEW_GROUPS) -> Iterator[tuple[int, Draw]]:
    """Yield the batch of each step, where what arrives in a step was generated by weights `lag` steps old."""
    train, responses = config.train, config.search.samples_per_prompt
    index, rules = SamplingIndex(config.buffer), config.buffer
    sampler = Sampler(index, rules, publish_every=train.publish_every)
    order = np.random.default_rng(0).permutation(SET_SIZE)
    put = 0
    for step in range(steps):
        while len(index) < rules.min_fill or put < (step + 1) * new_groups:
            ids = range(put * responses, (put + 1) * responses)
            policy_steps = [max(0, step - lag)] * responses
            rewards = [float(id_ % 3 == 0) for id_ in ids]
            index.extend(
                Block(
                    int(order[put % SET_SIZE]),
                    ids,
                    policy_steps,
                    rewards,
                    ids,
                    [False] * responses,
                    [0] * responses,
                )
            )
            put += 1
        batch = sampler.sample(
            step=step,
            groups=train.prompts_per_step,
            samples=train.samples_per_prompt,
            rng=np.random.default_rng([1, step]),
        )
        assert isinstance(batch, Draw)
        index.mark_trained(entry.id for group in batch.groups for entry in group)
        yield step, batch


def mean_staleness(config: Config, lag: int, **arguments: int) -> float:
    """Return the mean over the last 50 of the steps."""
    ages = [
        step - entry.step
        for step, batch in draws(config, lag, **arguments)
        for group in batch.groups
        for entry in group
        if step >= STEPS - 50
    ]
    return float(np.mean(ages))


@pytest.mark.slow
@pytest.mark.parametrize("lag", [4, *slow(0, 16)])
def test_staleness_grows_with_the_lag_by_no_cliff(lag):
    """The settings of node.toml: after 300 steps, the twentieth that is drawn from all history adds 7 to the mean."""
    assert node().buffer.recency_window == "auto"
    assert mean_staleness(node(), lag) <= lag + 8
    assert mean_staleness(node(recency_fraction=1.0), lag) <= lag + node().train.publish_every


@pytest.mark.parametrize(
    ("window", "lag", "new_groups"),
    [(3, 4, NEW_GROUPS), pytest.param(3, 16, NEW_GROUPS, marks=pytest.mark.slow), ("auto", 8, 3), (3, 8, 3)],
)
def test_a_window_too_short_for_the_lag_or_less_new_data_than_a_batch_takes_make_no_cliff_either(
    window, lag, new_groups
):
    """3 new groups a step for batches of 7: the newest is repeated."""
    assert mean_staleness(node(recency_window=window), lag, new_groups=new_groups) <= lag + 8


@pytest.mark.slow
def test_the_window_follows_the_lag_and_what_it_missed_is_counted():
    for lag in (2, 5):
        last = list(draws(node(), lag))[-1][1]
        assert (last.recency_window, last.recency_missed) == (lag + 2, 0)
    (_, short), (_, long) = (list(draws(node(recency_window=window, recency_fraction=1.0), 5))[-1] for window in (3, 5))
    assert (short.recency_window, short.recency_groups, short.recency_missed) == (3, 7, 7)
    assert (long.recency_window, long.recency_groups, long.recency_missed) == (5, 7, 0)


def one_entry_each(steps: list[int]) -> SamplingIndex:
    """Prompt n has one entry, of the nth step; those with odd numbers are part of a recorded batch."""
    index = SamplingIndex(BufferSection(prompt_cap=9, dedup=False))
    for n, step in enumerate(steps):
        index.extend(Block(n, [n], [step], [0.0], [n], [n % 2 == 1], [0]))
    return index


def sampler_of(index: SamplingIndex, window: int | str, **changes: object) -> Sampler:
    settings = {"recency_fraction": 1.0, "recency_window": window, **changes}
    return Sampler(index, BufferSection.model_validate(settings), publish_every=2)


@pytest.mark.parametrize(("window", "reaches"), [(0, 7), (3, 7), (9, 9), ("auto", 9)])
def test_tiers_of_age_come_one_after_the_other_and_in_each_what_was_never_trained_on(window, reaches):
    """The newest data is 7 steps old: a shorter window reaches to it, and "auto" 2 steps further."""
    steps = [n // 3 for n in range(3 * 94)]
    ends = [reaches + behind for behind in (0, 1, 2, 4, 8, 16, 32, 64, 128)]
    tier_of = {n: next(tier for tier, end in enumerate(ends) if 100 - step <= end) for n, step in enumerate(steps)}
    sampler = sampler_of(one_entry_each(steps), window)
    first_prompts = set[int]()
    for seed in range(20):
        found = sampler.sample(step=100, groups=len(steps), samples=1, rng=np.random.default_rng(seed))
        assert isinstance(found, Draw)
        drawn = [group[0].prompt for group in found.groups]
        assert [(tier_of[n], n % 2) for n in drawn] == sorted((tier_of[n], n % 2) for n in tier_of)
        first_prompts.add(drawn[0])
    assert first_prompts <= {n for n in tier_of if tier_of[n] == 0 and n % 2 == 0}
    assert len(first_prompts) > 1 or reaches == 7


@pytest.mark.parametrize(("window", "replacement", "expected"), [
    (1, "if_needed", {3}), (1, "never", {0, 3}), (5, "if_needed", {0, 3}), ("auto", "never", {0, 1, 3}),
])  # fmt: skip
def test_within_a_prompt_the_newest_tier_with_enough_entries_is_drawn(window, replacement, expected):
    index = SamplingIndex(BufferSection(prompt_cap=9, dedup=False))
    index.extend(Block(0, [0, 1, 2, 3], [5, 3, 0, 6], [0.0] * 4, [0, 1, 2, 3], [False] * 4, [0] * 4))
    sampler = sampler_of(index, window, replacement=replacement)
    found = set[int]()
    for seed in range(40):
        draw = sampler.sample(step=10, groups=1, samples=2, rng=np.random.default_rng(seed))
        assert isinstance(draw, Draw)
        found |= {entry.id for entry in draw.groups[0]}
    assert found == expected


def test_a_batch_without_recent_data_is_counted_and_named_until_one_finds_some(harness, trajectory, monkeypatch):
    buffer = harness(buffer={"recency_window": 3, "recency_fraction": 1.0}, train={"prompts_per_step": 1}, fill=(1, 0))
    buffer.put([trajectory(tokens=[n]) for n in range(2)], 0)
    warnings: list[int] = []
    monkeypatch.setattr(pace.log, "warning", lambda *_, **fields: warnings.append(fields["step"]))
    for step in (3, 4, 5):
        batch = buffer.sample(step, 1, 2).message
        assert (batch.recency_window, batch.recency_groups, batch.recency_missed) == (3, 1, int(step > 3))
    status = buffer.service.status()
    assert status.batches_without_recent_data == 2
    assert status.no_recent_data.startswith(
        "the last batch found no data within buffer.recency_window = 3 steps, its newest is 5 steps old"
    )
    assert warnings == [4]
    assert buffer.sample(4, 1, 2).message.recency_missed == 1
    buffer.announce(1, step=6)
    buffer.put([trajectory(tokens=[9], version=1, version_runs=np.array([[1, 1]], np.int32))], 2)
    assert buffer.sample(6, 1, 2).message.recency_missed == 0
    assert buffer.service.status().no_recent_data == ""
