"""The objective of supervised fine-tuning."""

import torch

from tba.trainer.objectives.responses import Responses, Terms


def negative_log_likelihood(responses: Responses, _beta: float) -> Terms:
    """Return the mean negative log-likelihood of the counted tokens, in nats per token.

        loss = -1/T sum_ijt log pi_ijt,    T counted tokens of the whole batch

    Every token has the same weight, so a long response weighs more than a short one.
    """
    loss = -responses.policy_bK.sum() / max(responses.totals.tokens, 1)
    one_bK = torch.ones_like(responses.reward_bK)
    return Terms(loss, one_bK, one_bK)
