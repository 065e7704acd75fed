"""Advantages: rewards relative to the other responses to the same prompt. Nothing here has a gradient.

Shape suffixes: b prompts of a micro-batch, K responses to each, O others of the group, R response tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from tba.common import rewards
from tba.trainer.objectives.responses import Responses

# A larger log-ratio of one token means a numerical error or another model, not a policy that has drifted.
_LARGEST_LOG_RATIO = 10.0
_STD_EPSILON = 1e-4
# Chosen by measurement (docs/decisions/0039-tb-stale-weights-tokens.md).
_SOLVED_POWER = 3
# A response this close to the best of the others, as a fraction of their range, counts as solved.
_SOLVED_WITHIN = 0.05


def level(reward_bK: Tensor) -> Tensor:
    """Make rewards of a group equal that differ by rounding alone (`tba.common.rewards`): [b, K]."""
    return torch.from_numpy(rewards.level(reward_bK.detach().cpu().numpy())).to(reward_bK)


def centred(reward_bK: Tensor) -> Tensor:
    """Return the reward minus the mean of the group: [b, K], exactly 0 where all rewards of the group are equal.

        A_ij = r_ij - 1/K sum_k r_ik

    This is GRPO's advantage without the division (Liu et al. 2025, "Dr. GRPO").
    """
    reward_bK = level(reward_bK)
    # The computed mean of equal numbers may be another one, and the sign of a rounding error would be an advantage.
    equal_b1 = (reward_bK == reward_bK[:, :1]).all(dim=1, keepdim=True)
    return torch.where(equal_b1, 0.0, reward_bK - reward_bK.mean(dim=1, keepdim=True))


def standardised(reward_bK: Tensor) -> Tensor:
    """Return the centred reward divided by the group's sample standard deviation plus 1e-4: [b, K].

        A_ij = (r_ij - mean_k r_ik) / (std_k r_ik + 1e-4)

    From GRPO (Shao et al. 2024); the epsilon is that of TRL.
    """
    return centred(reward_bK) / (reward_bK.std(dim=1, keepdim=True) + _STD_EPSILON)


def leave_one_out(reward_bK: Tensor) -> Tensor:
    """Return the reward minus the mean of the other responses of the group: [b, K].

        A_ij = r_ij - 1/(K-1) sum_{k != j} r_ik = K/(K-1) (r_ij - mean_k r_ik)

    From RLOO (Kool et al. 2019; Ahmadian et al. 2024).
    """
    samples = reward_bK.shape[1]
    return centred(reward_bK) * (samples / (samples - 1))


def imitation(reward_bK: Tensor, weight: float, floor: float | Literal["group"]) -> Tensor:
    """Return the term that is added to advantages so that good stale answers are kept: [b, K], zero for `weight` 0.

    Over the rewards of the other K - 1 responses, with m their mean, l their least and h their largest, and s the share
    of them with a reward of at least h - (h - l) / 20:

        lambda (m - l) s^3,    or lambda max(m, 0) where l = h
        lambda (m - floor)     if `floor` is a number, such as the least reward of the task

    Added to `centred`, it lowers the baseline, lambda = `weight`, from the mean of the group towards the least reward
    (baselines below the mean: Arnal et al. 2025, arXiv 2506.20520). The power leaves most of it to prompts that are
    nearly solved. With graded rewards, where it would be mostly noise, few responses share the best one.

    Where the policy has left its sampler, the group's mean under the sampler is no baseline that keeps the probability
    of the sampled answers: a common fall of all of them changes no centred residual. This term pulls the policy to the
    sampler, in proportion to how good the sampler was at the prompt. It does not depend on the response that it is
    added to, so on fresh data the gradient that it adds has the mean 0. That would not hold with the least reward of
    the whole group, which would lower the expected minimum of K responses.

    Demonstrations are not from the sampler, and the objectives do not add it to them: a wrong one among right answers
    would be imitated.
    """
    if not weight:
        return torch.zeros_like(reward_bK)
    reward_bK = level(reward_bK)
    mean_bK = (reward_bK.sum(dim=1, keepdim=True) - reward_bK) / (reward_bK.shape[1] - 1)
    if floor != "group":
        return weight * (mean_bK - floor)
    samples = reward_bK.shape[1]
    is_other_KK = ~torch.eye(samples, dtype=torch.bool, device=reward_bK.device)
    others_bKO = reward_bK[:, None].expand(-1, samples, -1)[:, is_other_KK].view(-1, samples, samples - 1)
    least_bK, largest_bK = others_bKO.aminmax(dim=2)
    spread_bK = largest_bK - least_bK
    # The mean is a difference of sums: where one reward is large, rounding can put it far outside the spread.
    above_bK = (mean_bK - least_bK).clamp(min=0).minimum(spread_bK)
    solved_bKO = others_bKO >= (largest_bK - _SOLVED_WITHIN * spread_bK)[..., None]
    share_bK = solved_bKO.to(reward_bK.dtype).sum(dim=2) / (samples - 1)
    # A group of right answers only has no spread, and is worth keeping: then the mean is the least.
    return weight * torch.where(spread_bK > 0, above_bK * share_bK**_SOLVED_POWER, least_bK.clamp(min=0))


@torch.no_grad()
def taper(responses: Responses, advantage_bK: Tensor, kind: str) -> Tensor:
    """Return the weights of responses: 1, or less where a response of negative advantage has lost probability: [b, K].

        w_ij = min(1, rho_ij) if A_ij < 0, else 1

    From TOPR (Le Roux et al. 2025, arXiv 2503.14286): what the policy has unlearnt is not pushed down further, what is
    right may be learnt again. `kind` is "off" (all 1), "response", with rho = pi / mu of the whole response, or "mean",
    with its geometric mean over the counted tokens: the former underflows to 0 for responses of thousands of tokens.
    Where the sampler is unknown, rho is 0.
    """
    if kind == "off":
        return torch.ones_like(advantage_bK)
    log_ratio_bK = responses.log_ratio_bK
    if kind == "mean":
        log_ratio_bK = log_ratio_bK / responses.tokens_bK.clamp(min=1)
    # The sign of a rounding error is that of no advantage.
    scale_bK = torch.maximum(responses.reward_bK.abs(), responses.policy_bK.abs()).clamp(min=1.0)
    worse_bK = advantage_bK < -rewards.ROUNDING * scale_bK.amax(dim=1, keepdim=True)
    return torch.where(worse_bK, responses.only_known(log_ratio_bK.clamp(max=0.0).exp()), 1.0)


@torch.no_grad()
def kl_penalty(responses: Responses, beta: float, kl: str, ema_decay: float) -> Tensor:
    """Return beta times the log-ratio of the current policy to an anchor: [b, K].

    Centring the reward minus it gives the advantage of Bartoldson et al. 2025, Eq. 7:

        A_ij = (r_ij - mean_k r_ik) - beta (KL_ij - mean_k KL_ik),    KL_ij = log pi_ij - log ref_ij

    `kl` names the anchor: "none", "reference", or "ema" (`ema_log_ratio`).
    """
    if kl == "none":
        return torch.zeros_like(responses.reward_bK)
    if kl == "ema":
        return beta * ema_log_ratio(responses, ema_decay)
    return beta * (responses.policy_bK - responses.reference_bK)


@torch.no_grad()
def level_of_sampler(responses: Responses, beta: float) -> Tensor:
    """Return the change of an advantage of Eq. 7 if the mean KL is that of the sampler, not of the policy: [b, 1].

        beta (mean_k KL(mu)_ik - mean_k KL_ik) = -beta mean_k log rho_ik

    KL(mu) is log mu - log ref. Where all responses of a group have lost probability, it raises their advantages. The
    mean is over the responses whose sampler is known; at a temperature, log rho is that at the temperature.
    """
    known_bK = responses.only_known(torch.ones_like(responses.reward_bK))
    total_b1, count_b1 = (part.sum(dim=1, keepdim=True) for part in (responses.log_ratio_bK, known_bK))
    return -beta * total_b1 / count_b1.clamp(min=1)


@torch.no_grad()
def ema_log_ratio(responses: Responses, decay: float) -> Tensor:
    """Return log pi - log ema to first order, at the temperature of sampling: [b, K] (Bartoldson 2026).

        log pi_n - log ema_n  ~  a / (D (1 - a)) (log pi_n - log pi_{n-D})

    If weights drift at a constant rate, their exponential moving average of decay `a` is a / (1 - a) steps behind, and
    the weights that sampled the response are D steps behind, its staleness. So the log-ratio to the former follows
    from that to the latter, whose log-probabilities came with the response: there is no forward pass of a reference. It
    is 0 where they are unknown. At staleness 0 both policies are the same and only rounding differs; D is then taken as
    1. The log-ratio of a token is clamped to +-10, as in the public code.
    """
    log_ratio_R = responses.at_sampling_R - responses.sampled_logprob_R
    log_ratio_bK = responses.only_known(responses.per_row(log_ratio_R.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)))
    return log_ratio_bK * (decay / (1.0 - decay)) / responses.staleness_bK.clamp(min=1.0)
