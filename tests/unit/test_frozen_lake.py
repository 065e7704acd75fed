"""The benchmark of FrozenLake: its ice is that of Gymnasium, and its episodes are those of the table."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(autouse=True)
def lake(monkeypatch):
    """Import the benchmark, which is not a part of the package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("benchmarks.frozen_lake")


@pytest.mark.parametrize("slippery", [False, True])
def test_the_ice_is_that_of_gymnasium(lake, slippery):
    gymnasium = pytest.importorskip("gymnasium")
    table = gymnasium.make("FrozenLake-v1", is_slippery=slippery).unwrapped.P
    expected = np.zeros((16, 4, 16))
    for field, actions in table.items():
        for action, ways in actions.items():
            for chance, after, reward, ended in ways:
                expected[field, action, after] += chance
                assert ended == bool(lake.ENDS[after])
                assert reward == (after == lake.GOAL and field != lake.GOAL)
    assert np.allclose(lake.transitions(slippery=slippery), expected)


def test_played_episodes_succeed_as_often_as_the_table_says(lake):
    chance_FAF = lake.transitions(slippery=True)
    probability_FA = np.full((16, 4), 0.1) + 0.6 * np.eye(4)[[1, 2, 1, 0, 1, 0, 1, 0, 2, 1, 1, 0, 0, 2, 2, 0]]
    rng = np.random.default_rng(0)
    played = np.mean([lake.play(chance_FAF.numpy(), probability_FA, rng).reward.mean() for _ in range(200)])
    said, _ = lake.success_and_soft(chance_FAF, torch.from_numpy(probability_FA).log())
    assert played == pytest.approx(float(said), abs=0.02)


def test_episodes_as_rows_have_a_turn_for_each_step(lake):
    chance_FAF = lake.transitions(slippery=False).numpy()
    episodes = lake.play(chance_FAF, np.full((16, 4), 0.25), np.random.default_rng(0))
    logprob_FA = torch.full((16, 4), -np.log(4), dtype=torch.float64)
    responses = lake.responses_of(episodes, logprob_FA, 0, torch.zeros(16), by_turn=True)
    assert responses.turns.lengths == [1] * int(episodes.turns.sum())
    assert responses.turns.reward_S.sum() == episodes.reward.sum()
    assert torch.allclose(responses.turns.reference_S, logprob_FA[0, 0])
