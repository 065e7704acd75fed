"""The comparison of the red-team benchmark: values at equal success, differences paired by seed."""

import functools
import importlib
import random
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture
def redteam(monkeypatch):
    """Import the benchmark, which is not a part of the package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("benchmarks.redteam")


def curve(redteam, *points):
    halves = np.array([0.5, 0.25])
    return [
        redteam.Found(2.0 * n, success, distinct, 1.0 - success, distinct * halves, distinct * halves / 2)
        for n, (success, distinct) in enumerate(points)
    ]


def test_values_at_a_success_rate_are_interpolated_where_it_is_first_reached(redteam):
    found = curve(redteam, (0.1, 200), (0.4, 400), (0.6, 300), (0.3, 100), (0.9, 0))
    at = redteam.at_success(found, 0.45)
    assert (at.step, at.success, at.distinct, at.distance) == pytest.approx((2.5, 0.45, 375, 0.55))
    assert at.by_embedding.tolist() == pytest.approx([187.5, 93.75])
    assert redteam.at_success(found, 0.6).step == found[2].step
    assert redteam.at_success(found, 0.95) is None
    # It was there from the first measurement on.
    assert redteam.at_success(curve(redteam, (0.6, 300), (0.7, 200)), 0.5) is None


def test_objectives_are_compared_on_the_seeds_with_which_all_reach_the_rate(redteam, monkeypatch):
    # With the third seed the second objective never reaches a half.
    runs = {
        "tb": [curve(redteam, (0.0, 0), (0.5, more)) for more in (150, 130, 1000)],
        "rloo": [curve(redteam, (0.0, 0), (success, 100)) for success in (0.5, 0.5, 0.4)],
    }
    at_half = redteam.runs_at(0.5, runs)
    first, second = redteam.rows_of(["50%"], at_half)
    assert first == ["50%", "tb", "2", "50%", "140 ± 14", "0.50 ± 0.00", "", ""]
    assert second[1:] == ["rloo", "2", "50%", "100 ± 0", "0.50 ± 0.00", "+40 ± 10 (2 of 2)", "+0.00 ± 0.00 (0 of 2)"]

    monkeypatch.setattr(redteam, "THRESHOLDS", (0.1, 0.2))
    rows = redteam.rows_without_duplicates(["50%"], at_half)
    assert rows[1] == ["50%", "embedding", "0.2*", "35 ± 4", "25 ± 0", "+10 ± 2 (2 of 2)"]
    assert rows[2] == ["50%", "tokens", "0.1", "35 ± 4", "25 ± 0", "+10 ± 2 (2 of 2)"]


def test_a_rate_that_only_one_seed_reaches_has_no_difference(redteam):
    runs = {name: [curve(redteam, (0.0, 0), (top, 9)) for top in (0.5, 0.4)] for name in ("tb", "rloo")}
    assert {name: len(found) for name, found in redteam.runs_at(0.5, runs).items()} == {"tb": 1, "rloo": 1}


def test_edit_distances_are_those_of_the_recursion(redteam):
    rng = random.Random(0)
    attacks = [[], *([rng.randint(0, 3) for _ in range(rng.randint(1, 7))] for _ in range(30))]

    @functools.cache
    def edits(one, other):
        if not one or not other:
            return len(one) + len(other)
        exchange = edits(one[1:], other[1:]) + (one[0] != other[0])
        return min(exchange, edits(one[1:], other) + 1, edits(one, other[1:]) + 1)

    shares = [[edits(tuple(a), tuple(b)) / max(len(a), len(b), 1) for b in attacks] for a in attacks]
    assert redteam.edit_distances(attacks) == pytest.approx(np.array(shares))


def test_rows_are_kept_in_order_if_they_are_far_from_all_that_are_kept(redteam):
    distances = np.abs(np.subtract.outer(places := [0, 3, 1, 2, 5], places))
    # At 2: 0, 3 and 5. At 4: 0 and 5.
    assert [redteam.kept(distances, least) for least in (1, 2, 4)] == [5, 3, 2]
