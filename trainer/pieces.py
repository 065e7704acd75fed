"""The gradient of a micro-batch whose activations are too many at once: a prompt group over `train.micro_batch_tokens`.

The loss needs the log-probabilities of the whole group, as log Z does, and the weights only what the loss says of each
of them. So they are computed piece by piece without a graph, the loss gives its slope at each token, and a second pass
over each piece takes it to the weights: the chain rule, exact for every objective, for a forward pass more. (GradCache,
Gao et al. 2021, arXiv 2101.06983, does this for contrastive losses.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tba.trainer.batch import Row
from tba.trainer.model import Scorer, Scores
from tba.trainer.shares import Piece


@torch.no_grad()
def score_pieces(
    scorer: Scorer, rows: Sequence[Row], pieces: Sequence[Piece], *, pooled: bool, entropy: bool
) -> Scores:
    """What `scorer.score` says of all rows, without a graph but that `logprob_R` is a leaf which takes a gradient."""
    parts = [scorer.score(rows[piece.rows], pooled=pooled, entropy=entropy, passes=piece.passes) for piece in pieces]
    return Scores(
        torch.cat([part.logprob_R for part in parts]).requires_grad_(),
        torch.cat([part.prompt_NH for part in parts if part.prompt_NH is not None]) if pooled else None,
        torch.cat([part.entropy_R for part in parts if part.entropy_R is not None]) if entropy else None,
    )


def backward_piece(scorer: Scorer, rows: Sequence[Row], piece: Piece, slope_R: Tensor) -> None:
    """Add to the weights' gradients what follows of the loss's slope at each response token of all rows."""
    lengths = [len(row.response_ids) for row in rows]
    first = sum(lengths[: piece.rows.start])
    slope_P = slope_R[first : first + sum(lengths[piece.rows])]
    torch.autograd.backward(scorer.score(rows[piece.rows], passes=piece.passes).logprob_R, slope_P)
