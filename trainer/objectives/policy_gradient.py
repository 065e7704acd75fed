"""Objectives that are an advantage times a log-probability or a ratio.

pi is the policy that trains, mu the one that sampled: rho = pi / mu is 1 on fresh data, up to the rounding of the
engine. A is an advantage without gradient (advantages.py), T_ij the counted tokens of a response, T their sum over
the whole batch. With a `kl` other than "none" every reward is first regularised as in Bartoldson et al. 2025, Eq. 7.
"""

import torch
from torch import Tensor

from tba.trainer.objectives.responses import Responses

# Beyond e^20 a ratio is a broken number: it is held there, without gradient, so that 0 x inf never arises.
LARGEST_LOG_RATIO = 20.0


def reinforce(responses: Responses, advantage_bK: Tensor) -> Tensor:
    """REINFORCE (Williams 1992) on whole responses: loss = -1/(BK) sum_ij A_ij log pi_ij.

    With the plain reward for A it is the textbook estimator, with `leave_one_out` it is RLOO (Kool et al. 2019;
    Ahmadian et al. 2024, Eq. 6), and with `centred` of a regularised reward it has the gradient of Trajectory Balance.
    Nothing corrects for stale data.
    """
    return -(advantage_bK * responses.policy_bK).sum() / responses.totals.rows


def truncated_importance(responses: Responses, advantage_bK: Tensor, *, cap: float | None) -> Tensor:
    """TBA' (Bartoldson et al. 2025, Eq. 7 on tokens): loss = -1/(BK) sum_ij A_ij sum_t w_ijt log pi_ijt.

    w = min(rho, cap) of each token without gradient, or 1 where `cap` is None; then it equals `reinforce` on the same
    advantage. The public code (tba-prime) clamps inside the gradient, so that a token over the cap has none, takes
    the mean KL under the weights that sampled, and divides by the tokens of a micro-batch: here the clamp is outside,
    the mean KL is the policy's own, and nothing depends on micro-batches.
    """
    weight_R = torch.ones_like(responses.logprob_R) if cap is None else _ratio(responses).detach().clamp(max=cap)
    weighted_bK = responses.per_row(weight_R * responses.logprob_R)
    return -(advantage_bK * weighted_bK).sum() / responses.totals.rows


def grpo(responses: Responses, advantage_bK: Tensor, *, low: float, high: float) -> Tensor:
    """GRPO (Shao et al. 2024, Eq. 3): the mean over responses of the mean over tokens of the clipped surrogate.

    loss = -1/(BK) sum_ij 1/T_ij sum_t min( rho_ijt A_ij, clip(rho_ijt, 1 - low, 1 + high) A_ij ), A `standardised`.
    An empty response counts as a response of loss 0.
    """
    mean_bK = responses.per_row(_clipped(responses, advantage_bK, low, high)) / responses.tokens_bK.clamp(min=1)
    return -mean_bK.sum() / responses.totals.rows


def dr_grpo(responses: Responses, advantage_bK: Tensor, *, low: float, high: float, length: int) -> Tensor:
    """Dr. GRPO (Liu et al. 2025): GRPO without the two divisions that favour some lengths and some prompts.

    loss = -1/(BK L) sum_ijt min( rho A, clip(rho, 1 - low, 1 + high) A ), A `centred`, L = `length` the longest
    response that may be sampled, a constant.
    """
    surrogate_bK = responses.per_row(_clipped(responses, advantage_bK, low, high))
    return -surrogate_bK.sum() / (responses.totals.rows * length)


def ppo_clip(responses: Responses, advantage_bK: Tensor, *, low: float, high: float) -> Tensor:
    """PPO's clipped surrogate (Schulman et al. 2017, Eq. 7) on tokens: -1/T sum_ijt min(rho A, clip(rho) A).

    A is `leave_one_out`: a group in place of a value function.
    """
    surrogate_bK = responses.per_row(_clipped(responses, advantage_bK, low, high))
    return -surrogate_bK.sum() / max(responses.totals.tokens, 1)


def proximal_rloo(responses: Responses, advantage_bK: Tensor, *, low: float, high: float) -> Tensor:
    """Proximal RLOO (Noukhovitch et al. 2024; Bartoldson et al. 2025, Eq. 6): one ratio for a whole response.

    loss = -1/(BK) sum_ij min( rho_ij A_ij, clip(rho_ij, 1 - low, 1 + high) A_ij ), A `leave_one_out`. This is also
    what TRL calls RLOO.
    """
    ratio_bK = (responses.policy_bK - responses.sampled_bK).clamp(max=LARGEST_LOG_RATIO).exp()
    surrogate_bK = torch.minimum(ratio_bK * advantage_bK, ratio_bK.clamp(1 - low, 1 + high) * advantage_bK)
    return -surrogate_bK.sum() / responses.totals.rows


def cispo(responses: Responses, advantage_bK: Tensor, *, cap: float) -> Tensor:
    """CISPO (MiniMax-M1, 2025, Eq. 4): loss = -1/T sum_ijt sg[ min(rho_ijt, cap) ] A_ij log pi_ijt.

    The clamp is outside the gradient: unlike in PPO every token keeps one. A is `standardised`.
    """
    weight_R = _ratio(responses).detach().clamp(max=cap)
    surrogate_bK = advantage_bK * responses.per_row(weight_R * responses.logprob_R)
    return -surrogate_bK.sum() / max(responses.totals.tokens, 1)


def _clipped(responses: Responses, advantage_bK: Tensor, low: float, high: float) -> Tensor:
    """[R]: min(rho A, clip(rho) A) of each token."""
    ratio_R, advantage_R = _ratio(responses), responses.per_token(advantage_bK)
    return torch.minimum(ratio_R * advantage_R, ratio_R.clamp(1 - low, 1 + high) * advantage_R)


def _ratio(responses: Responses) -> Tensor:
    """[R]: pi / mu of each token, in float64, 1 where a token does not count."""
    log_ratio_R = responses.logprob_R.double() - responses.sampled_logprob_R
    return torch.where(responses.mask_R, log_ratio_R, 0.0).clamp(max=LARGEST_LOG_RATIO).exp()
