"""Advantages: what a response was worth beside the other responses to its prompt. Nothing here has a gradient."""

import torch
from torch import Tensor

from tba.trainer.objectives.responses import Responses

# A log-ratio of one token beyond this is a broken number or a changed model, not a policy that drifted.
_LARGEST_LOG_RATIO = 10.0
_STD_EPSILON = 1e-4


def centred(reward_bK: Tensor) -> Tensor:
    """Reward minus the mean of the group (Liu et al. 2025, "Dr. GRPO": GRPO without the division)."""
    return reward_bK - reward_bK.mean(dim=1, keepdim=True)


def standardised(reward_bK: Tensor) -> Tensor:
    """Centred, divided by the group's sample standard deviation plus 1e-4 (Shao et al. 2024, as in TRL)."""
    return centred(reward_bK) / (reward_bK.std(dim=1, keepdim=True) + _STD_EPSILON)


def leave_one_out(reward_bK: Tensor) -> Tensor:
    """Reward minus the mean of the group's others (Kool et al. 2019; Ahmadian et al. 2024): K/(K-1) times `centred`."""
    samples = reward_bK.shape[1]
    return centred(reward_bK) * (samples / (samples - 1))


@torch.no_grad()
def regularised(reward_bK: Tensor, responses: Responses, beta: float, kl: str, ema_decay: float) -> Tensor:
    """The reward minus beta times the log-ratio to an anchor, under the policy as it is now.

    Centring it then gives the advantage of Bartoldson et al. 2025, Eq. 7: A_ij = (r_ij - mean r_i) - beta (KL_ij -
    mean KL_i). `kl` names the anchor: "none", "reference", or "ema" (`ema_log_ratio`).
    """
    if kl == "none":
        return reward_bK
    if kl == "ema":
        return reward_bK - beta * ema_log_ratio(responses, ema_decay)
    return reward_bK - beta * (responses.policy_bK - responses.reference_bK)


@torch.no_grad()
def ema_log_ratio(responses: Responses, decay: float) -> Tensor:
    """[b, K]: log pi - log ema, to first order, without a forward pass of any reference (Bartoldson 2026).

        log pi_n - log ema_n  ~  a / (D (1 - a)) (log pi_n - log pi_{n-D})

    Weights that drift evenly leave an exponential moving average of decay `a` behind by a / (1 - a) steps, and the
    weights of D steps ago by D; the first is read off the second, whose log-probabilities came with the response.
    D is each response's own lag. At lag 0 the two policies are one, and what differs is the engine's rounding: 1
    stands for it. The log-ratio of a token is clamped at +-10, as in the public code.
    """
    log_ratio_R = (responses.logprob_R - responses.sampled_logprob_R).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    steps_behind = decay / (1.0 - decay)
    return responses.per_row(log_ratio_R) * steps_behind / responses.lag_bK.clamp(min=1.0)
