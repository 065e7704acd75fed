"""The benchmark of FrozenLake: its optimum, the episodes that Gymnasium plays, and the trained table."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.needs("gymnasium")]


@pytest.fixture(autouse=True)
def lake(monkeypatch):
    """Import the benchmark, which is not a part of the package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("benchmarks.frozen_lake")


@pytest.mark.parametrize("slippery", [False, True])
def test_nothing_has_a_larger_soft_reward_than_the_optimum(lake, slippery):
    _, *world = lake.make_lake(slippery=slippery)
    optimum = lake.optimum(*world)
    others = [optimum + 0.1 * torch.randn(optimum.shape, generator=torch.Generator().manual_seed(n)) for n in range(5)]
    others = [*(other.log_softmax(2) for other in others), lake.best_table(*world)]
    top = lake.success_and_soft(*world, optimum)[1]
    assert all(top - 1 < lake.success_and_soft(*world, other)[1] < top for other in others)


def test_played_episodes_succeed_as_often_as_the_table_says(lake):
    played, *world = lake.make_lake(slippery=True)
    played.reset(seed=0)
    logprob_FA = lake.best_table(*world)[0]
    rng = np.random.default_rng(0)
    rewards = [lake.play(played, logprob_FA, rng, 0)[1] for _ in range(100)]
    assert np.mean(rewards) == pytest.approx(float(lake.success_and_soft(*world, logprob_FA[None])[0]), abs=0.02)


@pytest.mark.parametrize("name", ["tb", 'tb, log_z = "turn"', "tb_prefix", "ppo"])
def test_the_trainer_trains_the_table(lake, name):
    played, *world = lake.make_lake(slippery=False)
    quarters = lake.train(lake.OBJECTIVES[name], played, age=2, seed=0, rate=0.2, steps=40)
    assert lake.success_and_soft(*world, quarters[-1:])[0] > 0.2
