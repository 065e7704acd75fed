"""The rules of sampling, on an index in memory."""

from typing import Any

import numpy as np

from tba.buffer.sampling.index import Entry, SamplingIndex
from tba.buffer.sampling.rules import Limits, SamplingRules, Shortage
from tba.buffer.sampling.sampler import Draw, Sampler
from tba.tests.helpers.index import add


def rules(**changes: Any) -> SamplingRules:
    defaults: dict[str, Any] = {
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
    found = Sampler(index, rules).sample(rng=np.random.default_rng(seed), **settings)
    return found.groups if isinstance(found, Draw) else found


def test_all_trajectories_of_a_group_are_of_one_prompt():
    index = index_of([(prompt, 0, 0.0) for prompt in range(10) for _ in range(4)])
    for seed in range(20):
        for group in draw(index, rules(recency_fraction=0.5), seed, groups=5, samples=4):
            assert len({entry.prompt for entry in group}) == 1


def test_without_replacement_a_prompt_is_recent_if_a_whole_group_is():
    # Prompt 0 has one recent entry, never trained on; prompt 1 has two, both trained on.
    index = index_of([(0, 10, 0.0), (0, 0, 0.0), (1, 10, 0.0), (1, 9, 0.0)])
    index.mark_trained([1, 2, 3])
    for seed in range(20):
        (group,) = draw(index, rules(recency_window=1, replacement="never"), seed, step=10)
        assert group[0].prompt == 1


def test_without_replacement_a_prompt_with_too_few_trajectories_is_not_sampled():
    index = index_of([(0, 0, 0.0), (0, 0, 0.0), (1, 0, 0.0)])
    shortage = draw(index, rules(replacement="never"), groups=2)
    assert isinstance(shortage, Shortage)
    assert shortage.reason == "1 of 2 prompts have 2 different trajectories"


def test_the_shortage_names_the_number_of_prompts_within_the_staleness_limit():
    shortage = draw(index_of([(0, 0, 0.0), (1, 5, 0.0)]), rules(max_staleness=0), step=5, groups=2)
    assert isinstance(shortage, Shortage)
    assert shortage.reason == "1 of 2 prompts have trajectories at staleness <= 0"


def test_nothing_is_sampled_before_the_minimum_fill():
    assert isinstance(draw(index_of([(0, 0, 0.0)] * 9), rules(min_fill=10)), Shortage)
    assert not isinstance(draw(index_of([(0, 0, 0.0)] * 10), rules(min_fill=10)), Shortage)
