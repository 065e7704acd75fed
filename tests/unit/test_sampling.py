"""The sampling policy, on an index in memory."""

import numpy as np
import pytest

from tba.buffer.index import Entry, SamplingIndex
from tba.buffer.policy import SamplingRules, Shortage, sample_groups
from tba.buffer.remover import Limits

from .index_lab import add


def rules(**changes: object) -> SamplingRules:
    defaults = {
        "recency_fraction": 1.0,
        "recency_window": 3,
        "inverse_temperature": 0.0,
        "max_staleness": None,
        "min_fill": 0,
    }
    return SamplingRules(**{**defaults, **changes})


def index_of(rows: list[tuple[int, int, float]], *, cap: int = 100, dedup: bool = False) -> SamplingIndex:
    """Rows are (prompt, step, reward); ids count from 0."""
    index = SamplingIndex(Limits(prompt_cap=cap, dedup=dedup))
    for id_, (prompt, step, reward) in enumerate(rows):
        add(index, Entry(id_, prompt, step, reward, dedup_hash=id_))
    return index


def draw(index: SamplingIndex, rules: SamplingRules, seed: int = 0, **arguments: int):
    settings = {"step": 0, "groups": 1, "samples": 2, **arguments}
    return sample_groups(index, rules, rng=np.random.default_rng(seed), **settings)


def test_a_group_holds_trajectories_of_one_prompt_only():
    index = index_of([(prompt, 0, 0.0) for prompt in range(10) for _ in range(4)])
    for seed in range(20):
        for group in draw(index, rules(recency_fraction=0.5), seed, groups=5, samples=4):
            assert len({entry.prompt for entry in group}) == 1


def test_a_batch_never_holds_a_prompt_twice():
    index = index_of([(prompt, 0, 0.0) for prompt in range(6) for _ in range(2)])
    for seed in range(20):
        groups = draw(index, rules(recency_fraction=0.5), seed, groups=6)
        assert len({group[0].prompt for group in groups}) == 6


def test_within_a_group_nothing_repeats_while_there_is_enough():
    index = index_of([(0, 0, 0.0)] * 5)
    for seed in range(20):
        (group,) = draw(index, rules(), seed, samples=5)
        assert sorted(entry.id for entry in group) == [0, 1, 2, 3, 4]


def test_a_small_group_is_filled_with_replacement():
    (group,) = draw(index_of([(0, 0, 0.0)] * 2), rules(), samples=8)
    assert len(group) == 8


def test_the_recency_rule_takes_only_recent_trajectories_where_there_are_any():
    index = index_of([(0, 0, 0.0), (0, 9, 0.0), (0, 10, 0.0)])
    for seed in range(20):
        (group,) = draw(index, rules(recency_window=1), seed, step=10)
        assert {entry.id for entry in group} == {1, 2}


def test_the_recency_rule_prefers_prompts_that_were_never_trained_on():
    index = index_of([(prompt, 10, 0.0) for prompt in range(10)])
    index.mark_taken([0, 1, 2, 3, 4, 5, 6])
    for seed in range(20):
        groups = draw(index, rules(), seed, step=10, groups=3)
        assert {group[0].prompt for group in groups} == {7, 8, 9}


def test_without_replacement_recent_means_a_whole_recent_group():
    # Prompt 0 has one recent entry, never trained on; prompt 1 has two that were.
    index = index_of([(0, 10, 0.0), (0, 0, 0.0), (1, 10, 0.0), (1, 9, 0.0)])
    index.mark_taken([1, 2, 3])
    for seed in range(20):
        (group,) = draw(index, rules(recency_window=1, replacement="never"), seed, step=10)
        assert group[0].prompt == 1


def test_a_prompt_with_fewer_than_a_group_is_never_sampled_without_replacement():
    index = index_of([(0, 0, 0.0), (0, 0, 0.0), (1, 0, 0.0)])
    shortage = draw(index, rules(replacement="never"), groups=2)
    assert isinstance(shortage, Shortage)
    assert shortage.reason == "1 of 2 prompts have 2 different trajectories"


@pytest.mark.parametrize("replacement", ["if_needed", "never"])
@pytest.mark.parametrize("max_staleness", [None, 2, 5])
@pytest.mark.parametrize("window", [0, 3])
def test_prompts_grow_old_as_in_an_index_that_is_looked_at_for_the_first_time(window, max_staleness, replacement):
    """All prompts in the order of recency, step by step, and one step back."""
    rows = [(n % 12, n // 6 + n % 3, float(n % 2)) for n in range(60)]
    settings = rules(recency_window=window, max_staleness=max_staleness, replacement=replacement)
    warm = index_of(rows)
    warm.mark_taken(range(0, 60, 7))
    compared = 0
    for step in [*range(16), 14, 9]:
        cold = index_of(rows)
        cold.mark_taken(range(0, 60, 7))
        for groups in range(1, 13):
            first, second = (draw(index, settings, step, step=step, groups=groups) for index in (warm, cold))
            assert first == second
            compared += isinstance(first, list)
    assert compared > 50


def test_staleness_over_the_limit_is_never_sampled():
    index = index_of([(prompt, step, 0.0) for prompt in range(4) for step in range(10)])
    for seed in range(20):
        for group in draw(index, rules(recency_fraction=0.0, max_staleness=2), seed, step=9, groups=4):
            assert all(entry.step >= 7 for entry in group)


def test_too_few_fresh_prompts_is_a_shortage_that_says_so():
    shortage = draw(index_of([(0, 0, 0.0), (1, 5, 0.0)]), rules(max_staleness=0), step=5, groups=2)
    assert isinstance(shortage, Shortage)
    assert shortage.reason == "1 of 2 prompts have trajectories at staleness <= 0"


def test_nothing_is_sampled_before_the_minimum_fill():
    assert isinstance(draw(index_of([(0, 0, 0.0)] * 9), rules(min_fill=10)), Shortage)
    assert not isinstance(draw(index_of([(0, 0, 0.0)] * 10), rules(min_fill=10)), Shortage)


def test_the_reward_rule_draws_by_softmax_of_the_reward():
    index = index_of([(0, 0, 0.0), (0, 0, 1.0)])
    settings = rules(recency_fraction=0.0, inverse_temperature=2.0)
    draws = [draw(index, settings, seed, samples=1)[0][0].id for seed in range(2000)]
    expected = np.exp(2) / (1 + np.exp(2))
    assert np.mean(draws) == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / 2000))


def test_inverse_temperature_0_is_uniform():
    index = index_of([(0, 0, 0.0), (0, 0, 100.0)])
    draws = [draw(index, rules(recency_fraction=0.0), seed, samples=1)[0][0].id for seed in range(2000)]
    assert np.mean(draws) == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(2000))


def test_the_mixture_takes_the_recency_rule_with_probability_m():
    # Prompt 0 is recent, prompt 1 is not: a single group is of prompt 0 with probability m + (1 - m) / 2.
    index = index_of([(0, 10, 0.0), (1, 0, 0.0)])
    settings = rules(recency_fraction=0.6, recency_window=0)
    draws = [draw(index, settings, seed, step=10)[0][0].prompt == 0 for seed in range(2000)]
    assert np.mean(draws) == pytest.approx(0.8, abs=4 * np.sqrt(0.8 * 0.2 / 2000))


def test_the_same_seed_and_history_give_the_same_batch():
    index = index_of([(prompt, 0, 0.0) for prompt in range(20) for _ in range(4)])
    first, second = (draw(index, rules(recency_fraction=0.5), 7, groups=8, samples=3) for _ in range(2))
    assert first == second


def test_the_index_keeps_the_newest_of_a_prompt_up_to_its_cap():
    index = index_of([(0, step, 0.0) for step in range(5)], cap=3)
    assert [entry.step for entry in index.entries(0)] == [2, 3, 4]
    assert len(index) == 3


def test_dedup_keeps_the_newest_of_identical_responses():
    index = SamplingIndex(Limits(prompt_cap=10, dedup=True))
    for id_, dedup_hash in enumerate([7, 8, 7]):
        add(index, Entry(id_, 0, id_, 0.0, dedup_hash))
    assert [entry.id for entry in index.entries(0)] == [1, 2]


def test_fresh_prompts_are_those_with_recent_data_that_was_not_trained_on():
    index = index_of([(0, 5, 0.0), (1, 5, 0.0), (2, 1, 0.0)])
    index.mark_taken([1])
    assert index.fresh_prompts(min_step=4) == {0}


def test_m_goes_linearly_to_its_final_value_with_the_training_step():
    settings = rules(recency_fraction=1.0, recency_fraction_final=0.5, recency_anneal_steps=10)
    assert [settings.recency_fraction_at(step) for step in (0, 5, 10, 99)] == [1.0, 0.75, 0.5, 0.5]
    assert rules(recency_fraction=0.3).recency_fraction_at(99) == 0.3


def test_the_batch_of_a_step_is_drawn_with_the_m_of_its_training_step():
    index = index_of([(prompt, step, 0.0) for prompt in range(8) for step in range(6)])
    settings = rules(recency_fraction=1.0, recency_fraction_final=0.0, recency_anneal_steps=4)
    for train_step, fraction in ((0, 1.0), (2, 0.5), (4, 0.0)):
        for seed in range(20):
            scheduled = draw(index, settings, seed, groups=6, train_step=train_step)
            assert scheduled == draw(index, rules(recency_fraction=fraction), seed, groups=6)
