"""Metrics of a batch that are defined for every objective: how far data and optimum are from the policy.

Shape suffixes: B prompts of the batch, K responses to each.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from tba.trainer.objectives.advantages import centred
from tba.trainer.objectives.balance import vargrad_log_z, vargrad_residual
from tba.trainer.objectives.policy_gradient import LARGEST_LOG_RATIO

_LARGEST_KL_LOG_RATIO = math.log(10.0)


@torch.no_grad()
def balance_metrics(policy_BK: Tensor, reference_BK: Tensor, reward_BK: Tensor, beta: float) -> dict[str, float]:
    """Return how far the policy is from the optimum of KL-regularised RL, or {} without a reference.

    `kl` estimates KL(policy || reference), on fresh data only. The mean residual of a prompt is zero by construction,
    so the distance from the optimum is the spread of the residuals. The advantage of Bartoldson et al. 2025, Eq. 7, is
    -beta times the residual.
    """
    if reference_BK.isnan().any():
        return {}
    spread = float(vargrad_residual(policy_BK, reference_BK, reward_BK, beta).std(correction=0))
    log_z = vargrad_log_z(policy_BK, reference_BK, reward_BK, beta)
    return {
        "log_z": float(log_z.mean()),
        "log_z_std": float(log_z.std(correction=0)),
        "residual_std": spread,
        "advantage_std": beta * spread,
        "kl": float((policy_BK - reference_BK).mean()),
    }


@torch.no_grad()
def off_policy_metrics(log_ratio: Tensor) -> dict[str, float]:
    """Return how far the data is from the policy, from log rho = log pi / mu of whole responses, or {} without any.

    `effective_sample_ratio` is (sum rho)^2 / (BK sum rho^2) (Kish 1965): 1 if every response has the same weight,
    1/(BK) if one outweighs all others. `sampler_kl` is the k3 estimate of KL(sampler || policy), the mean of
    rho - 1 - log rho with rho limited to 10, or a single response that has become likely would be all of it.
    """
    if not len(log_ratio):
        return {}
    normalised = (log_ratio - log_ratio.max()).exp()
    limited = log_ratio.clamp(max=_LARGEST_KL_LOG_RATIO)
    return {
        "log_ratio_mean": float(log_ratio.mean()),
        "log_ratio_std": float(log_ratio.std(correction=0)),
        "log_ratio_min": float(log_ratio.min()),
        "log_ratio_max": float(log_ratio.max()),
        "effective_sample_ratio": float(normalised.sum().square() / (normalised.square().sum() * len(log_ratio))),
        "sampler_kl": float((limited.exp() - 1 - limited).mean()),
    }


@torch.no_grad()
def log_ratios_by_advantage(log_ratio_BK: Tensor, measured_BK: Tensor, reward_BK: Tensor) -> dict[str, float]:
    """Return the mean of log pi / mu over responses with a reward above and below the mean of their group.

    On fresh data both are near 0. Training on stale data should raise the first; if it falls, good answers that were
    sampled are being lost. `measured_BK` is whether the log-ratio of a response says anything.
    """
    advantage_BK = centred(reward_BK)
    chosen = {"positive": measured_BK & (advantage_BK > 0), "negative": measured_BK & (advantage_BK < 0)}
    return {f"log_ratio_{sign}": float(log_ratio_BK[rows_BK].mean()) for sign, rows_BK in chosen.items()}


@torch.no_grad()
def mass_metrics(
    log_ratio_BK: Tensor, sampled_BK: Tensor, measured_BK: Tensor, responses: Sequence[bytes]
) -> dict[str, float]:
    """Return the probability of all sampled responses of a prompt, as they were sampled and under the policy.

    Means over the prompts that have a response in `measured_BK`. A response that was sampled several times counts once,
    with the mean of its probabilities; `responses` are the tokens of each, B x K of them. Where few responses are
    likely, `sampled_mass` is near 1, and a `policy_mass` below it is probability of responses that were never sampled,
    which no reward corrects. Responses of a prompt may be from several policies, whose probabilities can add up to
    more: a prompt has at most 1.
    """
    samples = sampled_BK.shape[1]
    copies: dict[tuple[int, bytes], list[int]] = {}
    for index in measured_BK.flatten().nonzero()[:, 0].tolist():
        copies.setdefault((index // samples, responses[index]), []).append(index)

    def mean_mass(logprob_BK: Tensor) -> float:
        probability = logprob_BK.flatten().exp()
        mass: dict[int, float] = {}
        for (prompt, _), indices in copies.items():
            mass[prompt] = mass.get(prompt, 0.0) + float(probability[indices].mean())
        return sum(min(one, 1.0) for one in mass.values()) / len(mass)

    return {"sampled_mass": mean_mass(sampled_BK), "policy_mass": mean_mass(sampled_BK + log_ratio_BK)}


# Names and upper ends of the bins of the staleness histogram. One more bin has no upper end.
_STALENESS_BINS = (("0", 0), ("1", 1), ("2_3", 3), ("4_7", 7), ("8_15", 15), ("16_31", 31), ("32_63", 63))


def staleness_metrics(staleness_BK: Tensor) -> dict[str, float]:
    """Return mean, maximum and histogram of the staleness in optimiser steps; the fractions of the bins sum to 1."""
    metrics = {"staleness_mean": float(staleness_BK.mean()), "staleness_max": float(staleness_BK.max())}
    below = 0.0
    for name, last in _STALENESS_BINS:
        up_to = float((staleness_BK <= last).double().mean())
        metrics[f"staleness_share_{name}"] = up_to - below
        below = up_to
    return metrics | {"staleness_share_64_up": 1.0 - below}


def truncated_fraction(log_ratio: Tensor, bounds: tuple[float, float] | None) -> dict[str, float]:
    """Return the fraction of ratios pi / mu outside `bounds`, or {} for an objective without bounds."""
    if bounds is None or not log_ratio.numel():
        return {}
    ratio = log_ratio.double().clamp(max=LARGEST_LOG_RATIO).exp()
    return {"truncated_fraction": float(((ratio < bounds[0]) | (ratio > bounds[1])).double().mean())}


def mismatch_metrics(difference: Tensor) -> dict[str, float]:
    """Return how far the trainer's log-probabilities are from the engine's, or {} if no token is on-policy.

    `difference` is trainer minus engine, of tokens sampled from the current weights. `mismatch_kl` is the k3 estimate
    of KL(engine || trainer) per token.
    """
    if not len(difference):
        return {}
    k3 = difference.double().clamp(max=LARGEST_LOG_RATIO).exp() - 1 - difference.double()
    return {
        "mismatch_mean": float(difference.abs().mean()),
        "mismatch_max": float(difference.abs().max()),
        "mismatch_kl": float(k3.mean()),
    }


def reward_part_metrics(
    parts: Sequence[dict[str, float]], turn_rewards: Sequence[Sequence[float]] = ()
) -> dict[str, float]:
    """Return the mean of each reward part, over the responses that have it.

    The parts of an episode, a row with `turn_rewards`, are sums over its turns, in which one that is not given is 0.
    """
    names = sorted({name for part in parts for name in part})
    sums = [dict.fromkeys(names, 0.0) | part if turns else part for part, turns in zip_longest(parts, turn_rewards)]
    found = {name: [part[name] for part in sums if name in part] for name in names}
    return {f"reward_part_{name}": sum(values) / len(values) for name, values in found.items()}
