"""The sampling settings of each response."""

import random
from typing import Any

import numpy as np
import pytest

from tba.common.config import SearchSection
from tba.common.config.layers import resolve
from tba.common.errors import ConfigError
from tba.common.wire.messages import Visit
from tba.searcher.pipeline import Exploration, draw

VISITS = [Visit(lease=lease, epoch=lease % 3, prompt_key=f"p{lease // 3}") for lease in range(60)]


def explore(run_seed: int = 0, searcher: str = "node-gpu0", **keys):
    """Return the settings of 8 samples of 60 visits as [visit][sample]."""
    config = SearchSection.model_validate({"engine": "transformers"} | keys)
    exploration = Exploration(config, run_seed=run_seed, searcher=searcher)
    return [[exploration.settings(visit, sample) for sample in range(8)] for visit in VISITS]


def temperatures(explored):
    return [{settings.temperature for settings in group} for group in explored]


def test_every_response_of_a_run_has_its_own_seed():
    seeds = [s.seed for run_seed in (0, 1) for group in explore(run_seed) for s in group]
    assert len(set(seeds)) == len(seeds) == 960


def test_seeds_and_settings_depend_on_the_run_and_the_visit_only():
    keys: dict[str, Any] = {"temperature": {"min": 0.5, "max": 1.5}, "top_p": [0.9, 1.0]}
    assert explore(3, "a", **keys) == explore(3, "b", **keys)
    assert explore(3, "a", **keys) != explore(4, "a", **keys)


def test_vllm_gets_no_seeds():
    assert {s.seed for group in explore(engine="vllm") for s in group} == {None}


def test_a_list_is_drawn_from_with_equal_probability():
    drawn = [s.temperature for group in explore(temperature=[0.7, 1.0, 1.3]) for s in group]
    counts = np.array([drawn.count(value) for value in (0.7, 1.0, 1.3)])
    assert counts.sum() == 480
    assert (np.abs(counts - 160) < 5 * np.sqrt(160)).all()


def test_temperature_and_top_p_are_drawn_independently():
    groups = explore(temperature=[0.7, 1.3], top_p=[0.9, 1.0])
    assert len({(s.temperature, s.top_p) for group in groups for s in group}) == 4


def test_a_group_may_share_its_settings():
    drawn = temperatures(explore(temperature=[0.7, 1.0, 1.3], explore="group"))
    assert {len(group) for group in drawn} == {1}
    assert set.union(*drawn) == {0.7, 1.0, 1.3}


def test_each_searcher_may_have_its_own_settings():
    keys: dict[str, Any] = {"temperature": {"min": 0.5, "max": 1.5}, "explore": "searcher"}
    own = [set.union(*temperatures(explore(searcher=f"gpu{n}", **keys))) for n in range(20)]
    assert {len(values) for values in own} == {1}
    assert len(set.union(*own)) > 10


def test_a_range_is_drawn_from_in_steps_that_include_its_ends():
    generator = random.Random(0)
    drawn = {draw({"min": 0.904, "max": 1.0}, generator) for _ in range(1000)}
    assert drawn == {0.904, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0}


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("temperature=-1", "0 (greedy) or at least 0.01"),
        ("temperature=[1.0, 0.001]", "0 (greedy) or at least 0.01"),
        ("temperature=[]", "the list is empty"),
        ("temperature=hot", "write a number, a list of numbers, or a range"),
        ("temperature=true", "write a number"),
        ("temperature={min = 1.0}", "a range has two ends"),
        ("temperature={min = 1.3, max = 0.7}", "min is above its max"),
        ("top_p=0", "top_p must be more than 0 and at most 1"),
        ("top_p=[0.9, 1.1]", "top_p must be more than 0 and at most 1"),
        ("explore=prompt", "input should be 'sample', 'group' or 'searcher'"),
    ],
)
def test_an_invalid_setting_is_refused_in_one_sentence(assignment, sentence):
    with pytest.raises(ConfigError, match=r"^search\.\w+ = .* \(--set\): ") as caught:
        resolve(None, environment={}, assignments=[f"search.{assignment}"])
    assert sentence in str(caught.value)


def test_each_form_can_be_written_as_one_assignment():
    forms = {"0.7": 0.7, "[0.7, 1]": (0.7, 1.0), "{min = 0.7, max = 1.3}": {"min": 0.7, "max": 1.3}}
    for text, value in forms.items():
        resolved = resolve(None, environment={}, assignments=[f"search.temperature={text}"])
        assert resolved.config.search.temperature == value
