"""Metrics of a step that need no objective: of the batch, and of trainer against engine."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tba.trainer.batch import Row, TrainBatch
from tba.trainer.objectives.health import reward_part_metrics, staleness_metrics


def only_finite(metrics: dict[str, float]) -> dict[str, float]:
    """JSON and the buffer have no place for other numbers."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """What is read off the batch itself: rewards, staleness, tokens."""
    lengths = [len(row.response_ids) for row in batch.rows]
    return {
        "reward_mean": float(batch.reward_BK.mean()),
        "reward_std": float(batch.reward_BK.std(correction=0)),
        **reward_part_metrics(batch.reward_parts),
        **staleness_metrics(batch.staleness_BK),
        "tokens": float(sum(row.tokens for row in batch.rows)),
        "response_tokens_mean": sum(lengths) / len(lengths),
    }


def on_policy_differences(rows: Sequence[Row], logprob_R: Tensor) -> list[Tensor]:
    """Trainer's minus engine's log-probability per token, where both are of the same weights at temperature 1."""
    lengths = [len(row.response_ids) for row in rows]
    return [
        (logprobs - torch.from_numpy(row.sampling_logprobs.copy()))[torch.from_numpy(row.loss_mask != 0)]
        for row, logprobs in zip(rows, torch.split(logprob_R, lengths), strict=True)
        if row.on_policy
    ]
