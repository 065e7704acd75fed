"""What can be read off a batch whatever the objective: how far data and optimum are from the policy."""

import torch
from torch import Tensor

from tba.trainer.objectives.balance import vargrad_log_z, vargrad_residual
from tba.trainer.objectives.policy_gradient import LARGEST_LOG_RATIO


@torch.no_grad()
def balance_metrics(policy_BK: Tensor, reference_BK: Tensor, reward_BK: Tensor, beta: float) -> dict[str, float]:
    """How far a policy is from the optimum of KL-regularised RL. {} without a reference.

    `kl` is an estimate of KL(policy || reference) only on fresh data. The mean residual of a prompt is zero by
    construction, so its spread is what says how far the policy is from the optimum; the advantage of Eq. 7 is
    -beta times the residual.
    """
    if reference_BK.isnan().any():
        return {}
    spread = float(vargrad_residual(policy_BK, reference_BK, reward_BK, beta).std(correction=0))
    return {
        "log_z": float(vargrad_log_z(policy_BK, reference_BK, reward_BK, beta).mean()),
        "residual_std": spread,
        "advantage_std": beta * spread,
        "kl": float((policy_BK - reference_BK).mean()),
    }


@torch.no_grad()
def off_policy_metrics(policy_BK: Tensor, sampled_BK: Tensor) -> dict[str, float]:
    """How far the data is from the policy, on whole responses; rho = pi / mu.

    `effective_sample_ratio` is (sum rho)^2 / (BK sum rho^2): 1 when every response counts alike, 1/(BK) when one
    outweighs all (Kish 1965). The k3 estimate of KL(sampler || policy) is the mean of rho - 1 - log rho.
    """
    log_ratio = (policy_BK - sampled_BK).flatten().clamp(max=LARGEST_LOG_RATIO)
    normalised = (log_ratio - log_ratio.max()).exp()
    return {
        "log_ratio_mean": float(log_ratio.mean()),
        "log_ratio_min": float(log_ratio.min()),
        "log_ratio_max": float(log_ratio.max()),
        "effective_sample_ratio": float(normalised.sum().square() / (normalised.square().sum() * len(log_ratio))),
        "sampler_kl": float((log_ratio.exp() - 1 - log_ratio).mean()),
    }
