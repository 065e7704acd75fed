"""Objectives on pairs of responses to the same prompt.

Shape suffixes: b prompts of a micro-batch, K responses to each.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tba.trainer.objectives.advantages import level
from tba.trainer.objectives.responses import Responses, Terms


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


def _at(value_bK: Tensor, index_b: Tensor) -> Tensor:
    return value_bK.gather(1, index_b[:, None])[:, 0]
