"""What all benchmarks share: ways in turns, ratios, and where a level is reached."""

import importlib
import math
from pathlib import Path

import pytest


@pytest.fixture
def harness(monkeypatch):
    """Import the module, which is not a part of the package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("benchmarks.harness")


def test_ways_take_turns_in_the_opposite_order_every_second_round(harness):
    called = []
    ways = {name: lambda name=name: called.append(name) or len(called) for name in "abc"}
    found = harness.in_turns(ways, rounds=2)
    assert called == ["a", "b", "c", "c", "b", "a"]
    assert found == {"a": [1, 6], "b": [2, 5], "c": [3, 4]}
    # The second way is half as fast in both rounds, while the machine's speed doubles.
    assert harness.median_ratio([10.0, 20.0], [20.0, 40.0]) == 0.5


def test_a_level_is_reached_between_the_first_two_values_around_it(harness):
    assert harness.first_reached(0.75, [0.5, 0.7, 0.8, 0.6, 0.9], [0, 10, 20, 30, 40]) == pytest.approx(15)
    assert harness.first_reached(0.4, [0.5, 0.7], [3, 10]) == 3
    assert math.isnan(harness.first_reached(0.75, [0.5, 0.7], [0, 10]))
