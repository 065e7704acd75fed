"""Which part of an objective is at the temperature of sampling; and a sampler counts only where it is known."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tba.tests.helpers.checks import not_none
from tba.tests.helpers.trainer import objective
from tba.tests.unit.trainer.test_objectives import BETA, NAMES, case, group_advantages, raised
from tba.trainer.objectives.responses import Responses

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in [*NAMES, "tb_learned_z"]),
    ("tb", {"taper": "response"}),
    ("tb", {"taper": "mean", "imitation": 0.5}),
    ("rloo", {"kl": "ema"}),
    ("dr_grpo", {"kl": "reference", "imitation": 1.0}),
    ("reinforce", {"taper": "response", "kl": "ema"}),
    ("tba_prime", {"mean_kl": "policy"}),
    ("tb_stale", {"kl": "ema"}),
]
AT_SAMPLING = ["oapl", "reinforce", "rloo", "proximal_rloo", "ppo_clip", "grpo", "dr_grpo", "cispo"]


def at_temperature(seed: int) -> Responses:
    """Return stale responses of a temperature: log-probabilities at 1 and at the temperature, unlike each other."""
    responses = case(seed, drift=0.6)
    generator = torch.Generator().manual_seed(seed)
    tempered_R = responses.logprob_R.detach() + torch.randn(
        responses.logprob_R.shape, generator=generator, dtype=torch.float64
    )
    sampled_R = tempered_R + 0.6 * torch.randn(tempered_R.shape, generator=generator, dtype=torch.float64)
    log_z_bK = torch.tensor([[0.5], [-1.0], [2.0]], dtype=torch.float64)
    return replace(responses, tempered_R=tempered_R.requires_grad_(), sampled_logprob_R=sampled_R, log_z_bK=log_z_bK)


def gradients(responses: Responses, name: str, **keys: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients with respect to log-probabilities at temperature 1, and at that of sampling."""
    leaves = responses.logprob_R, not_none(responses.tempered_R)
    loss = objective(name, **keys).loss(responses, BETA)
    at_1, tempered = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return at_1, tempered


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "keys"), [*((name, {}) for name in AT_SAMPLING), ("rloo", {"kl": "ema"})])
def test_objectives_of_the_sampling_policy_use_nothing_at_temperature_1(name, keys, seed):
    responses = at_temperature(seed)
    at_1, tempered = gradients(responses, name, **keys)
    assert not at_1.any()
    same = replace(responses, logprob_R=not_none(responses.tempered_R).detach().clone().requires_grad_())
    assert torch.equal(gradients(same, name, **keys)[1], tempered)
    assert tempered.abs().max() > 1e-4


@pytest.mark.parametrize("name", ["tb", "tb_learned_z", "online_dpo"])
def test_balance_and_preferences_use_nothing_at_the_temperature_of_sampling(name):
    responses = at_temperature(0)
    at_1, tempered = gradients(responses, name)
    assert not tempered.any()
    moved = replace(responses, tempered_R=(not_none(responses.tempered_R).detach() - 1).requires_grad_())
    assert torch.equal(gradients(moved, name)[0], at_1)
    assert at_1.abs().max() > 1e-4


def equation_7(responses: Responses, *, sampler_mean: bool) -> torch.Tensor:
    """Compute the advantages of Eq. 7, with loops; the mean KL may be that of the sampler at its temperature."""
    kl = (responses.policy_bK - responses.reference_bK).detach()
    advantage = group_advantages(responses.reward_bK - BETA * kl, "mean")
    if sampler_mean:
        log_ratio_N = torch.stack([part.sum() for part in torch.split(counted_log_ratio(responses), responses.lengths)])
        advantage = advantage - BETA * log_ratio_N.view_as(advantage).mean(1, keepdim=True)
    return advantage


def counted_log_ratio(responses: Responses) -> torch.Tensor:
    log_ratio_R = not_none(responses.tempered_R) - responses.sampled_logprob_R
    return torch.where(responses.mask_R, log_ratio_R, 0.0).detach()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("imitation", [0.0, 1.0])
def test_eq_7_on_tokens_is_at_temperature_1_its_ratios_and_what_is_imitated_at_that_of_sampling(imitation, seed):
    responses = at_temperature(seed)
    weight_R = counted_log_ratio(responses).exp().clamp(max=8.0) * responses.mask_R / responses.totals.rows
    advantage_R, raised_R = (
        torch.cat([value.repeat(length) for value, length in zip(of_rows.flatten(), responses.lengths, strict=True)])
        for of_rows in (
            equation_7(responses, sampler_mean=True),
            raised(responses.reward_bK, 1.0, None),
        )
    )
    at_1, tempered = gradients(responses, "tb_stale" if imitation else "tba_prime")
    assert torch.allclose(at_1, -weight_R * advantage_R, atol=1e-14, rtol=0)
    assert torch.allclose(tempered, -imitation * weight_R * raised_R, atol=1e-14, rtol=0)


@pytest.mark.parametrize("kind", ["response", "mean"])
def test_the_taper_of_tb_is_by_the_ratio_at_the_temperature_of_sampling(kind):
    responses = at_temperature(1)
    ratio_R, mask_R = counted_log_ratio(responses), responses.mask_R
    advantage = equation_7(responses, sampler_mean=False)
    weights = []
    parts = zip(torch.split(ratio_R, responses.lengths), torch.split(mask_R, responses.lengths), strict=True)
    for (part, counts), value in zip(parts, advantage.flatten().tolist(), strict=True):
        log_ratio = part.sum() / (max(int(counts.sum()), 1) if kind == "mean" else 1)
        weights.append(float(log_ratio.clamp(max=0).exp()) if value < 0 else 1.0)
    at_1, tempered = gradients(responses, "tb", taper=kind)
    assert not tempered.any()
    rows = zip(weights, advantage.flatten().tolist(), responses.lengths, strict=True)
    expected = torch.cat([torch.full((length,), -weight * value) for weight, value, length in rows])
    assert torch.allclose(at_1, expected.double() * mask_R / responses.totals.rows, atol=1e-7, rtol=0)
    assert 0 < min(weights) < 0.9


@pytest.mark.parametrize(("name", "keys"), VARIANTS)
def test_log_probabilities_of_an_unknown_sampler_have_no_effect(name, keys):
    known_bK = torch.tensor([True, False, True, True] * 3).view(3, 4)
    one = replace(at_temperature(2), known_bK=known_bK)
    unknown_R = ~one.per_token(known_bK)
    other = replace(one, sampled_logprob_R=torch.where(unknown_R, -3.0, one.sampled_logprob_R))
    for found, expected in zip(gradients(one, name, **keys), gradients(other, name, **keys), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("name", "keys"), [("tb_stale", {}), ("tb", {"imitation": 1.0}), ("rloo", {"imitation": 1.0})])
def test_a_wrong_demonstration_among_right_answers_is_not_imitated(name, keys):
    responses = at_temperature(0)
    known_bK = torch.ones(3, 4, dtype=torch.bool)
    known_bK[:, 0] = False
    group = replace(
        responses, known_bK=known_bK, reward_bK=known_bK.double(), reference_bK=responses.policy_bK.detach()
    )
    advantage_bK = objective(name, **keys).terms(group, 1e-9).advantage_bK
    assert (advantage_bK[:, 0] < -0.7).all()
    assert (advantage_bK[:, 1:] > 0).all()
