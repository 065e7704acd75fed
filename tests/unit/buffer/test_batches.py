"""No accepted configuration waits for a batch that can never form, or it says why it waits."""

import random
from typing import Any

import pytest
from pydantic import ValidationError

from tba.common.config import Config
from tba.common.config.root import check_batches
from tba.tests.helpers.random_configurations import draw_sections, run_until_it_waits
from tba.tests.runner import FULL_SIZE

PROMPTS = 40
SIZES: dict[str, Any] = {
    "search": {"samples_per_prompt": 4},
    "train": {"prompts_per_step": 4, "samples_per_prompt": 4},
    "objective": {"name": "tb"},
}


def refusal(prompts: int, sections: dict[str, dict[str, Any]]) -> str:
    try:
        merged = {name: SIZES.get(name, {}) | sections.get(name, {}) for name in {**SIZES, **sections}}
        check_batches(Config.model_validate(merged), prompts)
    except (ValidationError, ValueError) as error:
        return str(error)
    return ""


NEVER = {"replacement": "never"}
GREEDY = {"temperature": 0}
IMPOSSIBLE: list[tuple[int, dict[str, Any], str]] = [
    (40, {"buffer": {"max_payload_bytes": 100}}, "no room for the 13 trajectories"),
    (40, {"buffer": {"max_trajectories": 12}}, "set at least 13"),
    (40, {"buffer": {"max_trajectories": 54}, "search": {"samples_per_prompt": 9}, "train": {"prompts_per_step": 7}},
     "set at least 55"),
    (40, {"buffer": NEVER | {"max_trajectories": 16}, "search": {"samples_per_prompt": 2}}, "set at least 88"),
    (40, {"buffer": {"prompt_cap": 1, "min_fill": 50}}, "at most 40 sampleable"),
    (5, {"buffer": {"prompt_cap": 2, "min_fill": 16}}, "at most 10 sampleable"),
    (40, {"buffer": {"min_fill": 50}, "search": GREEDY}, "at most 40 sampleable"),
    (40, {"buffer": NEVER, "search": GREEDY}, "set search.temperature above 0, or buffer.dedup = false"),
    (3, {}, "the task has 3 prompts and a batch needs 4 different ones: lower train.prompts_per_step"),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "sections", "words"), IMPOSSIBLE)
def test_settings_under_which_no_batch_can_form_are_refused_with_a_value_that_works(prompts, sections, words):
    assert words in refusal(prompts, sections)


@pytest.mark.parametrize("seed", range(2000 if FULL_SIZE else 60))
def test_a_random_valid_configuration_trains_or_is_refused_or_says_why_it_waits(seed, harness):
    rng = random.Random(seed)
    sections = draw_sections(rng)
    if refused := refusal(PROMPTS, sections):
        assert any(f"{name}." in refused for name in sections)
        return
    config = Config.model_validate(sections)
    waits = run_until_it_waits(harness(**sections), config, PROMPTS, rng)
    assert not waits or waits.startswith("no_growth: "), sections
    assert not waits or "left sampling by buffer." in waits, sections
