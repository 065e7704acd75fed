"""Objectives that are squared residuals: each is zero at a known optimum, whatever policy sampled the responses."""

import math

from torch import Tensor

from tba.trainer.objectives.responses import Responses


def trajectory_balance(responses: Responses, *, beta: float) -> Tensor:
    """Trajectory Balance with the VarGrad estimate of log Z (Bartoldson et al. 2025, Eq. 4 and 5), times beta / 2.

        log Z_i = 1/K sum_j [ log ref_ij - log pi_ij + r_ij / beta ]                   (Eq. 4, detached)
        loss    = beta/2 * 1/(BK) sum_ij ( log Z_i + log pi_ij - log ref_ij - r_ij / beta )^2     (Eq. 5)

    Log-probabilities are of whole responses. The gradient is that of Eq. 7, the mean of -A_ij grad log pi_ij with
    A_ij = (r_ij - mean r_i) - beta (KL_ij - mean KL_i): beta / 2 takes away the 1/beta by which Eq. 5 would grow
    while beta is annealed, so clipping means the same all along.

    The public code differs: TBA's first release leaves out beta / 2, tba-prime takes the mean KL under the weights
    that generated and divides by tokens. Here log Z is under the policy that is being trained, over the K samples of
    one prompt, and nothing is divided by lengths.
    """
    residual_bK = vargrad_residual(responses.policy_bK, responses.reference_bK, responses.reward_bK, beta)
    return beta / 2 * residual_bK.square().sum() / responses.totals.rows


def trajectory_balance_learned_z(responses: Responses, *, beta: float) -> Tensor:
    """Trajectory Balance with log Z from a head on the prompt (Malkin et al. 2022; Lee et al. 2024), times beta / 2.

        loss = beta/2 * 1/(BK) sum_ij ( log Z(x_i) + log pi_ij - log ref_ij - r_ij / beta )^2

    `responses.log_z_b` has the gradient too: the head learns the mean that VarGrad takes from the group, so one
    response of a prompt is enough. Raises ValueError without it.
    """
    if responses.log_z_b is None:
        raise ValueError("tb_learned_z needs a learned log Z")
    target_bK = responses.reference_bK + responses.reward_bK / beta
    residual_bK = responses.log_z_b[:, None] + responses.policy_bK - target_bK
    return beta / 2 * residual_bK.square().sum() / responses.totals.rows


def optimal_advantage(responses: Responses, *, beta: float, value_beta: float) -> Tensor:
    """OAPL, regression on the optimal advantage against the lagged sampler (Ritter et al. 2026, arXiv 2602.19362).

        V_i  = value_beta * log( 1/K sum_j exp(r_ij / value_beta) )
        loss = 1/(2 beta) * 1/(BK) sum_ij ( beta (log pi_ij - log mu_ij) - (r_ij - V_i) )^2

    mu is the policy that sampled, with the sampling settings it had; there is no reference model and no importance
    weight. 1/(2 beta), which the paper lacks, makes the gradient the mean of -A_ij grad log pi_ij in reward units, as
    in `trajectory_balance`, which differs by the anchor and by taking V from the policy instead of the rewards.
    """
    soft_bK = responses.reward_bK / value_beta
    value_b1 = value_beta * (soft_bK.logsumexp(dim=1, keepdim=True) - math.log(soft_bK.shape[1]))
    residual_bK = beta * (responses.policy_bK - responses.sampled_bK) - (responses.reward_bK - value_b1)
    return residual_bK.square().sum() / (2 * beta * responses.totals.rows)


def vargrad_residual(policy_bK: Tensor, reference_bK: Tensor, reward_bK: Tensor, beta: float) -> Tensor:
    """The bracket of Eq. 5, [b, K]; its mean over each group is zero."""
    log_z_b1 = vargrad_log_z(policy_bK, reference_bK, reward_bK, beta)
    return log_z_b1 + policy_bK - reference_bK - reward_bK / beta


def vargrad_log_z(policy_bK: Tensor, reference_bK: Tensor, reward_bK: Tensor, beta: float) -> Tensor:
    """Eq. 4, [b, 1], without gradient."""
    return (reference_bK - policy_bK.detach() + reward_bK / beta).mean(dim=1, keepdim=True)
