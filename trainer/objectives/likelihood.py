"""The objective of a warm start: responses that are right as they stand."""

from torch import Tensor

from tba.trainer.objectives.responses import Responses


def negative_log_likelihood(responses: Responses) -> Tensor:
    """loss = -1/T sum_ijt log pi_ijt, in nats per token; T are the counted tokens of the whole batch.

    Every token counts alike, so a long response counts more than a short one.
    """
    return -responses.policy_bK.sum() / max(responses.totals.tokens, 1)
