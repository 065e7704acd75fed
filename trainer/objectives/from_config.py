"""Make the objective that the configuration names: one function of the responses and of the step's beta."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tba.common.config import ObjectiveSection
from tba.trainer.objectives import policy_gradient as pg
from tba.trainer.objectives.advantages import (
    centred,
    imitation,
    kl_penalty,
    leave_one_out,
    level_of_sampler,
    standardised,
    taper,
)
from tba.trainer.objectives.balance import (
    flow_balance,
    optimal_advantage,
    prefix_balance,
    trajectory_balance,
    trajectory_balance_learned_z,
    turn_balance,
)
from tba.trainer.objectives.responses import Responses, Terms, row_totals

# A ratio below 1 - this is clipped.
_CLIP_LOW = 0.2
# The maximum importance weight of a token.
_CISPO_CAP = 5.0
# Decay rate per optimiser step of the moving average that `kl = "ema"` anchors to.
_EMA_DECAY = 0.9
# A response whose sampler is unknown is left out of their losses.
_NEEDS_SAMPLER = ("grpo", "dr_grpo", "ppo_clip", "proximal_rloo", "cispo")


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss, and what it needs. `terms(responses, beta)` has a micro-batch's part of the loss.

    `ratio_bounds` are the bounds to which it clips pi / mu: of tokens, or with `ratio_of_response` of responses.
    """

    name: str
    terms: Callable[[Responses, float], Terms]
    needs_reference: bool
    learns_log_z: bool = False
    # Whether the head gives a value of the prompt, or of what comes before each turn or each counted token.
    value_of: Literal["", "turn", "token"] = ""
    # Whether it needs the reference log-probabilities of tokens, not only of responses.
    reference_of_tokens: bool = False
    ratio_bounds: tuple[float, float] | None = None
    ratio_of_response: bool = False
    # The least reward that the task is said to give, or -inf if the loss does not depend on it.
    reward_floor: float = -math.inf

    @property
    def head(self) -> str:
        """Say what the head learns, empty without one: weights of one head mean nothing in another."""
        return f'{self.name} with log_z = "turn"' if self.value_of == "turn" else self.name * self.learns_log_z

    def loss(self, responses: Responses, beta: float) -> Tensor:
        """Return a micro-batch's part of the loss, a float64 scalar."""
        return self.terms(responses, beta).loss


class _PolicyGradient(NamedTuple):
    """The loss of an advantage, the advantage, and the bounds of the ratio.

    With `clips`, tokens or responses have no gradient beyond the bound to which their advantage pushes the ratio, as
    with PPO; without it their weight is the ratio, limited.
    """

    loss: Callable[..., Any]
    advantage: Callable[[Tensor], Tensor]
    bounds: tuple[float, float] | None = None
    clips: bool = False


def make_objective(config: ObjectiveSection, *, longest_response: int) -> Objective:
    """Return the objective that the configuration names. `longest_response` is in tokens."""
    floor = config.reward_floor if config.imitation_weight and config.reward_floor != "group" else -math.inf
    objective = partial(Objective, name=config.name, needs_reference=config.uses_reference)
    own, low, high = config.value_beta, _CLIP_LOW, config.clip_high
    balance = partial(
        trajectory_balance, imitation_weight=config.imitation_weight, floor=config.reward_floor, taper_kind=config.taper
    )
    with_head = partial(objective, learns_log_z=True)
    choices = {
        "tb": objective(terms=balance, reward_floor=floor),
        "tb_learned_z": with_head(terms=trajectory_balance_learned_z),
        "tb_prefix": with_head(terms=prefix_balance, value_of="token", reference_of_tokens=True),
        "flowrl": with_head(
            terms=partial(flow_balance, low=low, high=high),
            ratio_bounds=(1 - low, 1 + high),
            ratio_of_response=True,
        ),
        "ppo": with_head(terms=partial(_with_critic, config), value_of="token", ratio_bounds=(1 - low, 1 + high)),
        "online_dpo": objective(terms=pg.online_dpo),
        "oapl": objective(
            terms=lambda responses, beta: optimal_advantage(responses, beta, beta if own == "beta" else own)
        ),
    }
    if config.log_z == "turn":
        return with_head(terms=turn_balance, value_of="turn", reference_of_tokens=True)
    if config.name in choices:
        return choices[config.name]
    chosen = _policy_gradient(config, longest_response)
    distils = config.name == "distill"
    return objective(
        terms=chosen.loss if distils else partial(_with_advantage, config, chosen),
        reference_of_tokens=distils,
        ratio_bounds=chosen.bounds,
        ratio_of_response=config.name == "proximal_rloo",
        reward_floor=floor,
    )


def _policy_gradient(config: ObjectiveSection, longest_response: int) -> _PolicyGradient:
    low, high = _CLIP_LOW, config.clip_high
    bounds = 1 - low, 1 + high
    cap = None if config.truncation == "off" else config.truncation
    on_tokens = _PolicyGradient(partial(pg.truncated_importance, cap=cap), centred, None if cap is None else (0.0, cap))
    dr_grpo = partial(pg.dr_grpo, low=low, high=high, length=longest_response)
    proximal_rloo = partial(pg.proximal_rloo, low=low, high=high)
    choices = {
        "reinforce": _PolicyGradient(pg.reinforce, lambda reward_bK: reward_bK),
        "rloo": _PolicyGradient(pg.reinforce, leave_one_out),
        "tb_stale": on_tokens,
        "tba_prime": on_tokens,
        "grpo": _PolicyGradient(partial(pg.grpo, low=low, high=high), standardised, bounds, clips=True),
        "dr_grpo": _PolicyGradient(dr_grpo, centred, bounds, clips=True),
        "ppo_clip": _PolicyGradient(partial(pg.ppo_clip, low=low, high=high), leave_one_out, bounds, clips=True),
        "proximal_rloo": _PolicyGradient(proximal_rloo, leave_one_out, bounds, clips=True),
        # Each token has an advantage of its own.
        "distill": on_tokens._replace(loss=partial(pg.distillation, cap=cap)),
        "cispo": _PolicyGradient(partial(pg.cispo, cap=_CISPO_CAP), standardised, (0.0, _CISPO_CAP)),
    }
    return choices[config.name]


def _with_critic(config: ObjectiveSection, responses: Responses, beta: float) -> Terms:
    return_bK = responses.reward_bK - kl_penalty(responses, beta, config.anchor, _EMA_DECAY)
    return pg.ppo(responses, return_bK, low=_CLIP_LOW, high=config.clip_high)


def _with_advantage(config: ObjectiveSection, chosen: _PolicyGradient, responses: Responses, beta: float) -> Terms:
    reward_bK = responses.reward_bK
    penalty_bK = kl_penalty(responses, beta, config.anchor, _EMA_DECAY)
    if chosen.advantage is standardised:
        # Equal rewards would have the deviation of the KL term, and beta would cancel.
        advantage_bK = standardised(reward_bK) - centred(penalty_bK)
    else:
        advantage_bK = chosen.advantage(reward_bK - penalty_bK)
    raised_bK = responses.only_known(imitation(reward_bK, config.imitation_weight, config.reward_floor))
    if config.weights_tokens and config.mean_kl == "sampler" and config.anchor != "none":
        advantage_bK = advantage_bK + level_of_sampler(responses, beta)
    total_bK = advantage_bK + raised_bK
    weight_bK = taper(responses, total_bK, config.taper)
    if config.name in _NEEDS_SAMPLER:
        weight_bK = responses.only_known(weight_bK)
    truncated_bK = weight_bK * _truncation(config, chosen, responses, total_bK)
    if config.weights_tokens and config.imitation_weight:
        # Eq. 7 is at temperature 1, but the sampler is imitated at its own temperature.
        tempered = replace(responses, logprob_R=responses.at_sampling_R)
        loss = chosen.loss(responses, weight_bK * advantage_bK) + chosen.loss(tempered, weight_bK * raised_bK)
    else:
        loss = chosen.loss(responses, weight_bK * total_bK)
    return Terms(loss, total_bK, truncated_bK)


@torch.no_grad()
def _truncation(
    config: ObjectiveSection, chosen: _PolicyGradient, responses: Responses, advantage_bK: Tensor
) -> Tensor:
    """Return the mean weight of the counted tokens of each response: [b, K]."""
    if chosen.bounds is None:
        return torch.ones_like(advantage_bK)
    if config.name == "proximal_rloo":
        return pg.ratio_weight(responses.log_ratio_bK, advantage_bK, chosen.bounds, clips=True)
    advantage_R = responses.per_token(advantage_bK)
    weight_R = pg.ratio_weight(responses.log_ratio_R, advantage_R, chosen.bounds, clips=chosen.clips)
    total_N = row_totals(torch.where(responses.mask_R, weight_R, 0.0), responses.lengths)
    return total_N.view_as(advantage_bK) / responses.tokens_bK.clamp(min=1)
