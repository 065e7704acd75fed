"""The numbers of each row of a batch that the buffer stores next to its slot: what the step made of the row.

Shape suffixes: Q quantities, B prompts of the batch, K samples of each, b prompts of a micro-batch, R response tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tba.common.wire.row_numbers import QUANTITIES, RowNumbers
from tba.trainer.batch.batch import Row, known
from tba.trainer.objectives.responses import Responses, Terms, row_totals


@torch.no_grad()
def quantities(rows: Sequence[Row], responses: Responses, terms: Terms) -> Tensor:
    """Return the QUANTITIES of the rows of a micro-batch: [Q, b, K], float64.

    The log-ratio is 0 where the sampler is unknown. The mismatch is NaN except for on-policy rows.
    """
    shape = responses.reward_bK.shape
    tokens_bK = row_totals(responses.mask_R, responses.lengths).view(shape)
    difference_bK = row_totals(responses.log_ratio_R.abs(), responses.lengths).view(shape)
    on_policy_bK = torch.tensor([row.on_policy for row in rows]).view(shape)
    return torch.stack(
        [
            responses.policy_bK,
            responses.log_ratio_bK,
            terms.advantage_bK,
            torch.where(tokens_bK > 0, terms.weight_bK, 0.0),
            # 0 / 0 where no token counts.
            torch.where(on_policy_bK, difference_bK / tokens_bK, math.nan),
        ]
    )


def row_numbers(quantities_QBK: Tensor, rows: Sequence[Row], *, skipped: bool) -> RowNumbers:
    """Return the record of a batch from the quantities of its rows. `skipped`: the step made no update."""
    quantities_QBK[QUANTITIES.index("log_ratio")].view(-1)[~known(rows)] = math.nan
    columns = dict(zip(QUANTITIES, quantities_QBK.flatten(1).tolist(), strict=True))
    unused = [skipped or weight == 0 for weight in columns["weight"]]
    finite = {name: [x if math.isfinite(x) else None for x in column] for name, column in columns.items()}
    return RowNumbers(**finite, skipped=unused)


def no_numbers(rows: Sequence[Row]) -> RowNumbers:
    """Return the record of a step that was skipped before its forward pass."""
    unknown: list[float | None] = [None] * len(rows)
    return RowNumbers(**dict.fromkeys(QUANTITIES, unknown), skipped=[True] * len(rows))
