"""The benchmark of VinePPO: values against an enumerated policy, and the gradient that they give."""

import importlib
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from tba.tests.helpers.trainer import save_tiny_model, tiny_model
from tba.trainer.objectives.responses import Responses, Totals

pytestmark = [pytest.mark.torch]
END, SAMPLES = 2, 2000


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


@pytest.mark.slow
def test_rollouts_estimate_the_exact_value_of_each_prefix_under_the_newest_weights(vine, tmp_path):
    task, problem = (
        vine.Task("", save_tiny_model(tmp_path / "m"), 3, True, END, [], {}),
        vine.Problem((5,), (3, 4, END)),
    )
    policy, source = tiny_model(seed=1), vine.OwnEngine(task, problem, 0, tmp_path)
    source.serve(policy)
    rollouts = vine.Rollouts(task, SAMPLES, source)
    starts = [(), (3,), (3, 4), (6,), (6, 4)]
    found = rollouts.values([(problem, start) for start in [*starts, (3, 4), (3, 4)]])

    def squared_error(model, start):
        """Return the squared error of the estimate in units of its exact variance."""
        chance, mean, square = 0.0, 0.0, 0.0
        for whole in completions(start, 8, 3):
            logprob_TV = model(torch.tensor([[5, *whole]])).logits[0].double().log_softmax(1).detach()
            one = np.exp(sum(float(logprob_TV[place, whole[place]]) for place in range(len(start), len(whole))))
            reward = task.reward(problem, whole)
            chance, mean, square = chance + one, mean + one * reward, square + one * reward**2
        assert chance == pytest.approx(1, abs=1e-5)
        return (found[problem, start] - mean) ** 2 / ((square - mean**2) / SAMPLES)

    # Five degrees of freedom: 25.7 is exceeded once in 10,000 times. The weights of the start are told apart.
    assert (
        sum(squared_error(policy, one) for one in starts) < 25.7 < sum(squared_error(tiny_model(), s) for s in starts)
    )
    # With two tokens before them they have one token, and what three responses share was rolled out once.
    before = rollouts.tokens, rollouts.unshared
    rollouts.values([(problem, (3, 4))] * 3 + [(problem, (6, 4))])
    assert (rollouts.tokens - before[0], rollouts.unshared - before[1]) == (2 * SAMPLES, 4 * SAMPLES)


def test_the_gradient_is_unbiased_with_one_rollout_of_each_prefix(vine):
    starts, wholes, rng = [(), (0,), (1,)], completions((), 3, 2), np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(3, 3))).requires_grad_()
    reward = {whole: float(one) for whole, one in zip(wholes, rng.normal(size=len(wholes)), strict=True)}

    def logprob_R(whole):
        table = logits.log_softmax(1)
        return torch.stack([table[starts.index(whole[:place]), token] for place, token in enumerate(whole)])

    def loss(whole, value):
        own_R, one = logprob_R(whole), torch.tensor([[reward[whole]]], dtype=torch.float64)
        response = vine.Response(None, whole, own_R, reward[whole], 0)
        of_tokens = vine.advantages(response, {(None, start): one for start, one in value.items()})
        mask_R = torch.ones(len(whole), dtype=torch.bool)
        # The divisor, the tokens of a batch, is left out: it is random itself.
        sizes = [len(whole)], one, one, one, Totals(1, 1, 1)
        return vine.vine_ppo(Responses(own_R, own_R.detach(), mask_R, *sizes, reference_R=of_tokens), 0.0).loss

    total = torch.zeros(())
    for ends in itertools.product(*(completions(start, 3, 2) for start in starts)):
        pairs = list(zip(starts, ends, strict=True))
        chance = sum(logprob_R(end)[len(start) :].sum() for start, end in pairs).exp()
        value = {start: reward[end] for start, end in pairs}
        total = total + sum((chance * logprob_R(whole).sum().exp()).detach() * loss(whole, value) for whole in wholes)
    expected = torch.stack([logprob_R(whole).sum().exp() * reward[whole] for whole in wholes]).sum()
    (found,), (right,) = torch.autograd.grad(total, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, -right, rtol=0, atol=1e-12)
