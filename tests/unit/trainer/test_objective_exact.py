"""Trajectory Balance reaches the exact optimum, off-policy, for a policy small enough to enumerate.

All 64 responses of 3 tokens over a vocabulary of 4 are known, so the optimum pi* ~ pi_ref exp(r / beta) is too
(Eq. 2 of the paper), and how far the policy is from it is a total variation distance, not an opinion.
"""

import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from tba.common.config import TrainSection
from tba.tests.helpers.trainer import learner_of, make_batch, make_row, objective, tiny_model
from tba.tests.runner import size
from tba.trainer.batch.batch import TrainBatch
from tba.trainer.model.scorer import Scorer, sequence_logprobs
from tba.trainer.step.learner import Learner

VOCABULARY, LENGTH, BETA, SAMPLES = 4, 3, 0.5, 32
PROMPTS = ([0, 1], [2, 3])
RESPONSES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
# In full size the optimum is reached. At first the distance is 0.5, and fewer steps show the way.
NEAR = size(0.13, 0.02)
ROWS = [make_row(i, prompt, y) for i, (prompt, y) in enumerate(itertools.product(PROMPTS, RESPONSES))]


@torch.no_grad()
def distribution(model) -> np.ndarray:
    """Return the probability of every response: [prompt, response]."""
    logprobs = sequence_logprobs(Scorer(model).score(ROWS).logprob_R, ROWS)
    return logprobs.exp().view(len(PROMPTS), len(RESPONSES)).numpy()


def make_task(steps: int, learning_rate: float) -> tuple[Learner, np.ndarray, np.ndarray]:
    """Return a learner that starts at its reference, rewards, and the optimal distribution."""
    config = TrainSection(
        steps=steps, learning_rate=learning_rate, schedule="cosine", warmup_steps=10, weight_decay=0.0,
        beta=BETA, beta_final=BETA, beta_anneal_steps=0, max_grad_norm=10.0,
    )  # fmt: skip
    settings: dict[str, Any] = {"vocabulary": VOCABULARY, "hidden": 32, "seed": 5}
    learner = learner_of(tiny_model(**settings), tiny_model(**settings), config, objective())
    reward = 2 * np.random.default_rng(11).random((len(PROMPTS), len(RESPONSES)))
    optimum = distribution(learner.policy) * np.exp(reward / BETA)
    return learner, reward, optimum / optimum.sum(axis=1, keepdims=True)


def draw(reward: np.ndarray, probabilities: np.ndarray, rng: np.random.Generator) -> TrainBatch:
    """Sample K responses of each prompt from the given distributions."""
    picks = [rng.choice(len(RESPONSES), size=SAMPLES, p=p / p.sum()) for p in probabilities]
    rows = [ROWS[b * len(RESPONSES) + y] for b, group in enumerate(picks) for y in group]
    return make_batch(rows, [reward[b, group] for b, group in enumerate(picks)])


def distance(p: np.ndarray, q: np.ndarray) -> float:
    """Return the largest total variation distance over the prompts."""
    return float(0.5 * np.abs(p - q).sum(axis=1).max())


@pytest.mark.slow
def test_the_optimum_is_reached_from_a_fixed_uniform_sampler():
    steps = size(400, 1200)
    learner, reward, optimum = make_task(steps, learning_rate=size(4e-3, 3e-3))
    assert distance(distribution(learner.policy), optimum) > 0.3
    rng = np.random.default_rng(0)
    uniform = np.full(optimum.shape, 1 / len(RESPONSES))
    for _ in range(steps):
        learner.step(draw(reward, uniform, rng))
    reached = distance(distribution(learner.policy), optimum)
    print(f"total variation {reached:.4f}")
    assert reached < NEAR


@pytest.mark.slow
def test_the_optimum_is_reached_from_data_that_is_64_steps_stale():
    steps = size(400, 2000)
    learner, reward, optimum = make_task(steps, learning_rate=size(4e-3, 2e-3))
    rng = np.random.default_rng(0)
    past = deque([distribution(learner.policy)], maxlen=65)
    for _ in range(steps):
        learner.step(draw(reward, past[0], rng))
        past.append(distribution(learner.policy))
    reached = distance(distribution(learner.policy), optimum)
    print(f"total variation {reached:.4f}")
    assert reached < NEAR
