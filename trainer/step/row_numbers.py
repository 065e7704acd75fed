"""The numbers of each row of a batch that the buffer stores next to its slot: what the step made of the row.

Shape suffixes: Q quantities, B prompts of the batch, K samples of each, b prompts of a micro-batch, R response tokens.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tba.common.wire.trajectory import LOG_RATIO_DTYPE, MAX_LOG_RATIO_BYTES, QUANTITIES, RowNumbers
from tba.trainer.batch.batch import Row, known
from tba.trainer.objectives.responses import Responses, Terms, row_totals


@torch.no_grad()
def quantities(rows: Sequence[Row], responses: Responses, terms: Terms, log_ratio_R: Tensor) -> Tensor:
    """Return the QUANTITIES of the rows of a micro-batch: [Q, b, K], float64.

    `log_ratio_R` is `responses.log_ratio_R`. The log-ratio is 0 where the sampler is unknown. The mismatch is NaN
    except for on-policy rows.
    """
    shape = responses.reward_bK.shape
    tokens_bK = responses.tokens_bK
    difference_bK = row_totals(log_ratio_R.abs(), responses.lengths).view(shape)
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


def row_numbers(quantities_QBK: Tensor, log_ratio_R: Tensor, rows: Sequence[Row], *, skipped: bool) -> RowNumbers:
    """Return the record of a batch from the quantities of its rows and the log-ratios of their tokens.

    `skipped`: the step made no update.
    """
    quantities_QBK[QUANTITIES.index("log_ratio")].view(-1)[~known(rows)] = math.nan
    columns = dict(zip(QUANTITIES, quantities_QBK.flatten(1).tolist(), strict=True))
    unused = [skipped or weight == 0 for weight in columns["weight"]]
    finite = {name: [x if math.isfinite(x) else None for x in column] for name, column in columns.items()}
    return RowNumbers(
        **finite, skipped=unused, token_log_ratios=_token_log_ratios(log_ratio_R, rows, finite["log_ratio"])
    )


def _token_log_ratios(log_ratio_R: Tensor, rows: Sequence[Row], of_rows: Sequence[float | None]) -> list[bytes | None]:
    """Return the log-ratios of the tokens of each row. None where that of the row is, or beyond MAX_LOG_RATIO_BYTES."""
    limit = float(np.finfo(LOG_RATIO_DTYPE).max)
    numbers = log_ratio_R.clamp(-limit, limit).numpy().astype(LOG_RATIO_DTYPE).tobytes()
    found: list[bytes | None] = []
    start = size = 0
    for row, of_row in zip(rows, of_rows, strict=True):
        stop = start + LOG_RATIO_DTYPE.itemsize * len(row.response_ids)
        fits = of_row is not None and size + stop - start <= MAX_LOG_RATIO_BYTES
        found.append(numbers[start:stop] if fits else None)
        size += stop - start if fits else 0
        start = stop
    return found


def no_numbers(rows: Sequence[Row]) -> RowNumbers:
    """Return the record of a step that was skipped before its forward pass."""
    unknown: list[float | None] = [None] * len(rows)
    return RowNumbers(**dict.fromkeys(QUANTITIES, unknown), skipped=[True] * len(rows), token_log_ratios=None)
