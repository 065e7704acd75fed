"""Trajectory Balance against formulas written here independently, in float64."""

import math

import pytest
import torch

from tba.trainer.objectives import balance
from tba.trainer.objectives.health import balance_metrics
from tba.trainer.objectives.responses import Responses, Totals

BETA = 0.3


def trajectory_balance(policy, reference, reward, beta) -> torch.Tensor:
    """The objective on responses of one token each."""
    prompts, samples = reward.shape
    rows = prompts * samples
    responses = Responses(
        logprob_R=policy.flatten(), sampled_logprob_R=torch.zeros(rows), mask_R=torch.ones(rows, dtype=torch.bool),
        lengths=[1] * rows, reward_bK=reward, reference_bK=reference, lag_bK=torch.zeros_like(reward),
        totals=Totals(prompts, rows, rows),
    )  # fmt: skip
    return balance.trajectory_balance(responses, beta=beta)


def random_case(prompts: int = 3, samples: int = 4, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shape = (prompts, samples)
    policy = -10 * torch.rand(shape, generator=generator, dtype=torch.float64)
    reference = -10 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), reference, torch.rand(shape, generator=generator, dtype=torch.float64)


def gradient(policy, reference, reward, beta=BETA) -> torch.Tensor:
    return torch.autograd.grad(trajectory_balance(policy, reference, reward, beta), policy)[0]


def test_a_case_by_hand():
    # Two samples, log(pi / ref) = 1 and -1. With r / beta = 2 and 0: log Z = ((2 - 1) + (0 + 1)) / 2 = 1, and
    # the residuals are 1 + 1 - 2 = 0 and 1 - 1 - 0 = 0. With r / beta = 4 and 0: log Z = 2, residuals -1 and 1.
    policy, reference = torch.tensor([[-1.0, -3.0]]).double(), torch.tensor([[-2.0, -2.0]]).double()
    assert trajectory_balance(policy, reference, torch.tensor([[1.0, 0.0]]).double(), 0.5) == 0
    loss = trajectory_balance(policy, reference, torch.tensor([[2.0, 0.0]]).double(), 0.5)
    assert loss.item() == pytest.approx(0.5 / 2 * (1 + 1) / 2, abs=1e-15)


def test_the_gradient_is_that_of_equation_7():
    policy, reference, reward = random_case()
    kl = (policy - reference).detach()
    advantage = (reward - reward.mean(1, keepdim=True)) - BETA * (kl - kl.mean(1, keepdim=True))
    expected = torch.autograd.grad(-(advantage * policy).mean(), policy)[0]
    assert torch.allclose(gradient(policy, reference, reward), expected, atol=1e-12, rtol=0)
    assert expected.abs().max() > 0.01


def test_the_gradient_is_that_of_reinforce_with_the_kl_in_the_reward_and_the_mean_as_baseline():
    policy, reference, reward = random_case(seed=1)
    regularised = reward - BETA * (policy.detach() - reference)
    surrogate = -((regularised - regularised.mean(1, keepdim=True)) * policy).mean()
    expected = torch.autograd.grad(surrogate, policy)[0]
    assert torch.allclose(gradient(policy, reference, reward), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("beta", [1.0, 0.1, 0.004])
def test_without_a_kl_the_gradient_does_not_depend_on_beta(beta):
    _, reference, reward = random_case()
    policy = reference.clone().requires_grad_()
    assert torch.allclose(
        gradient(policy, reference, reward, beta), gradient(policy, reference, reward, 1.0), atol=1e-12
    )


def test_it_is_zero_with_zero_gradient_at_the_optimum():
    _, reference, reward = random_case()
    log_z = torch.tensor([[1.5], [-2.0], [0.0]], dtype=torch.float64)
    optimum = (reference + reward / BETA - log_z).requires_grad_()
    assert trajectory_balance(optimum, reference, reward, BETA).item() < 1e-25
    assert gradient(optimum, reference, reward).abs().max() < 1e-12
    assert balance_metrics(optimum, reference, reward, BETA)["log_z"] == pytest.approx(log_z.mean().item())


def test_gradcheck():
    # Finite differences move log Z too, although it is detached; that adds the mean residual, which is zero.
    policy, reference, reward = random_case()
    assert torch.autograd.gradcheck(lambda p: trajectory_balance(p, reference, reward, BETA), policy)


def test_log_z_is_detached():
    policy, reference, reward = random_case(prompts=1, samples=2)
    second = torch.autograd.functional.hessian(
        lambda p: trajectory_balance(p, reference, reward, BETA), policy.detach()
    ).reshape(2, 2)
    # With log Z detached the loss is quadratic in each sample alone: no mixed derivatives.
    assert torch.allclose(second, torch.eye(2, dtype=torch.float64) * BETA / 2, atol=1e-12)


def test_order_of_samples_and_of_groups_does_not_matter():
    policy, reference, reward = random_case()
    samples, groups = torch.tensor([2, 0, 3, 1]), torch.tensor([1, 2, 0])
    moved = [part.detach()[groups][:, samples].requires_grad_() for part in (policy, reference, reward)]
    assert trajectory_balance(*moved, BETA).item() == pytest.approx(
        trajectory_balance(policy, reference, reward, BETA).item(), rel=1e-14
    )
    expected = gradient(policy, reference, reward)[groups][:, samples]
    assert torch.allclose(gradient(*moved), expected, atol=1e-14, rtol=0)


def test_prompts_do_not_mix():
    policy, reference, reward = random_case()
    before = gradient(policy, reference, reward)
    changed = reward.clone()
    changed[0] += torch.tensor([5.0, 0.0, -3.0, 1.0], dtype=torch.float64)
    after = gradient(policy, reference, changed)
    assert torch.equal(before[1:], after[1:])
    assert not torch.allclose(before[0], after[0])


def test_a_constant_added_to_the_rewards_of_a_prompt_changes_nothing():
    policy, reference, reward = random_case()
    shifted = reward + torch.tensor([[7.0], [-3.0], [0.5]], dtype=torch.float64)
    assert torch.allclose(gradient(policy, reference, shifted), gradient(policy, reference, reward), atol=1e-12)


def test_metrics_by_hand():
    policy, reference = torch.tensor([[-1.0, -3.0]]).double(), torch.tensor([[-2.0, -2.0]]).double()
    found = balance_metrics(policy, reference, torch.tensor([[2.0, 0.0]]).double(), 0.5)
    expected = {"log_z": 2.0, "log_z_std": 0.0, "residual_std": 1.0, "advantage_std": 0.5, "kl": 0.0}
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[name], expected[name], abs_tol=1e-12) for name in expected)
