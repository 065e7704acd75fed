"""Metrics of a step that do not depend on the objective: of the batch, and the trainer's difference to the engine."""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.optim import AdamW

from tba.trainer.batch.batch import Row, TrainBatch, known, measured
from tba.trainer.distributed.ranks import Ranks
from tba.trainer.distributed.sharding import local_part
from tba.trainer.objectives.diagnostics import (
    log_ratios_by_advantage,
    mass_metrics,
    reward_part_metrics,
    staleness_metrics,
)
from tba.trainer.step.host_optimizer import POLICY_GROUPS

# Of each tensor. For small models these are all elements, and for large ones it costs nothing.
_COSINE_ELEMENTS = 1 << 16


def only_finite(metrics: dict[str, float]) -> dict[str, float]:
    """Drop values that are not finite: JSON and the buffer cannot hold them."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def batch_metrics(batch: TrainBatch, end_ids: Collection[int] | None) -> dict[str, float]:
    """Return metrics of the batch itself: rewards, staleness, tokens.

    Any of `end_ids` ends a response; None: strings may end one, too.
    """
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
        **({} if end_ids is None else {"truncated_share": truncated_share(batch.rows, end_ids)}),
    }


def truncated_share(rows: Sequence[Row], end_ids: Collection[int]) -> float:
    """Return the fraction of responses without an end token: they were cut off at the length limit."""
    finished = sum(len(row.response_ids) > 0 and int(row.response_ids[-1]) in end_ids for row in rows)
    return 1.0 - finished / len(rows)


def stale_metrics(batch: TrainBatch, log_ratio_BK: Tensor) -> dict[str, float]:
    """Return the metrics that show whether stale data is used up; `log_ratio_BK` is log pi / mu of whole responses.

    Responses whose sampler is unknown, such as demonstrations, are left out, and a batch with any has no masses. Those
    without a counted token are left out of all.
    """
    sampled = [float(row.sampling_logprobs[row.loss_mask != 0].sum(dtype="float64")) for row in batch.rows]
    sampled_BK = torch.tensor(sampled, dtype=torch.float64).view_as(log_ratio_BK)
    measured_BK = measured(batch.rows).view_as(log_ratio_BK)
    responses = [row.response_ids.tobytes() for row in batch.rows]
    all_known = known(batch.rows).all() and measured_BK.any()
    masses = mass_metrics(log_ratio_BK, sampled_BK, measured_BK, responses) if all_known else {}
    return {**log_ratios_by_advantage(log_ratio_BK, measured_BK, batch.reward_BK), **masses}


@torch.no_grad()
def gradient_cosine(optimizer: AdamW, ranks: Ranks) -> float:
    """Return the cosine between the gradient and Adam's mean of the earlier ones; NaN before the first update.

    The mean is in the optimiser's state already: the previous gradient would be another copy of the weights on the
    device, and in each checkpoint. Only the policy's parameters count, and of each the beginning.
    """
    products = []
    for parameter in (one for group in optimizer.param_groups[:POLICY_GROUPS] for one in group["params"]):
        state = optimizer.state.get(parameter, {})
        if parameter.grad is not None and "exp_avg" in state:
            gradient = local_part(parameter.grad).flatten()[:_COSINE_ELEMENTS]
            mean = local_part(state["exp_avg"]).flatten()[:_COSINE_ELEMENTS]
            # Not `@`: the sum of a BLAS library depends on alignment in memory, which a restored state has not kept.
            products.append(torch.stack([(gradient * mean).sum(), gradient.square().sum(), mean.square().sum()]))
    total_3 = torch.stack(products).double().sum(dim=0) if products else torch.zeros(3, dtype=torch.float64)
    both, gradient_square, mean_square = ranks.sum(total_3.cpu()).tolist()
    lengths = math.sqrt(gradient_square * mean_square)
    return both / lengths if lengths else math.nan


def on_policy_differences(rows: Sequence[Row], logprob_R: Tensor) -> list[Tensor]:
    """Return, per on-policy row, trainer minus engine log-probability of each counted token.

    Both are at the temperature of sampling. For these rows they are of the same weights too, so the difference is
    numerical error alone.
    """
    lengths = [len(row.response_ids) for row in rows]
    return [
        (logprobs - torch.from_numpy(row.sampling_logprobs.copy()))[torch.from_numpy(row.loss_mask != 0)]
        for row, logprobs in zip(rows, torch.split(logprob_R, lengths), strict=True)
        if row.on_policy
    ]
