"""Every objective against hand-computed cases, finite differences, another implementation, and the exact optimum."""

import math
import typing
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tba.common.config import Config, ObjectiveSection
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.trainer import LONGEST_RESPONSE, objective
from tba.trainer.objectives import advantages
from tba.trainer.objectives.advantages import centred, level
from tba.trainer.objectives.responses import Responses, Totals
from tba.trainer.step.step_metrics import (
    balance_metrics,
    off_policy_metrics,
    reward_part_metrics,
    staleness_metrics,
    truncated_fraction,
)

BETA = 0.3
NAMES = sorted(typing.get_args(ObjectiveSection.model_fields["name"].annotation))


def case(seed: int = 0, prompts: int = 3, samples: int = 4, drift: float = 0.3) -> Responses:
    """Return responses of 1 to 6 tokens, some masked, sampled by a policy at a distance of `drift`.

    The head has values, of prompts and of tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = prompts * samples
    lengths = torch.randint(1, 7, (rows,), generator=generator).tolist()
    tokens = sum(lengths)
    logprob_R = -2 * torch.rand(tokens, generator=generator, dtype=torch.float64) - 0.1
    mask_R = torch.rand(tokens, generator=generator) < 0.8
    shape = (prompts, samples)
    responses = Responses(
        logprob_R=logprob_R.requires_grad_(),
        sampled_logprob_R=logprob_R.detach() + drift * torch.randn(tokens, generator=generator, dtype=torch.float64),
        mask_R=mask_R,
        lengths=lengths,
        reward_bK=torch.rand(shape, generator=generator, dtype=torch.float64),
        reference_bK=-8 * torch.rand(shape, generator=generator, dtype=torch.float64),
        staleness_bK=torch.randint(0, 9, shape, generator=generator).double(),
        totals=Totals(prompts, rows, int(mask_R.sum())),
        log_z_bK=torch.randn(prompts, 1, generator=generator, dtype=torch.float64).requires_grad_(),
        value_R=torch.where(mask_R, torch.randn(tokens, generator=generator, dtype=torch.float64), 0).requires_grad_(),
    )
    share_R = torch.rand(tokens, generator=generator, dtype=torch.float64)
    # Rows without a counted token have a sum of 0.
    share_R = share_R / responses.per_token(responses.per_row(share_R)).clamp(min=0.1)
    return replace(responses, reference_R=share_R * responses.per_token(responses.reference_bK))


def loss_and_gradient(name: str, responses: Responses, **keys) -> tuple[float, torch.Tensor]:
    loss = objective(name, **keys).loss(responses, BETA)
    return loss.item(), torch.autograd.grad(loss, responses.logprob_R)[0]


def padded(value_R: torch.Tensor, responses: Responses) -> torch.Tensor:
    """Pad to [N, T] with zeros. The objectives use no such layout."""
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(value_R, responses.lengths)), batch_first=True)


def group_advantages(reward: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute advantages with loops over the groups and their members."""
    result = torch.zeros_like(reward)
    for i, group in enumerate(reward.tolist()):
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        for j, r in enumerate(group):
            others = (sum(group) - r) / (len(group) - 1)
            result[i, j] = {"none": r, "mean": r - mean, "std": (r - mean) / (std + 1e-4), "loo": r - others}[kind]
    return result


def raised(reward: torch.Tensor, weight: float, floor: float | None) -> torch.Tensor:
    """Compute what imitation adds, with loops. `floor` None stands for that of the group."""
    result = torch.zeros_like(reward)
    for i, group in enumerate(reward.tolist()):
        for j in range(len(group)):
            others = group[:j] + group[j + 1 :]
            mean, least, largest = sum(others) / len(others), min(others), max(others)
            if floor is not None:
                result[i, j] = weight * (mean - floor)
            elif least < largest:
                solved = [one for one in others if largest - one <= (largest - least) / 20]
                result[i, j] = weight * (mean - least) * (len(solved) / len(others)) ** 3
            else:
                result[i, j] = weight * max(mean, 0)
    return result


def independent(name: str, responses: Responses, *, stale: bool = False) -> torch.Tensor:  # noqa: PLR0911
    """Compute the loss from the formulas of the papers, in the padded layout and with other operations."""
    mask = padded(responses.mask_R.double(), responses)
    new, old = padded(responses.logprob_R, responses), padded(responses.sampled_logprob_R, responses)
    rows, samples = mask.shape[0], responses.reward_bK.shape[1]
    policy, sampled = (new * mask).sum(1), (old * mask).sum(1)
    reward, reference = responses.reward_bK, responses.reference_bK.flatten()
    kind = {"reinforce": "none", "rloo": "loo", "ppo_clip": "loo", "proximal_rloo": "loo",
            "grpo": "std", "cispo": "std", "dr_grpo": "mean"}.get(name, "mean")  # fmt: skip
    a = group_advantages(reward, kind).flatten()[:, None]
    ratio = torch.exp(new - old)
    clipped = torch.where(ratio * a < ratio.clip(0.8, 1.2) * a, ratio * a, ratio.clip(0.8, 1.2) * a)
    if name in ("reinforce", "rloo"):
        return -(a[:, 0] * policy).mean()
    if name in ("tba_prime", "tb_stale"):
        kl = (policy - reference).detach().view_as(reward)
        level = (sampled - policy).detach().view_as(reward).mean(1, keepdim=True)
        a = group_advantages(reward - BETA * kl, "mean") + BETA * level
        a = (a + raised(reward, 1.0 if name == "tb_stale" else 0.0, None)).flatten()[:, None]
        return -(a * torch.minimum(ratio, torch.tensor(8.0)).detach() * new * mask).sum() / rows
    if name == "grpo":
        return -((clipped * mask).sum(1) / mask.sum(1).clip(1)).mean()
    if name == "dr_grpo":
        return -(clipped * mask).sum() / rows / LONGEST_RESPONSE
    if name == "ppo_clip":
        return -(clipped * mask).sum() / mask.sum()
    if name == "cispo":
        return -(a * torch.minimum(ratio, torch.tensor(5.0)).detach() * new * mask).sum() / mask.sum()
    if name == "proximal_rloo":
        whole = torch.exp(policy - sampled)
        return -torch.minimum(whole * a[:, 0], whole.clip(0.8, 1.2) * a[:, 0]).mean()
    if name == "online_dpo":
        score = (policy - reference).view_as(reward)
        pairs = [(row[r.argmax()] - row[r.argmin()]) for row, r in zip(score, reward, strict=True)]
        return torch.stack([torch.log1p(torch.exp(-BETA * pair)) for pair in pairs]).mean()
    if name == "oapl":
        value = torch.log(torch.exp(reward).mean(1)).repeat_interleave(samples)
        return ((BETA * (policy - sampled) - (reward.flatten() - value)) ** 2).mean() / (2 * BETA)
    if name in ("tb_learned_z", "flowrl", "ppo", "distill"):
        return of_learned_or_token(name, responses)
    assert name in ("tb", "tb_prefix"), f"no independent formula of {name}"
    log_z = (reference - policy.detach() + reward.flatten() / BETA).view_as(reward).mean(1).repeat_interleave(samples)
    residual = log_z + policy - reference - reward.flatten() / BETA
    if not stale:
        return BETA / 2 * (residual**2 + (prefix_squares(responses) if name == "tb_prefix" else 0)).mean()
    added = raised(reward, 0.5, -1.0).flatten()
    weight = torch.where(BETA * residual > added, torch.exp(policy - sampled).clip(max=1), 1.0).detach()
    return (weight * (BETA / 2 * residual**2 - added * policy)).mean()


def of_learned_or_token(name: str, responses: Responses) -> torch.Tensor:
    """Compute the loss of an objective with a learned log Z or values, or with the reference of each token."""
    mask, reward, samples = (
        padded(responses.mask_R.double(), responses),
        responses.reward_bK,
        responses.reward_bK.shape[1],
    )
    log_ratio = padded(responses.logprob_R - responses.sampled_logprob_R, responses) * mask
    if name == "ppo":
        a, ratio = reward.flatten()[:, None] - padded(not_none(responses.value_R), responses), log_ratio.exp()
        least = torch.minimum(ratio * a.detach(), ratio.clip(0.8, 1.2) * a.detach())
        return ((a**2 / 2 - least) * mask).sum() / mask.sum()
    if name == "distill":
        gap_R = responses.logprob_R - not_none(responses.reference_R)
        gap = padded(torch.where(responses.mask_R, gap_R, 0), responses)
        weight = torch.minimum(log_ratio.exp(), torch.tensor(8.0))
        return (weight * gap).detach().mul(padded(responses.logprob_R, responses) * mask).sum() / mask.sum()
    log_z = not_none(responses.log_z_bK).flatten().repeat_interleave(samples)
    kl = (padded(responses.logprob_R, responses) * mask).sum(1) - responses.reference_bK.flatten()
    if name == "tb_learned_z":
        return BETA / 2 * ((log_z + kl - reward.flatten() / BETA) ** 2).mean()
    a, weight = group_advantages(reward, "std").flatten(), log_ratio.sum(1).exp().clip(0.8, 1.2).detach()
    return BETA / 2 * (weight * (log_z + kl / mask.sum(1).clip(1) - a / BETA) ** 2).mean()


def prefix_squares(responses: Responses) -> torch.Tensor:
    """Compute what the prefixes of each response add to tb_prefix, with loops over rows and tokens: [N]."""
    parts = [responses.mask_R, responses.logprob_R, not_none(responses.reference_R), not_none(responses.value_R)]
    rows, result = zip(*(torch.split(one, responses.lengths) for one in parts), strict=True), []
    for (counts, policy, reference, value), reward in zip(rows, responses.reward_bK.flatten(), strict=True):
        ratios, log_z = (policy - reference)[counts], value[counts] / BETA
        total = policy.new_zeros(())
        for t in range(len(ratios)):
            total = total + (log_z[0] + ratios[:t].sum() - log_z[t]) ** 2 / len(ratios)
            total = total + (log_z[t] + ratios[t:].sum() - reward / BETA) ** 2 / len(ratios)
        result.append(total)
    return torch.stack(result)


STALE: dict[str, Any] = {"imitation": 0.5, "reward_floor": -1.0, "taper": "response"}


def gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize(("name", "keys"), [*((name, {}) for name in NAMES), ("tb", STALE)])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_an_independent_implementation(name, keys, seed):
    responses = case(seed)
    loss, gradient = loss_and_gradient(name, responses, **keys)
    expected = independent(name, responses, stale=bool(keys))
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    leaves = [responses.logprob_R, not_none(responses.log_z_bK), not_none(responses.value_R)]
    differentiable = objective(name, **keys).loss(responses, BETA)
    for found, same in zip(gradients(differentiable, leaves), gradients(expected, leaves), strict=True):
        assert torch.allclose(found, same, atol=1e-13, rtol=1e-11)
    assert gradient.abs().max() > 1e-4


ROUNDED = [0.7 + 0.2 + 0.1, 1.0, 0.3, 0.1 + 0.2]


@pytest.mark.parametrize("name", NAMES)
def test_rewards_that_differ_by_rounding_are_equal(name):
    responses = case(prompts=1)
    exact, rounded = (
        loss_and_gradient(name, replace(responses, reward_bK=torch.tensor([reward], dtype=torch.float64)))[1]
        for reward in ([1.0, 1.0, 0.3, 0.3], ROUNDED)
    )
    assert torch.allclose(rounded, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rewards", [[0.3, 0.1 + 0.2, 0.3], [0.1] * 7, [0.1 + 0.2 - 0.3, 0.0], [1e9 + 1e-7, 1e9]])
def test_a_group_of_equal_rewards_has_no_advantage(rewards):
    assert torch.equal(centred(torch.tensor([rewards], dtype=torch.float64)), torch.zeros(1, len(rewards)).double())


@pytest.mark.parametrize(
    "rewards",
    [[math.inf, 1.0, 0.0], [math.nan, 1.0, 0.0], [0.3, 0.3 + 1e-13, 0.0], [1e-9, 2e-9, 0.0], [1e9, 1e9 + 1e-3, 0.0]],
)
def test_rewards_that_are_not_finite_or_differ_by_more_than_rounding_stay_as_they_are(rewards):
    reward_bK = torch.tensor([rewards], dtype=torch.float64)
    assert torch.equal(level(reward_bK).nan_to_num(7.0), reward_bK.nan_to_num(7.0))


def by_hand(lengths: list[int], logprobs: Any, sampled: Any, rewards: Any, **fields: Any) -> Responses:
    """Return one group of responses of these lengths, by default with counted tokens alone and reference 0."""
    if not isinstance(logprobs, torch.Tensor):
        logprobs = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    rows, mask_R = len(rewards), fields.get("mask_R", torch.ones(len(logprobs), dtype=torch.bool))
    values = {
        "logprob_R": logprobs,
        "sampled_logprob_R": torch.as_tensor(sampled, dtype=torch.float64),
        "mask_R": mask_R,
        "lengths": lengths,
        "reward_bK": torch.as_tensor(rewards, dtype=torch.float64)[None],
        "reference_bK": torch.zeros(1, rows, dtype=torch.float64),
        "staleness_bK": torch.ones(1, rows, dtype=torch.float64),
        "totals": Totals(1, rows, int(mask_R.sum())),
    }
    return Responses(**{**values, **fields})


# Two responses, of one and of two tokens. The ratios pi / mu are 2 for the first, 1/2 and 1 for the second; rewards 1
# and 0, so the advantages are 1/2 and -1/2 centred, 1 and -1 leave-one-out, and +-(1/2) / (sqrt(1/2) + 1e-4) = +-A
# standardised.
HALF = math.log(0.5)
A = 0.5 / (math.sqrt(0.5) + 1e-4)


@pytest.mark.parametrize("name", ["grpo", "cispo"])
def test_the_kl_term_of_a_standardised_advantage_is_proportional_to_beta(name):
    """Where all rewards are equal the KL term is all there is, and dividing it by its own deviation cancels beta."""
    equal = replace(case(), reward_bK=torch.ones_like(case().reward_bK))
    chosen = objective(name, kl="reference")
    logprobs = equal.logprob_R
    small, large = (torch.autograd.grad(chosen.loss(equal, beta), logprobs)[0] for beta in (0.01, 0.1))
    assert small.abs().max() > 0
    assert torch.allclose(10 * small, large, atol=1e-12)


def test_oapl_is_zero_at_its_optimum():
    value = BETA * math.log((math.exp(1 / BETA) + 1) / 2)
    optimum = [2 * HALF + (1 - value) / BETA, HALF, HALF - value / BETA]
    responses = by_hand([1, 2], optimum, [2 * HALF, HALF, HALF], [1.0, 0.0])
    loss, gradient = loss_and_gradient("oapl", responses, value_beta="beta")
    assert loss < 1e-28
    assert gradient.abs().max() < 1e-13
    off = by_hand([1, 2], [optimum[0] + 1.0, *optimum[1:]], [2 * HALF, HALF, HALF], [1.0, 0.0])
    assert objective("oapl", value_beta="beta").loss(off, BETA).item() == pytest.approx(BETA / 4, rel=1e-12)


def test_without_importance_weights_and_imitation_the_gradient_is_that_of_trajectory_balance():
    responses = case(1)
    expected = loss_and_gradient("tb", responses)[1]
    plain: dict[str, Any] = {"truncation": "off", "mean_kl": "policy"}
    for name, keys in (("tba_prime", plain), ("tb_stale", plain | {"imitation": 0.0})):
        assert torch.allclose(loss_and_gradient(name, responses, **keys)[1], expected, atol=1e-13)
    for keys in ({"truncation": "off"}, {"mean_kl": "policy"}):
        assert not torch.allclose(loss_and_gradient("tba_prime", responses, **keys)[1], expected, atol=1e-3)


def test_on_fresh_data_clipping_and_importance_weights_change_no_gradient():
    responses = case(2, drift=0.0)
    tb = loss_and_gradient("tb", responses)[1]
    assert torch.allclose(loss_and_gradient("tba_prime", responses)[1], tb, atol=1e-13)
    rloo = loss_and_gradient("rloo", responses)[1]
    assert torch.allclose(loss_and_gradient("proximal_rloo", responses)[1], rloo, atol=1e-13)
    clipped, weighted = (loss_and_gradient(name, responses)[1] for name in ("ppo_clip", "cispo"))
    assert clipped.abs().max() > 1e-3
    assert weighted.abs().max() > 1e-3


def test_tokens_over_the_cap_keep_a_gradient_in_cispo_and_lose_it_in_ppo():
    responses = by_hand([1, 1], [0.0, -1.0], [-3.0, -1.0], [1.0, 0.0])
    assert loss_and_gradient("ppo_clip", responses)[1][0] == 0
    assert loss_and_gradient("cispo", responses)[1][0].item() == pytest.approx(-5.0 * A / 2, rel=1e-12)


def test_the_kl_to_a_moving_average_follows_from_the_staleness():
    # Decay 0.9 is 9 steps behind: a log-ratio of 0.2 to the weights of 4 steps ago means 0.45 to the average.
    responses = by_hand([2], [-1.0, -1.0], [-1.1, -1.1], [1.0], staleness_bK=torch.tensor([[4.0]]))
    assert advantages.ema_log_ratio(responses, 0.9).item() == pytest.approx(0.2 * 9 / 4, rel=1e-12)
    broken = by_hand([1], [-1.0], [-50.0], [1.0], staleness_bK=torch.tensor([[1.0]]))
    assert advantages.ema_log_ratio(broken, 0.5).item() == 10.0
    explored = by_hand([1], [-1.0], [-3.0], [1.0], staleness_bK=torch.tensor([[torch.inf]]))
    assert advantages.ema_log_ratio(explored, 0.9).item() == 0.0


def test_the_ema_estimate_is_exact_for_weights_that_drift_at_a_constant_rate():
    # The assumption of the derivation: log-probabilities linear in weights that drift at a constant rate.
    decay, steps, staleness = 0.8, 400, 3
    weights = [0.01 * n for n in range(steps)]
    average = weights[0]
    for weight in weights[1:]:
        average = decay * average + (1 - decay) * weight
    now, then = weights[-1], weights[-1 - staleness]
    responses = by_hand([1], [-now], [-then], [1.0], staleness_bK=torch.tensor([[float(staleness)]]))
    assert advantages.ema_log_ratio(responses, decay).item() == pytest.approx(-now + average, rel=1e-9)


@pytest.mark.parametrize("kl", ["reference", "ema"])
def test_a_kl_in_the_reward_changes_the_gradient(kl):
    responses = case()
    free, held = (loss_and_gradient("reinforce", responses, kl=choice)[1] for choice in ("none", kl))
    assert not torch.allclose(free, held, atol=1e-3)
    assert objective("grpo", kl=kl).needs_reference is (kl == "reference")


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_needed_where_the_loss_depends_on_it(name):
    responses = case()
    nan_R = torch.full_like(not_none(responses.reference_R), math.nan)
    unknown = replace(responses, reference_bK=torch.full_like(responses.reference_bK, math.nan), reference_R=nan_R)
    loss, _ = loss_and_gradient(name, unknown)
    assert math.isnan(loss) is objective(name).needs_reference


GRPO, RESET, TEACHER = {"name": "grpo"}, {"kind": "reset"}, {"path": "t"}
GREEDY_TOO = {"temperature": [0.0, 1.0]}
NO_RATIOS = "ratios of the policy to its sampler"
STALE_WITHOUT: dict[str, Any] = {"name": "tb_stale", "truncation": "off", "kl": "none"}
# Sections of [objective], [reference] and [search], and why they are refused; they are accepted where it is empty.
SETTINGS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"name": "oapl", "kl": "ema"}, {}, {}, r"objective\.kl has no effect for oapl"),
    ({"name": "grpo", "imitation": 0.5}, {}, {}, "imitation has no meaning for grpo"),
    ({"name": "oapl", "imitation": 0.5}, {}, {}, "imitation has no meaning for oapl"),
    ({"name": "ppo_clip", "taper": "mean"}, {}, {}, "taper has no meaning for ppo_clip"),
    ({"name": "tba_prime", "taper": "response"}, {}, {}, 'set objective.truncation = "off"'),
    ({"name": "tb", "imitation": 1.5}, {}, {}, "less than or equal to 1"),
    *(({"log_z": "turn", **keys}, {}, {}, r'set objective\.name = "tb"')
      for keys in ({"name": "tba_prime"}, {"name": "tb_learned_z"}, {"imitation": 0.5}, {"taper": "mean"})),
    # References and teachers.
    ({"name": "distill"}, {}, {}, "needs a teacher: set reference.path"),
    (GRPO, TEACHER, {}, "reference.path has no effect"),
    ({}, TEACHER | {"kind": "ema"}, {}, 'reference.path is frozen, and reference.kind = "ema"'),
    ({"name": "distill", "kl": "none"}, TEACHER, {}, "kl has no effect for distill"),
    ({"name": "distill", "imitation": 1}, TEACHER, {}, "imitation has no meaning"),
    ({"name": "distill"}, TEACHER, {"temperature": 0}, "needs ratios"),
    (GRPO, RESET, {}, 'reference.kind = "reset" .*"grpo" with objective.kl = "auto" uses no reference'),
    ({"name": "tb_stale", "kl": "none"}, RESET, {}, 'reference.kind = "reset" .*"tb_stale" with objective.kl = "none"'),
    ({"name": "tb_stale", "kl": "ema"}, RESET, {}, 'reference.kind = "reset" .*"tb_stale" with objective.kl = "ema"'),
    ({"name": "tba_prime", "kl": "none"}, {"kind": "ema"}, {}, 'reference.kind = "ema" .*"tba_prime" .* = "none"'),
    ({"name": "rloo", "kl": "none"}, TEACHER, {}, 'reference.path .*"rloo" with objective.kl = "none"'),
    ({"name": "reinforce"}, TEACHER, {}, 'reference.path .*"reinforce" with objective.kl = "auto"'),
    ({"name": "grpo", "kl": "reference"}, RESET, {}, ""),
    ({"name": "tb_stale"}, RESET, {}, ""),
    ({"name": "tb"}, RESET, {}, ""),
    ({"name": "rloo", "kl": "reference"}, TEACHER, {}, ""),
    # Sampling after which some responses, or all, have no ratio.
    (GRPO, {}, GREEDY_TOO, NO_RATIOS),
    ({"name": "tb_stale"}, {}, GREEDY_TOO, NO_RATIOS),
    ({"name": "rloo", "kl": "ema"}, {}, GREEDY_TOO, NO_RATIOS),
    ({"name": "oapl"}, {}, GREEDY_TOO, NO_RATIOS),
    ({"name": "tb"}, {}, GREEDY_TOO, ""),
    ({"name": "rloo"}, {}, GREEDY_TOO, ""),
    ({"name": "tba_prime", "truncation": "off", "kl": "none"}, {}, GREEDY_TOO, ""),
    ({"name": "tb", "imitation": 0.5}, {}, {"temperature": 0.0}, r"set objective\.imitation = 0"),
    (STALE_WITHOUT, {}, {"temperature": 0.0}, r"set objective\.imitation = 0"),
    ({"name": "tb", "imitation": 0.0}, {}, {"temperature": 0.0}, ""),
    (STALE_WITHOUT | {"imitation": 0.0}, {}, {"temperature": 0.0}, ""),
    ({"name": "tb", "imitation": 0.5}, {}, GREEDY_TOO, ""),
    (STALE_WITHOUT, {}, GREEDY_TOO, ""),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "reference", "search", "words"), SETTINGS)
def test_settings_that_contradict_each_other_or_have_no_effect_are_refused(objective, reference, search, words):
    sections = {"objective": objective, "reference": reference, "search": search}
    with pytest.raises(ValidationError, match=words) if words else nullcontext():
        Config.model_validate(sections)


def test_losses_of_enormous_ratios_are_finite():
    responses = by_hand([1, 1], [0.0, 0.0], [-1000.0, -1000.0], [1.0, 1.0])
    for name in ("grpo", "dr_grpo", "ppo_clip", "proximal_rloo", "cispo", "tba_prime"):
        loss, gradient = loss_and_gradient(name, responses)
        assert math.isfinite(loss), name
        assert gradient.isfinite().all(), name


def test_balance_metrics_of_a_hand_computed_case_and_none_without_a_reference():
    policy, reference = torch.tensor([[-1.0, -3.0]]).double(), torch.tensor([[-2.0, -2.0]]).double()
    found = balance_metrics(policy, reference, torch.tensor([[2.0, 0.0]]).double(), 0.5)
    assert found == {"log_z": 2.0, "log_z_std": 0.0, "residual_std": 1.0, "advantage_std": 0.5, "kl": 0.0}
    assert balance_metrics(policy, reference * math.nan, policy, 0.5) == {}


def test_the_staleness_histogram_sums_to_one():
    found = staleness_metrics(torch.tensor([[0.0, 1.0, 3.0, 70.0]]).double())
    shares = {name: share for name, share in found.items() if "share" in name and share}
    assert shares == dict.fromkeys((f"staleness_share_{bin_}" for bin_ in ("0", "1", "2_3", "64_up")), 0.25)
    assert (found["staleness_mean"], found["staleness_max"]) == (18.5, 70.0)


def test_the_truncated_fraction_uses_the_bounds_of_the_objective():
    ratios = torch.tensor([0.5, 1.0, 3.0, 9.0]).log()
    expected = {"tba_prime": 0.25, "cispo": 0.25, "grpo": 0.75}
    for name, share in expected.items():
        assert truncated_fraction(ratios, objective(name).ratio_bounds) == {"truncated_fraction": share}
    assert truncated_fraction(ratios, objective("tb").ratio_bounds) == {}


def test_a_reward_part_is_averaged_over_the_responses_that_have_it_and_all_episodes():
    parts = [{"right": 1.0, "short": 0.5}, {"right": 0.0}]
    assert reward_part_metrics(parts) == {"reward_part_right": 0.5, "reward_part_short": 0.5}
    parts = [{"right": 1.0}, {}, {"right": 0.5}, {}]
    assert reward_part_metrics(parts, [[0.0, 1.0], [0.0], [], []]) == {"reward_part_right": 0.5}


def test_off_policy_metrics_of_a_hand_computed_case():
    found = off_policy_metrics(torch.tensor([math.log(2.0), 0.0]))
    assert found["effective_sample_ratio"] == pytest.approx((2 + 1) ** 2 / (2 * (4 + 1)))
    assert found["sampler_kl"] == pytest.approx((2 - 1 - math.log(2.0)) / 2)
    assert [found["log_ratio_min"], found["log_ratio_max"]] == pytest.approx([0.0, math.log(2.0)])
    # One response that became likely is not the whole KL.
    assert 0 < off_policy_metrics(torch.tensor([50.0] + 63 * [0.0]))["sampler_kl"] < 0.2
