"""Metrics of a step that do not depend on the objective: of the batch, and the trainer's difference to the engine."""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.objectives.diagnostics import reward_part_metrics, staleness_metrics


def only_finite(metrics: dict[str, float]) -> dict[str, float]:
    """Drop values that are not finite: JSON and the buffer cannot hold them."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def batch_metrics(batch: TrainBatch, end_ids: Collection[int] = ()) -> dict[str, float]:
    """Return metrics of the batch itself: rewards, staleness, tokens. Any of `end_ids` ends a response."""
    lengths = [len(row.response_ids) for row in batch.rows]
    return {
        "reward_mean": float(batch.reward_BK.mean()),
        "reward_std": float(batch.reward_BK.std(correction=0)),
        **reward_part_metrics(batch.reward_parts),
        **staleness_metrics(batch.staleness_BK),
        "recency_window": float(batch.recency_window),
        "recency_missed": batch.recency_missed,
        "tokens": float(sum(row.tokens for row in batch.rows)),
        "response_tokens_mean": sum(lengths) / len(lengths),
        **({"truncated_share": truncated_share(batch.rows, end_ids)} if end_ids else {}),
    }


def truncated_share(rows: Sequence[Row], end_ids: Collection[int]) -> float:
    """Return the fraction of responses without an end token: they were cut off at the length limit."""
    finished = sum(len(row.response_ids) > 0 and int(row.response_ids[-1]) in end_ids for row in rows)
    return 1.0 - finished / len(rows)


def on_policy_differences(rows: Sequence[Row], logprob_R: Tensor) -> list[Tensor]:
    """Return, per on-policy row, trainer minus engine log-probability of each counted token.

    For these rows both are of the same weights at temperature 1, so the difference is numerical error alone.
    """
    lengths = [len(row.response_ids) for row in rows]
    return [
        (logprobs - torch.from_numpy(row.sampling_logprobs.copy()))[torch.from_numpy(row.loss_mask != 0)]
        for row, logprobs in zip(rows, torch.split(logprob_R, lengths), strict=True)
        if row.on_policy
    ]
