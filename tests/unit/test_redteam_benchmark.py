"""The comparison of the red-team benchmark: values at equal success, differences paired by seed."""

import importlib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture
def redteam(monkeypatch):
    """Import the benchmark, which is not a part of the package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("benchmarks.redteam")


def curve(redteam, *points):
    return [redteam.Found(2.0 * n, success, distinct, 1.0 - success) for n, (success, distinct) in enumerate(points)]


def test_values_at_a_success_rate_are_interpolated_where_it_is_first_reached(redteam):
    found = curve(redteam, (0.1, 200), (0.4, 400), (0.6, 300), (0.3, 100), (0.9, 0))
    at = redteam.at_success(found, 0.45)
    assert (at.step, at.success, at.distinct, at.distance) == pytest.approx((2.5, 0.45, 375, 0.55))
    assert redteam.at_success(found, 0.6) == found[2]
    assert redteam.at_success(found, 0.95) is None
    # It was there from the first measurement on.
    assert redteam.at_success(curve(redteam, (0.6, 300), (0.7, 200)), 0.5) is None


def test_objectives_are_compared_on_the_seeds_with_which_all_reach_the_rate(redteam):
    # With the third seed the second objective never reaches a half.
    runs = {
        "tb": [curve(redteam, (0.0, 0), (0.5, more)) for more in (150, 130, 1000)],
        "rloo": [curve(redteam, (0.0, 0), (success, 100)) for success in (0.5, 0.5, 0.4)],
    }
    first, second = redteam.rows_at(1e-3, 0.5, runs)
    assert first == ["0.001", "50%", "2", "tb", "2", "50%", "140 ± 14", "0.50 ± 0.00", "", ""]
    assert second[3:] == ["rloo", "2", "50%", "100 ± 0", "0.50 ± 0.00", "+40 ± 10 (2 of 2)", "+0.00 ± 0.00 (0 of 2)"]


def test_a_rate_that_only_one_seed_reaches_has_no_difference(redteam):
    runs = {name: [curve(redteam, (0.0, 0), (top, 9)) for top in (0.5, 0.4)] for name in ("tb", "rloo")}
    assert [row[3] for row in redteam.rows_at(1e-3, 0.5, runs)] == ["reached by too few"]
