"""Advantages: rewards relative to the other responses to the same prompt. Nothing here has a gradient.

Shape suffixes: b prompts of a micro-batch, K responses to each, R response tokens.
"""

import torch
from torch import Tensor

from tba.trainer.objectives.responses import Responses

# A larger log-ratio of one token means a numerical error or another model, not a policy that has drifted.
_LARGEST_LOG_RATIO = 10.0
_STD_EPSILON = 1e-4


def centred(reward_bK: Tensor) -> Tensor:
    """Return the reward minus the mean of the group: [b, K].

        A_ij = r_ij - 1/K sum_k r_ik

    This is GRPO's advantage without the division (Liu et al. 2025, "Dr. GRPO").
    """
    return reward_bK - reward_bK.mean(dim=1, keepdim=True)


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


@torch.no_grad()
def regularised(reward_bK: Tensor, responses: Responses, beta: float, kl: str, ema_decay: float) -> Tensor:
    """Return the reward minus beta times the log-ratio of the current policy to an anchor: [b, K].

    Centring it gives the advantage of Bartoldson et al. 2025, Eq. 7:

        A_ij = (r_ij - mean_k r_ik) - beta (KL_ij - mean_k KL_ik),    KL_ij = log pi_ij - log ref_ij

    `kl` names the anchor: "none", "reference", or "ema" (`ema_log_ratio`).
    """
    if kl == "none":
        return reward_bK
    if kl == "ema":
        return reward_bK - beta * ema_log_ratio(responses, ema_decay)
    return reward_bK - beta * (responses.policy_bK - responses.reference_bK)


@torch.no_grad()
def ema_log_ratio(responses: Responses, decay: float) -> Tensor:
    """Return log pi - log ema to first order, without a forward pass of a reference: [b, K] (Bartoldson 2026).

        log pi_n - log ema_n  ~  a / (D (1 - a)) (log pi_n - log pi_{n-D})

    If weights drift at a constant rate, their exponential moving average of decay `a` is a / (1 - a) steps behind, and
    the weights that sampled the response are D steps behind, its staleness. So the log-ratio to the former follows
    from that to the latter, whose log-probabilities came with the response. At staleness 0 both policies are the
    same and only rounding differs; D is then taken as 1. The log-ratio of a token is clamped to +-10, as in the
    public code.
    """
    log_ratio_R = (responses.logprob_R - responses.sampled_logprob_R).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    steps_behind = decay / (1.0 - decay)
    return responses.per_row(log_ratio_R) * steps_behind / responses.staleness_bK.clamp(min=1.0)
