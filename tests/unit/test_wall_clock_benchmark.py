"""What the benchmark of asynchronous against synchronous training computes from a pace alone."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture
def pace(monkeypatch):
    """Import the module, which is not a part of the package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("benchmarks.wall_clock.pace")


def test_the_ratio_for_responses_of_equal_length_is_that_of_hand(pace):
    equal = pace.Pace(
        decode=0.01, decode_each=0.001, mean_tokens=1e6, sigma=0.1, max_tokens=1000, step=20, publish=2, pause=1
    )
    # Two searchers decode 10 responses of 1000 tokens each, at 0.02 s a token: 20 s, and 1 s of pause.
    assert pace.step_ratio(equal, searchers=2, responses=20) == pytest.approx((20 + 20 + 2) / 21)
    # A slower trainer hides the generation.
    assert pace.step_ratio(replace(equal, step=60), 2, 20) == pytest.approx((60 + 20 + 2) / 60)


def test_longer_tails_raise_the_ratio_and_bigger_batches_lower_it(pace):
    long = pace.PACES["long"]
    assert pace.step_ratio(replace(long, sigma=0.5), 7, 256) < pace.step_ratio(long, 7, 256)
    assert pace.step_ratio(replace(long, step=4 * long.step), 7, 1024) < pace.step_ratio(long, 7, 256)


def test_engines_of_a_run_have_other_lengths_and_the_figures_of_the_long_pace_follow(pace):
    long = pace.PACES["long"]
    one, other = (long.tokens(np.random.default_rng([0, searcher]), (100_000,)) for searcher in (0, 1))
    assert (one[one < long.max_tokens][:100] != other[other < long.max_tokens][:100]).all()
    # As the comment at the pace states.
    assert one.mean() == pytest.approx(5122, rel=0.02)
    assert (one == long.max_tokens).mean() == pytest.approx(0.0234, rel=0.1)
    position = (one**2).mean() / one.mean() / 2
    assert position == pytest.approx(5306, rel=0.02)
    flop = 3 * (2 * 1.54e9 + 4 * 28 * 1536 * position)
    assert flop * 256 * one.mean() / (0.4 * 989e12) == pytest.approx(long.step, rel=0.03)
