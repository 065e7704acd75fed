"""The benchmark of VinePPO: values against an enumerated policy, and the gradient that they give."""

import importlib
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from tba.common.config import TrainSection
from tba.tests.helpers.trainer import make_batch, make_row, save_tiny_model, tiny_model
from tba.trainer.objectives.from_config import Objective
from tba.trainer.objectives.responses import Responses, Totals
from tba.trainer.step.build import prepare_models

pytestmark = [pytest.mark.torch]

END, LONGEST, SAMPLES = 2, 3, 2000


@pytest.fixture(autouse=True)
def vine(monkeypatch):
    """Import the benchmark, which is not a part of the package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("benchmarks.vine_ppo")


def completions(prefix, vocabulary, longest):
    """Return all responses that begin with a prefix."""
    if len(prefix) == longest or END in prefix:
        return [prefix]
    return [whole for token in range(vocabulary) for whole in completions((*prefix, token), vocabulary, longest)]


def response_of(vine, tokens, reward=0.0):
    return vine.Response(vine.Problem((5,), (3, 4, END)), tokens, np.zeros(len(tokens), np.float32), reward, 0)


def test_rollouts_estimate_the_exact_value_of_each_prefix_under_the_newest_weights(vine, tmp_path):
    task = vine.Task("tiny", save_tiny_model(tmp_path / "model"), LONGEST, True, END, [], {})
    policy, problem = tiny_model(seed=1), vine.Problem((5,), (3, 4, END))
    rollouts = vine.Rollouts(task, SAMPLES, tmp_path, seed=0)
    rollouts.serve(policy, 1, [5, 3, 4, END])
    wanted = [(problem, start) for start in [(), (3,), (3, 4), (6,), (6, 4)]]
    found = rollouts.values([*wanted, wanted[2], wanted[2]])

    def exact(model, prefix):
        """Return the mean and the variance of the reward of a response that begins with a prefix."""
        wholes, chances = completions(prefix, 8, LONGEST), []
        for whole in wholes:
            logprob_TV = model(torch.tensor([[5, *whole]])).logits[0].double().log_softmax(1)
            chances.append(sum(logprob_TV[place, whole[place]] for place in range(len(prefix), len(whole))).exp())
        rewards = torch.tensor([task.reward(problem, whole) for whole in wholes], dtype=torch.float64)
        weights = torch.stack(chances).detach()
        assert weights.sum() == pytest.approx(1, abs=1e-5)
        return float(weights @ rewards), float(weights @ rewards**2 - (weights @ rewards) ** 2)

    def chi_square(model):
        values = {one: exact(model, one[1]) for one in wanted}
        return sum((found[one] - value) ** 2 / (variance / SAMPLES) for one, (value, variance) in values.items())

    # Five degrees of freedom: 25.7 is exceeded once in 10,000 times. The weights of the start are told apart.
    assert chi_square(policy) < 25.7 < chi_square(tiny_model(seed=0))
    # From two tokens on there is one left, and this prefix of three responses was rolled out once.
    only = vine.Rollouts(task, 10, tmp_path, seed=0)
    only.values([wanted[2]] * 3 + [wanted[4]])
    assert (only.tokens, only.unshared) == (20, 40)


def test_the_gradient_is_unbiased_with_one_rollout_of_each_prefix(vine):
    generator = torch.Generator().manual_seed(0)
    starts, wholes = [(), (0,), (1,)], completions((), 3, 2)
    logits = torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_()
    reward = dict(zip(wholes, torch.randn(len(wholes), generator=generator).tolist(), strict=True))

    def logprob_R(whole):
        table = logits.log_softmax(1)
        return torch.stack([table[starts.index(whole[:place]), token] for place, token in enumerate(whole)])

    def loss(whole, value):
        own_R, response = logprob_R(whole), response_of(vine, whole, reward[whole])
        given = {(response.problem, start): one for start, one in value.items()}
        one = torch.tensor([[reward[whole]]], dtype=torch.float64)
        # The divisor, the tokens of a batch, is left out: it is random itself.
        responses = Responses(
            own_R, own_R.detach(), torch.ones(len(whole), dtype=torch.bool), [len(whole)], one, one, one,
            Totals(1, 1, 1), reference_R=vine.advantages(response, given),
        )  # fmt: skip
        return vine.vine_ppo(responses, 0.0).loss

    total = 0.0
    for ends in itertools.product(*(completions(start, 3, 2) for start in starts)):
        value = {start: reward[end] for start, end in zip(starts, ends, strict=True)}
        parts = [logprob_R(end)[len(start) :].sum() for start, end in zip(starts, ends, strict=True)]
        chance = torch.stack(parts).sum().exp().detach()
        total += sum(chance * logprob_R(whole).sum().exp().detach() * loss(whole, value) for whole in wholes)
    expected = sum(logprob_R(whole).sum().exp() * reward[whole] for whole in wholes)
    (found,), (right,) = torch.autograd.grad(total, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, -right, rtol=0, atol=1e-12)


def test_the_learner_gives_each_token_its_own_advantage(vine):
    model, rows, advantages = tiny_model(), [], {}
    for id_, (prompt, response) in enumerate([((5,), (3, 2)), ((5,), (4,)), ((1, 6), (3, 4, 2)), ((1, 6), (7, 2))]):
        logprob_TV = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].log_softmax(1)
        own_R = logprob_TV[range(len(response)), response]
        rows.append(make_row(id_, prompt, response, sampling_logprobs=own_R.detach().numpy()))
        advantages[id_] = torch.randn(len(response), generator=torch.Generator().manual_seed(id_)).double()
        (-(advantages[id_] * own_R).sum() / 8).backward()
    right = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    objective = Objective("vine", vine.vine_ppo, needs_reference=False, reference_of_tokens=True)
    config = TrainSection(steps=1)
    learner = vine.VineLearner(prepare_models(model, lambda: (tiny_model(), False), config), config, objective)
    learner.advantages = advantages
    batch = make_batch(rows, [[1.0, 0.0], [0.0, 1.0]])
    learner.accumulate(batch, batch.reference_BK, 0.1)
    for parameter, gradient in zip(model.parameters(), right, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
