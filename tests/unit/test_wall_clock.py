"""The curve of `benchmarks.wall_clock`: how many times as fast an asynchronous step is, against decoded batches."""

import importlib
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def pace(monkeypatch):
    """Import the module, which is not a part of the package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("benchmarks.wall_clock.pace")


@pytest.mark.parametrize("step", [3.0, 60.0])
def test_the_ratio_of_steps_is_that_of_batches_decoded_token_by_token(pace, step):
    node = pace.Pace(0.02, 0.003, 40, 0.8, 150, step, publish=1.5, pause=0.3)
    rng, responses, searchers = np.random.default_rng(5), 12, 3

    def decode(left):
        """Return the seconds until the longest response of an engine is done; each step advances all that are left."""
        seconds = 0.0
        while left.any():
            seconds += 0.02 + 0.003 * np.count_nonzero(left)
            left = np.maximum(left - 1, 0)
        return seconds

    lengths = node.tokens(rng, (300, responses)).round()
    batches = [max(decode(part) for part in np.split(batch, searchers)) for batch in lengths]
    # Each response that ends is followed by another, so four are always in flight.
    generation = lengths.mean() * (0.02 + 0.003 * responses / searchers) + 0.3
    expected = (step + np.mean(batches) + 1.5) / max(step, generation)
    assert pace.step_ratio(node, searchers, responses) == pytest.approx(expected, rel=0.03)


def test_overlap_without_a_tail_saves_no_more_than_the_shorter_part(pace):
    even = pace.Pace(0.01, 0.0, 100, 0.0, 1000, step=1.0, publish=0.0, pause=0.0)
    assert pace.step_ratio(even, 1, 8) == pytest.approx(2)
    assert pace.step_ratio(pace.Pace(0.01, 0.0, 100, 0.0, 1000, 4.0, 0.0, 0.0), 1, 8) == pytest.approx(5 / 4)
