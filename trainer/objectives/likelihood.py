"""The objective of supervised fine-tuning."""

from torch import Tensor

from tba.trainer.objectives.responses import Responses


def negative_log_likelihood(responses: Responses, _beta: float) -> Tensor:
    """Return the mean negative log-likelihood of the counted tokens, in nats per token.

        loss = -1/T sum_ijt log pi_ijt,    T counted tokens of the whole batch

    Every token has the same weight, so a long response weighs more than a short one.
    """
    return -responses.policy_bK.sum() / max(responses.totals.tokens, 1)
