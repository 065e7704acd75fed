"""Make the objective that the configuration names: one function of the responses and of the step's beta."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from tba.common.config import ObjectiveSection
from tba.trainer.objectives import policy_gradient as pg
from tba.trainer.objectives.advantages import (
    centred,
    imitation,
    leave_one_out,
    level_of_sampler,
    regularised,
    standardised,
    taper,
)
from tba.trainer.objectives.balance import optimal_advantage, trajectory_balance, trajectory_balance_learned_z
from tba.trainer.objectives.preference import online_dpo
from tba.trainer.objectives.responses import Responses
from tba.trainer.objectives.second_moment import second_moment_mask

# A response whose sampler is unknown is left out of their losses.
_NEEDS_SAMPLER = ("grpo", "dr_grpo", "ppo_clip", "proximal_rloo", "cispo")
Loss = Callable[..., Tensor]
Advantage = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss, and what it needs. `loss(responses, beta)` is a micro-batch's part of the loss, a float64 scalar.

    `ratio_bounds` are the bounds to which it clips pi / mu: of tokens, or with `ratio_of_response` of responses.
    """

    name: str
    loss: Callable[[Responses, float], Tensor]
    needs_reference: bool
    learns_log_z: bool = False
    log_z_learning_rate: float = 0.0
    ratio_bounds: tuple[float, float] | None = None
    ratio_of_response: bool = False
    # The least reward that the task is said to give, or -inf if the loss does not depend on it.
    reward_floor: float = -math.inf


def make_objective(config: ObjectiveSection, *, longest_response: int) -> Objective:
    """Return the objective that the configuration names. `longest_response` is in tokens."""
    counted_from = config.floor
    floor = counted_from if config.imitation_weight and counted_from != "group" else -math.inf
    if config.name == "tb":
        balance = partial(
            trajectory_balance,
            imitation_weight=config.imitation_weight,
            floor=config.floor,
            taper_kind=config.taper,
        )
        return Objective(config.name, balance, True, reward_floor=floor)
    if config.name == "tb_learned_z":
        rate = config.log_z_learning_rate
        return Objective(config.name, trajectory_balance_learned_z, True, learns_log_z=True, log_z_learning_rate=rate)
    if config.name == "online_dpo":
        return Objective(config.name, online_dpo, True)
    if config.name == "oapl":
        return Objective(config.name, partial(_optimal_advantage, config), False)
    loss, advantage, ratio_bounds = _policy_gradient(config, longest_response)
    return Objective(
        config.name,
        partial(_with_advantage, config, loss, advantage),
        needs_reference=config.anchor == "reference",
        ratio_bounds=ratio_bounds,
        ratio_of_response=config.name == "proximal_rloo",
        reward_floor=floor,
    )


def _policy_gradient(
    config: ObjectiveSection, longest_response: int
) -> tuple[Loss, Advantage, tuple[float, float] | None]:
    """Return the loss of an advantage, the advantage, and the bounds of the ratio."""
    low, high = config.clip_low, config.clip_high
    bounds = 1 - low, 1 + high
    cap = None if config.truncation == "off" else config.truncation
    on_tokens = partial(pg.truncated_importance, cap=cap), centred, None if cap is None else (0.0, cap)
    choices: dict[str, tuple[Loss, Advantage, tuple[float, float] | None]] = {
        "reinforce": (pg.reinforce, lambda reward_bK: reward_bK, None),
        "rloo": (pg.reinforce, leave_one_out, None),
        "tb_stale": on_tokens,
        "tba_prime": on_tokens,
        "grpo": (partial(pg.grpo, low=low, high=high), standardised, bounds),
        "dr_grpo": (partial(pg.dr_grpo, low=low, high=high, length=longest_response), centred, bounds),
        "ppo_clip": (partial(pg.ppo_clip, low=low, high=high), leave_one_out, bounds),
        "proximal_rloo": (partial(pg.proximal_rloo, low=low, high=high), leave_one_out, bounds),
        "cispo": (partial(pg.cispo, cap=config.cispo_cap), standardised, (0.0, config.cispo_cap)),
    }
    return choices[config.name]


def _with_advantage(
    config: ObjectiveSection, loss: Loss, advantage: Advantage, responses: Responses, beta: float
) -> Tensor:
    reward_bK = responses.reward_bK
    advantage_bK = advantage(regularised(reward_bK, responses, beta, config.anchor, config.ema_decay))
    raised_bK = imitation(reward_bK, config.imitation_weight, config.floor)
    if config.weights_tokens and config.mean_kl == "sampler" and config.anchor != "none":
        advantage_bK = advantage_bK + level_of_sampler(responses, beta)
    weight_bK = taper(responses, advantage_bK + raised_bK, config.taper)
    if config.name in _NEEDS_SAMPLER:
        weight_bK = responses.only_known(weight_bK)
    if config.second_moment != "off":
        # The advantage is of the whole response: the reference has no log-probabilities of single tokens.
        kept = replace(responses, mask_R=second_moment_mask(responses, config.second_moment))
        if config.name == "grpo":
            # Its mean stays that over the whole response, or the tokens that are kept would weigh more.
            weight_bK = weight_bK * kept.tokens_bK / responses.tokens_bK.clamp(min=1)
        return loss(kept, weight_bK * (advantage_bK + raised_bK))
    if config.weights_tokens and config.imitation_weight:
        # Eq. 7 is at temperature 1, but the sampler is imitated at its own temperature.
        tempered = replace(responses, logprob_R=responses.at_sampling_R)
        return loss(responses, weight_bK * advantage_bK) + loss(tempered, weight_bK * raised_bK)
    return loss(responses, weight_bK * (advantage_bK + raised_bK))


def _optimal_advantage(config: ObjectiveSection, responses: Responses, beta: float) -> Tensor:
    return optimal_advantage(
        responses, beta=beta, value_beta=beta if config.value_beta == "beta" else config.value_beta
    )
