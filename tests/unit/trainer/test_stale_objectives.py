"""Imitation and taper: what they change on fresh and on stale data, on policies small enough to enumerate."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from tba.common.config import Config, TrainSection
from tba.tests.helpers.trainer import LONGEST_RESPONSE, learner_of, objective, random_batch, tiny_model
from tba.tests.unit.trainer.test_objectives import by_hand
from tba.trainer.objectives.advantages import imitation, taper
from tba.trainer.objectives.responses import Responses

pytestmark = pytest.mark.slow

BETA = 0.5
PROBABILITIES = torch.tensor([0.1, 0.8, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 0.3], dtype=torch.float64)


def answers(logprob: torch.Tensor, sampler: torch.Tensor, picks: list[int]) -> Responses:
    """Return a group of answers of one token: log-probabilities under the policy, probabilities under the sampler."""
    sampled = sampler.log()[picks]
    return by_hand([1] * len(picks), logprob[picks], sampled, REWARDS[picks], reference_bK=sampled[None])


def expected_gradient(
    name: str, temperature: float = 1.0, *, sampler: torch.Tensor | None = None, **keys
) -> torch.Tensor:
    """Return the expectation of the gradient over all groups of three answers, fresh ones unless there is a sampler."""
    logits = torch.tensor([0.2, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    sampler = (logits.detach() / temperature).softmax(0) if sampler is None else sampler
    total = torch.zeros((), dtype=torch.float64)
    for picks in itertools.product(range(3), repeat=3):
        group = answers(logits.log_softmax(0), sampler, list(picks))
        tempered_R = (logits / temperature).log_softmax(0)[list(picks)]
        group = replace(group, tempered_R=tempered_R, reference_bK=torch.full((1, 3), -1.0))
        total = total + sampler[list(picks)].prod() * objective(name, **keys).loss(group, BETA)
    return torch.autograd.grad(total, logits)[0]


def test_imitation_is_at_most_the_spread_of_the_others_where_a_reward_is_large():
    # The mean of the others is what rounding leaves of a sum of 1e9 each: it may be outside their range.
    others = [0.1] * 62 + [0.1 + 4e-6]
    reward_1K = torch.tensor([[-1e9, *others]], dtype=torch.float64)
    assert 0 <= imitation(reward_1K, 1.0, "group")[0, 0] <= 4e-6
    # Rewards that differ by rounding are equal, and a group of right answers only is worth keeping.
    reward_1K = torch.tensor([[-1e9, 0.1, math.nextafter(0.1, 1)]], dtype=torch.float64)
    (added,) = imitation(reward_1K, 1.0, "group")
    assert added[0] == pytest.approx(0.1, abs=1e-6)
    # One of the two others is the best: half of their range, times the share of a half cubed.
    assert added[1:].tolist() == pytest.approx([1e9 / 16] * 2)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *(
            (name, {"imitation": 0.7, "reward_floor": floor})
            for name in ("tb", "tba_prime", "rloo", "dr_grpo", "ppo_clip", "proximal_rloo")
            for floor in (-1.0, "group")
        ),
        ("tb_stale", {}),
    ],
)
def test_on_fresh_data_imitation_adds_a_gradient_of_mean_zero_at_every_temperature(name, keys, temperature):
    # On tokens too it is Trajectory Balance.
    without = expected_gradient("tb" if name in ("tb_stale", "tba_prime") else name, temperature)
    assert torch.allclose(expected_gradient(name, temperature, **keys), without, atol=1e-14)
    assert without.abs().max() > 1e-3


def test_on_stale_data_imitation_pushes_down_only_what_is_likelier_than_the_truncation_allows():
    policy = torch.tensor([0.2, -0.5, 1.0], dtype=torch.float64).softmax(0)
    near, far = torch.tensor([[0.3, 0.2, 0.5], [0.4, 0.59, 0.01]], dtype=torch.float64)
    for sampler in (near, far):
        without, added = (expected_gradient(name, sampler=sampler) for name in ("tba_prime", "tb_stale"))
        # sum_y (pi - 8 mu)+ grad log pi(y), times what imitation adds to an advantage in the mean.
        beyond = (policy - 8 * sampler).clamp(min=0)
        expected = mean_imitation(sampler) * (beyond - beyond.sum() * policy)
        assert torch.allclose(added - without, expected, atol=1e-14)
        assert bool(expected.any()) is (sampler is far)


def mean_imitation(sampler: torch.Tensor) -> float:
    """Return the mean of the imitation of tb_stale over two other answers, half-way between which their mean is."""
    total = 0.0
    for a, b in itertools.product(range(3), repeat=2):
        low, high = sorted([float(REWARDS[a]), float(REWARDS[b])])
        total += float(sampler[[a, b]].prod()) * ((high - low) / 2 / 8 if low < high else max(low, 0.0))
    return total


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_policy_gradients_at_a_temperature_follow_the_expected_reward_of_that_policy(temperature):
    logits = torch.tensor([0.2, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    expected_reward = (logits / temperature).softmax(0) @ REWARDS
    (ascent,) = torch.autograd.grad(expected_reward, logits)
    # A baseline that includes the response itself takes 1/K of the gradient; dr_grpo divides by the longest response.
    centred, longest = 2 / 3, LONGEST_RESPONSE
    for name, factor in [
        ("reinforce", 1),
        ("rloo", 1),
        ("proximal_rloo", 1),
        ("ppo_clip", 1),
        ("dr_grpo", centred / longest),
    ]:
        assert torch.allclose(expected_gradient(name, temperature), -factor * ascent, atol=1e-14), name


def mass_of_the_sampled(
    name: str, features: list[list[float]], beta: float, picks: Sequence[int] = (0, *[1] * 7), **keys
) -> float:
    """Train on one stale group, by default of one right and seven wrong answers. Returns the probability of both."""
    features_AF = torch.tensor(features, dtype=torch.float64)
    weights_F = torch.zeros(features_AF.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weights_F], lr=0.3)
    for _ in range(500):
        logprob = (PROBABILITIES.log() + features_AF @ weights_F).log_softmax(0)
        loss = objective(name, **keys).loss(answers(logprob, PROBABILITIES, list(picks)), beta)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return float((PROBABILITIES.log() + features_AF @ weights_F).detach().softmax(0)[:2].sum())


def test_on_stale_data_tb_loses_the_probability_of_the_sampled_answers_and_tb_stale_does_not():
    table, before = torch.eye(3).tolist(), 0.9
    assert mass_of_the_sampled("tb", table, BETA) < before - 0.03
    assert mass_of_the_sampled("tb_stale", table, BETA) > before + 0.03
    # What unlearns the wrong answer also unlearns half of the right one. A model generalises like this.
    shared = [[1.0, 1.0], [2.0, 0.0], [0.0, 0.0]]
    assert mass_of_the_sampled("tb", shared, 0.1) < 0.6
    assert mass_of_the_sampled("tb_stale", shared, 0.1) > before


def test_imitation_keeps_the_probability_of_a_group_that_is_nearly_solved():
    # Seven right answers and a wrong one; what unlearns the wrong one also unlearns the right one.
    shared, picks = [[1.0, 1.0], [2.0, 0.0], [0.0, 0.0]], [0] * 7 + [1]
    without, kept = (mass_of_the_sampled("tb_stale", shared, 0.1, picks, imitation=weight) for weight in (0.0, 1.0))
    assert kept > without + 0.03


def test_only_negative_advantages_of_lost_answers_are_tapered():
    logprob = torch.tensor([0.05, 0.2, 0.75], dtype=torch.float64).log()
    group = replace(answers(logprob, PROBABILITIES, [0, 1, 0, 2]), lengths=[1, 2, 1], reward_bK=torch.zeros(1, 3))
    # Ratios: 1/2; of the two tokens 1/4 and 1/2; 7.5.
    negative, mixed = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[1.0, -1.0, 0.0]])
    assert taper(group, negative, "response").tolist() == [pytest.approx([0.5, 0.125, 1.0])]
    assert taper(group, negative, "mean").tolist() == [pytest.approx([0.5, 0.125**0.5, 1.0])]
    assert taper(group, mixed, "response").tolist() == [pytest.approx([1.0, 0.125, 1.0])]
    assert taper(group, negative, "off").tolist() == [[1.0, 1.0, 1.0]]


# The weight, the rewards of a group, and what imitation adds to its first responses.
IMITATED: list[tuple[float, list[float], list[float]]] = [
    # Prompts that are nearly solved are imitated most: the others of a wrong response are the right and the wrong ones.
    *((1.0, [0.0] * (8 - solved) + [1.0] * solved, [(solved / 7) ** 4]) for solved in range(8)),
    (1.0, [1.0] * 8, [1.0] * 8),
    # Graded rewards are so only if most are close to the best. Of a range of 0.3, a twentieth is 0.015.
    (1.0, [0.5, 0.6, 0.75, 0.9, 0.6, 0.75, 0.9], [0.15 * (2 / 6) ** 3]),
    (1.0, [0.5, 0.6, 0.886, 0.9], [(2.386 / 3 - 0.6) * (2 / 3) ** 3]),
    (1.0, [0.5, 0.6, 0.884, 0.9], [(2.384 / 3 - 0.6) * (1 / 3) ** 3]),
    # A small penalty of right answers leaves them right.
    (1.0, [0.5, 0.0, 0.98, 0.97, 0.96], [2.91 / 4 * 0.75**3]),
    # Equal rewards of the others count from 0 if they are positive. One of two others is the best, so the power takes
    # 7/8 of what their mean is above the least.
    (0.5, [3.0, 1.0, 1.0], [0.5, 1.0 / 16, 1.0 / 16]),
    (0.5, [1.0, 1.0, 1.0], [0.5, 0.5, 0.5]),
    (0.5, [-1.0, -1.0, 2.0], [1.5 / 16, 1.5 / 16, 0.0]),
    (0.5, [-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]),
]


@pytest.mark.parametrize(("weight", "rewards", "expected"), IMITATED)
def test_imitation_by_hand(weight, rewards, expected):
    (added,) = imitation(torch.tensor([rewards], dtype=torch.float64), weight, "group").tolist()
    assert added[: len(expected)] == pytest.approx(expected)


@pytest.mark.parametrize("samples", [2, 3, 4, 6, 9])
def test_imitation_of_a_response_does_not_depend_on_its_own_reward(samples):
    rewards = torch.rand(200, samples, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))
    # Coarse, so that the share near the best takes all its values.
    rewards = (rewards * 4).round() / 4
    other = rewards.clone()
    other[:, 0] += torch.linspace(-3, 3, 200, dtype=torch.float64)
    before, after = (imitation(each, 1.0, "group")[:, 0] for each in (rewards, other))
    assert torch.allclose(before, after, atol=1e-14)
    assert len(before.unique()) > samples


@pytest.mark.parametrize(
    ("keys", "times"),
    [({"imitation": 0.5, "reward_floor": 0.0}, 1), ({"imitation": 0.5}, 0), ({"reward_floor": 0.0}, 0)],
)
def test_a_reward_below_the_floor_is_logged_once(caplog, keys, times):
    batch = random_batch(1)
    batch = replace(batch, reward_BK=batch.reward_BK - 0.9)
    learner = learner_of(tiny_model(), tiny_model(seed=1), TrainSection(), objective(**keys))
    for _ in range(2):
        learner.step(batch)
    assert caplog.text.count("below objective.reward_floor") == times


def test_a_rate_by_ratios_is_refused_for_sampling_without_ratios():
    with pytest.raises(ValidationError, match="learning_rate_by_ess has no effect"):
        Config.model_validate({"search": {"temperature": [0.0, 1.0]}, "train": {"learning_rate_by_ess": True}})


@pytest.mark.parametrize("cut", [{"top_p": 0.95}, {"top_p": {"min": 0.9, "max": 1.0}}, {"min_p": 0.1}])
@pytest.mark.parametrize("name", ["tb_stale", "rloo", "grpo"])
def test_on_vllm_the_tokens_that_a_nucleus_keeps_need_a_limit(name, cut):
    with pytest.raises(ValidationError, match=r"set search\.top_k, such as 1000, without search\.serve"):
        Config.model_validate({"search": cut, "objective": {"name": name}})
    with pytest.raises(ValidationError, match=r"without search\.serve"):
        Config.model_validate({"search": cut | {"top_k": 100, "serve": "8000"}, "objective": {"name": name}})
    for more in ({"top_k": 100}, {"engine": "transformers"}):
        assert Config.model_validate({"search": cut | more, "objective": {"name": name}}).needs_kept
    # Its optimum is that of the policy at temperature 1, whatever the sampler.
    assert not Config.model_validate({"search": cut, "objective": {"name": "tb"}}).needs_kept
