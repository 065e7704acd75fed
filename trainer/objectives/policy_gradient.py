"""Objectives that are an advantage times a log-probability or a ratio; of pairs; distillation; and the likelihood.

pi is the policy being trained, mu the one that sampled, both at the temperature of sampling: rho = pi / mu is 1 on
fresh data, up to the rounding of the engine, and what grows is the expected reward of pi at that temperature. Only
`truncated_importance`, which is Trajectory Balance on tokens, has log pi at temperature 1 next to its weights. A is an
advantage without gradient (advantages.py), T_ij the counted tokens of a response, T their sum over the whole batch.
With a `kl` other than "none" every reward is first regularised as in Bartoldson et al. 2025, Eq. 7.

Shape suffixes: b prompts of a micro-batch, K responses to each, R response tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tba.trainer.objectives.advantages import level
from tba.trainer.objectives.responses import Responses, Terms

# A ratio beyond e^20 is a numerical error. It is clamped, without gradient, so that 0 x inf cannot occur.
LARGEST_LOG_RATIO = 20.0


def reinforce(responses: Responses, advantage_bK: Tensor) -> Tensor:
    """Return the REINFORCE loss (Williams 1992) on whole responses.

        loss = -1/(BK) sum_ij A_ij log pi_ij

    With the reward itself as A it is the textbook estimator, with `leave_one_out` it is RLOO (Kool et al. 2019;
    Ahmadian et al. 2024, Eq. 6), and with `centred` of a regularised reward it has the gradient of Trajectory Balance.
    There is no correction for stale data.
    """
    return -(advantage_bK * responses.at_sampling_bK).sum() / responses.totals.rows


def truncated_importance(responses: Responses, advantage_bK: Tensor, *, cap: float | None) -> Tensor:
    """Return the loss of TBA', Bartoldson et al. 2025, Eq. 7 on tokens, with truncated importance weights.

        loss = -1/(BK) sum_ij A_ij sum_t w_ijt log pi_ijt,    w_ijt = sg[ min(rho_ijt, cap) ], or 1 if `cap` is None

    As in the authors' code (tba-prime), the mean KL in A is that of the sampler (`level_of_sampler`), unless
    `mean_kl` says otherwise; with that of the policy and without weights the gradient is that of `trajectory_balance`.
    The authors differentiate through the clamp, so tokens over the cap have no gradient, and divide by the tokens of a
    micro-batch. Here the weight is detached, and nothing depends on micro-batches.
    """
    weight_R = torch.ones_like(responses.logprob_R) if cap is None else _ratio(responses).detach().clamp(max=cap)
    weighted_bK = responses.per_row(weight_R * responses.logprob_R)
    return -(advantage_bK * weighted_bK).sum() / responses.totals.rows


def grpo(responses: Responses, advantage_bK: Tensor, *, low: float, high: float) -> Tensor:
    """Return the GRPO loss (Shao et al. 2024, Eq. 3): the mean over responses of the mean over tokens.

        loss = -1/(BK) sum_ij 1/T_ij sum_t min( rho_ijt A_ij, clip(rho_ijt, 1 - low, 1 + high) A_ij )

    A is `standardised`. An empty response counts as a response of loss 0.
    """
    mean_bK = responses.per_row(_clipped(responses, advantage_bK, low, high)) / responses.tokens_bK.clamp(min=1)
    return -mean_bK.sum() / responses.totals.rows


def dr_grpo(responses: Responses, advantage_bK: Tensor, *, low: float, high: float, length: int) -> Tensor:
    """Return the Dr. GRPO loss (Liu et al. 2025): GRPO without the two divisions that favour lengths and prompts.

        loss = -1/(BK L) sum_ijt min( rho_ijt A_ij, clip(rho_ijt, 1 - low, 1 + high) A_ij )

    A is `centred`, L = `length` the most tokens that a response may have, a constant.
    """
    surrogate_bK = responses.per_row(_clipped(responses, advantage_bK, low, high))
    return -surrogate_bK.sum() / (responses.totals.rows * length)


def ppo_clip(responses: Responses, advantage_bK: Tensor, *, low: float, high: float) -> Tensor:
    """Return PPO's clipped surrogate loss (Schulman et al. 2017, Eq. 7) on tokens.

        loss = -1/T sum_ijt min( rho_ijt A_ij, clip(rho_ijt, 1 - low, 1 + high) A_ij )

    A is `leave_one_out`: the group replaces a value function, which `ppo` has.
    """
    surrogate_bK = responses.per_row(_clipped(responses, advantage_bK, low, high))
    return -surrogate_bK.sum() / max(responses.totals.tokens, 1)


def ppo(responses: Responses, return_bK: Tensor, *, low: float, high: float) -> Terms:
    """Return the PPO loss (Schulman et al. 2017, Eq. 9) with a critic, gamma and lambda 1 and no entropy bonus.

        loss  = -1/T sum_ijt [ min( rho_ijt A_ijt, clip(rho_ijt, 1 - low, 1 + high) A_ijt ) - 1/2 (V_ijt - r_ij)^2 ]
        A_ijt = r_ij - sg V_ijt

    r is the reward minus the KL term, which a response gets at its end. V, a linear head on the last hidden state
    before each token, learns the mean of r; the hidden states are detached, so the critic does not train the model. The
    advantage of a response is the mean over its tokens by their weights. Raises ValueError without values.
    """
    if responses.value_R is None:
        raise ValueError("ppo needs a learned value of each token")
    total, return_R = max(responses.totals.tokens, 1), responses.per_token(return_bK)
    advantage_R = torch.where(responses.usable_R, return_R - responses.value_R.detach(), 0.0)
    surrogate_bK = responses.per_row(_least(responses, advantage_R, low, high))
    squares_bK = responses.per_row((responses.value_R - return_R).square())
    weight_R = ratio_weight(responses.log_ratio_R.detach(), advantage_R, (1 - low, 1 + high), clips=True)
    weight_bK = responses.per_row(torch.where(responses.usable_R, weight_R, 0.0))
    advantage_bK = responses.per_row(weight_R * advantage_R) / torch.where(weight_bK > 0, weight_bK, 1.0)
    loss = (squares_bK / 2 - surrogate_bK).sum() / total
    return Terms(loss, advantage_bK, weight_bK / responses.tokens_bK.clamp(min=1))


def proximal_rloo(responses: Responses, advantage_bK: Tensor, *, low: float, high: float) -> Tensor:
    """Return the Proximal RLOO loss (Noukhovitch et al. 2024; Bartoldson et al. 2025, Eq. 6), one ratio per response.

        loss = -1/(BK) sum_ij min( rho_ij A_ij, clip(rho_ij, 1 - low, 1 + high) A_ij )

    A is `leave_one_out`. TRL calls this loss RLOO.
    """
    ratio_bK = responses.log_ratio_bK.clamp(max=LARGEST_LOG_RATIO).exp()
    surrogate_bK = torch.minimum(ratio_bK * advantage_bK, ratio_bK.clamp(1 - low, 1 + high) * advantage_bK)
    return -surrogate_bK.sum() / responses.totals.rows


def cispo(responses: Responses, advantage_bK: Tensor, *, cap: float) -> Tensor:
    """Return the CISPO loss (MiniMax-M1, 2025, Eq. 4).

        loss = -1/T sum_ijt sg[ min(rho_ijt, cap) ] A_ij log pi_ijt

    The weight is detached, so unlike in PPO every token keeps its gradient. A is `standardised`.
    """
    weight_R = _ratio(responses).detach().clamp(max=cap)
    surrogate_bK = advantage_bK * responses.per_row(weight_R * responses.at_sampling_R)
    return -surrogate_bK.sum() / max(responses.totals.tokens, 1)


def distillation(responses: Responses, _beta: float, *, cap: float | None) -> Terms:
    """Return the loss of on-policy distillation: the reverse KL to a teacher, the reference, token by token.

        A_ijt = sg[ log ref_ijt - log pi_ijt ]
        loss  = -1/T sum_ijt w_ijt A_ijt log pi_ijt,    w_ijt = sg[ min(rho_ijt, cap) ], or 1 if `cap` is None

    Each token has an advantage of its own, and rewards have no part. With the weights, the expected gradient is that of
    the mean over tokens of KL(pi(.|h) || ref(.|h)), for histories h as they were sampled (Agarwal et al. 2024, arXiv
    2306.13649, with the reverse KL on the policy's own responses; Lu 2025, "On-Policy Distillation"). At the teacher
    every A is 0, so the gradient has no noise there. What a token does to the KL of later ones is left out; Trajectory
    Balance with the teacher as its reference includes it.

    The advantage of a response is the weighted mean over its tokens. Raises ValueError without `reference_R`.
    """
    if responses.reference_R is None:
        raise ValueError("distill needs the teacher's log-probabilities of tokens")
    advantage_R = (responses.reference_R.double() - responses.logprob_R).detach()
    weight_R = torch.ones_like(advantage_R) if cap is None else _ratio(responses).detach().clamp(max=cap)
    loss = -responses.per_row(weight_R * advantage_R * responses.logprob_R).sum() / max(responses.totals.tokens, 1)
    weight_bK, total_bK = responses.per_row(weight_R), responses.per_row(weight_R * advantage_R)
    mean_bK = torch.where(weight_bK > 0, total_bK / weight_bK.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return Terms(loss, mean_bK, weight_bK / responses.tokens_bK.clamp(min=1))


def online_dpo(responses: Responses, beta: float) -> Terms:
    """Return the online DPO loss (Guo et al. 2024; Rafailov et al. 2023, Eq. 7) on the best and worst of each group.

        loss = -1/B sum_i log sigmoid( beta [ (log pi - log ref)(best_i) - (log pi - log ref)(worst_i) ] )

    A group whose rewards are all equal has no pair and adds nothing; among equal rewards the first response is
    chosen. Responses between best and worst are not used. With K = 2 the loss is that of TRL.

    The advantage of the best is beta sigmoid(-beta [...]), that of the worst its negative; the others have weight 0.
    """
    log_ratio_bK = responses.policy_bK - responses.reference_bK
    reward_bK = level(responses.reward_bK)
    best_b, worst_b = reward_bK.argmax(dim=1), reward_bK.argmin(dim=1)
    margin_b = _at(log_ratio_bK, best_b) - _at(log_ratio_bK, worst_b)
    ranked_b = _at(reward_bK, best_b) > _at(reward_bK, worst_b)
    loss_b = torch.where(ranked_b, -logsigmoid(beta * margin_b), 0.0)
    loss = loss_b.sum() / responses.totals.prompts
    pull_b1 = (beta * torch.sigmoid(-beta * margin_b.detach()))[:, None]
    unused_bK, ranked_b1 = torch.zeros_like(reward_bK), ranked_b[:, None]
    advantage_bK = unused_bK.scatter(1, worst_b[:, None], -pull_b1).scatter(1, best_b[:, None], pull_b1)
    weight_bK = unused_bK.scatter(1, worst_b[:, None], 1.0).scatter(1, best_b[:, None], 1.0)
    return Terms(loss, torch.where(ranked_b1, advantage_bK, 0.0), torch.where(ranked_b1, weight_bK, 0.0))


def negative_log_likelihood(responses: Responses, _beta: float) -> Terms:
    """Return the mean negative log-likelihood of the counted tokens, in nats per token.

        loss = -1/T sum_ijt log pi_ijt,    T counted tokens of the whole batch

    Every token has the same weight, so a long response weighs more than a short one.
    """
    loss = -responses.policy_bK.sum() / max(responses.totals.tokens, 1)
    one_bK = torch.ones_like(responses.reward_bK)
    return Terms(loss, one_bK, one_bK)


def ratio_weight(log_ratio: Tensor, advantage: Tensor, bounds: tuple[float, float], *, clips: bool) -> Tensor:
    """Return the factor of advantage x grad log pi for a ratio that is truncated or clipped, of tokens or responses.

    With `clips` it is rho, or 0 where the clipped losses have no gradient: beyond the bound to which the advantage
    pushes rho, and beyond e^20. Otherwise it is rho limited to `bounds`.
    """
    low, high = bounds
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    if not clips:
        return ratio.clamp(low, high)
    has_gradient = torch.where(advantage < 0, ratio >= low, ratio <= high) & (log_ratio <= LARGEST_LOG_RATIO)
    return torch.where(has_gradient, ratio, 0.0)


def _clipped(responses: Responses, advantage_bK: Tensor, low: float, high: float) -> Tensor:
    """Return min(rho A, clip(rho) A) of each token: [R]."""
    return _least(responses, responses.per_token(advantage_bK), low, high)


def _least(responses: Responses, advantage_R: Tensor, low: float, high: float) -> Tensor:
    ratio_R = _ratio(responses)
    return torch.minimum(ratio_R * advantage_R, ratio_R.clamp(1 - low, 1 + high) * advantage_R)


def _ratio(responses: Responses) -> Tensor:
    """Return pi / mu of each token: [R] in float64, 1 where a token does not count or the sampler is unknown."""
    return responses.log_ratio_R.clamp(max=LARGEST_LOG_RATIO).exp()


def _at(value_bK: Tensor, index_b: Tensor) -> Tensor:
    return value_bK.gather(1, index_b[:, None])[:, 0]
