"""The second-moment mask: leave out the tokens whose ratios to the sampler vary most. Off by default.

Shape suffixes: R response tokens.
"""

import torch
from torch import Tensor

from tba.trainer.objectives.responses import Responses


@torch.no_grad()
def second_moment_mask(responses: Responses, limit: float) -> Tensor:
    """Return the tokens that count, without those of the largest (log rho)^2 of each prompt: [R], bool (M2PO).

    As many are left out as are needed for the mean of (log rho)^2 over the others to be below `limit`; one is always
    kept. From Zheng et al. 2025, arXiv 2510.01161, who take the mean over all tokens of a batch. Here it is over those
    of a prompt, so that the loss does not depend on how the batch is cut into micro-batches. Tokens of an unknown
    sampler have no ratio: they are left out, and not part of the mean.
    """
    kept_R = torch.zeros_like(responses.mask_R)
    samples = responses.reward_bK.shape[1]
    ends = torch.tensor(responses.lengths).view(-1, samples).sum(dim=1).cumsum(dim=0).tolist()
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        counted = start + responses.usable_R[start:end].nonzero()[:, 0]
        square, order = responses.log_ratio_R[counted].square().sort()
        means = square.cumsum(dim=0) / torch.arange(1, len(square) + 1)
        kept_R[counted[order[: max(int((means < limit).sum()), 1)]]] = True
    return kept_R
