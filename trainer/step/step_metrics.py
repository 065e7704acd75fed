"""What a step reports: metrics that are defined for every objective, and the numbers of each row of its batch.

The metrics say how far data and optimum are from the policy. The buffer stores the numbers of a row next to its slot:
what the step made of the row.

Shape suffixes: Q quantities, B prompts of the batch, K samples of each, b prompts of a micro-batch, R response tokens.
"""

import math
from collections.abc import Collection, Sequence
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW

from tba.common.wire.trajectory import LOG_RATIO_DTYPE, MAX_LOG_RATIO_BYTES, QUANTITIES, RowNumbers
from tba.trainer.batch.batch import Row, TrainBatch, explored, known, measured
from tba.trainer.distributed import Ranks, local_part
from tba.trainer.objectives.advantages import centred
from tba.trainer.objectives.balance import vargrad_log_z, vargrad_residual
from tba.trainer.objectives.policy_gradient import LARGEST_LOG_RATIO
from tba.trainer.objectives.responses import Responses, Terms, row_totals
from tba.trainer.step.host_optimizer import POLICY_GROUPS

# Elements of each tensor that count. For small models these are all elements, and for large ones it costs nothing.
_COSINE_ELEMENTS = 1 << 16
_LARGEST_KL_LOG_RATIO = math.log(10.0)


def only_finite(metrics: dict[str, float]) -> dict[str, float]:
    """Drop values that are not finite: JSON and the buffer cannot hold them."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def batch_metrics(batch: TrainBatch, end_ids: Collection[int] | None) -> dict[str, float]:
    """Return metrics of the batch itself: rewards, staleness, tokens. Response tokens are those that count.

    Any of `end_ids` ends a response; None: strings may end one, too.
    """
    lengths = [int((row.loss_mask != 0).sum()) for row in batch.rows]
    return {
        "reward_mean": float(batch.reward_BK.mean()),
        "reward_std": float(batch.reward_BK.std(correction=0)),
        **reward_part_metrics(batch.reward_parts, batch.turn_rewards),
        **_explored(batch),
        **staleness_metrics(batch.staleness_BK),
        "recency_window": float(batch.recency_window),
        "recency_missed": batch.recency_missed,
        "reuse_mean": batch.reuse_mean,
        "tokens": float(sum(row.tokens for row in batch.rows)),
        "response_tokens_mean": sum(lengths) / len(lengths),
        **_guided(batch),
        **_truncated(batch, end_ids),
    }


def _guided(batch: TrainBatch) -> dict[str, float]:
    """Return the share of guided responses, those that begin with 0 tokens too, and the mean reward of the others."""
    if not batch.guided:
        return {}
    plain_N = ~torch.tensor(batch.guided)
    return {
        "guided_share": 1.0 - float(plain_N.double().mean()),
        "plain_reward_mean": float(batch.reward_BK.flatten()[plain_N].mean()),
    }


def _explored(batch: TrainBatch) -> dict[str, float]:
    explored_BK = explored(batch.rows).view_as(batch.reward_BK)
    if not explored_BK.any():
        return {}
    rewards = {"explored_reward_mean": explored_BK, "own_reward_mean": ~explored_BK}
    means = {name: float(batch.reward_BK[rows_BK].mean()) for name, rows_BK in rewards.items()}
    return {"explored_share": float(explored_BK.double().mean()), **means}


def _truncated(batch: TrainBatch, end_ids: Collection[int] | None) -> dict[str, float]:
    """Return the fraction of responses whose last counted token is no end token: they were cut off at a limit."""
    # Why an episode ended is not to be seen at its last token.
    turns = batch.turn_rewards or [[] for _ in batch.rows]
    rows = [row for row, rewards in zip(batch.rows, turns, strict=True) if not rewards]
    if end_ids is None or not rows:
        return {}
    counted_ids = (row.response_ids[row.loss_mask != 0] for row in rows)
    ended = sum(len(ids) > 0 and int(ids[-1]) in end_ids for ids in counted_ids)
    return {"truncated_share": 1.0 - ended / len(rows)}


def stale_metrics(batch: TrainBatch, log_ratio_BK: Tensor) -> dict[str, float]:
    """Return the metrics that show whether stale data is used up; `log_ratio_BK` is log pi / mu of whole responses.

    Responses whose sampler is unknown, such as demonstrations, are left out, and a batch with any has no masses. Those
    of explorers, and those without a counted token, are left out of all.
    """
    sampled = [float(row.sampling_logprobs[row.loss_mask != 0].sum(dtype="float64")) for row in batch.rows]
    sampled_BK = torch.tensor(sampled, dtype=torch.float64).view_as(log_ratio_BK)
    measured_BK = measured(batch.rows).view_as(log_ratio_BK)
    responses = [row.response_ids.tobytes() for row in batch.rows]
    # Over kept tokens pi has nothing outside of them: what leaves them would not be seen.
    all_known = known(batch.rows).all() and measured_BK.any() and not any(len(row.kept) for row in batch.rows)
    masses = mass_metrics(log_ratio_BK, sampled_BK, measured_BK, responses) if all_known else {}
    return {**log_ratios_by_advantage(log_ratio_BK, measured_BK, batch.reward_BK), **masses}


@torch.no_grad()
def balance_metrics(policy_BK: Tensor, reference_BK: Tensor, reward_BK: Tensor, beta: float) -> dict[str, float]:
    """Return how far the policy is from the optimum of KL-regularised RL, or {} without a reference.

    `kl` estimates KL(policy || reference), on fresh data only. The mean residual of a prompt is zero by construction,
    so the distance from the optimum is the spread of the residuals. The advantage of Bartoldson et al. 2025, Eq. 7, is
    -beta times the residual.
    """
    if reference_BK.isnan().any():
        return {}
    spread = float(vargrad_residual(policy_BK, reference_BK, reward_BK, beta).std(correction=0))
    log_z = vargrad_log_z(policy_BK, reference_BK, reward_BK, beta)
    return {
        "log_z": float(log_z.mean()),
        "log_z_std": float(log_z.std(correction=0)),
        "residual_std": spread,
        "advantage_std": beta * spread,
        "kl": float((policy_BK - reference_BK).mean()),
    }


@torch.no_grad()
def off_policy_metrics(log_ratio: Tensor) -> dict[str, float]:
    """Return how far the data is from the policy, from log rho = log pi / mu of whole responses, or {} without any.

    `effective_sample_ratio` is (sum rho)^2 / (BK sum rho^2) (Kish 1965): 1 if every response has the same weight,
    1/(BK) if one outweighs all others. `sampler_kl` is the k3 estimate of KL(sampler || policy), the mean of
    rho - 1 - log rho with rho limited to 10, or a single response that has become likely would be all of it.
    """
    if not len(log_ratio):
        return {}
    normalised = (log_ratio - log_ratio.max()).exp()
    limited = log_ratio.clamp(max=_LARGEST_KL_LOG_RATIO)
    return {
        "log_ratio_mean": float(log_ratio.mean()),
        "log_ratio_std": float(log_ratio.std(correction=0)),
        "log_ratio_min": float(log_ratio.min()),
        "log_ratio_max": float(log_ratio.max()),
        "effective_sample_ratio": float(normalised.sum().square() / (normalised.square().sum() * len(log_ratio))),
        "sampler_kl": float((limited.exp() - 1 - limited).mean()),
    }


@torch.no_grad()
def log_ratios_by_advantage(log_ratio_BK: Tensor, measured_BK: Tensor, reward_BK: Tensor) -> dict[str, float]:
    """Return the mean of log pi / mu over responses with a reward above and below the mean of their group.

    On fresh data both are near 0. Training on stale data should raise the first; if it falls, good answers that were
    sampled are being lost. `measured_BK` is whether the log-ratio of a response says anything.
    """
    advantage_BK = centred(reward_BK)
    chosen = {"positive": measured_BK & (advantage_BK > 0), "negative": measured_BK & (advantage_BK < 0)}
    return {f"log_ratio_{sign}": float(log_ratio_BK[rows_BK].mean()) for sign, rows_BK in chosen.items()}


@torch.no_grad()
def mass_metrics(
    log_ratio_BK: Tensor, sampled_BK: Tensor, measured_BK: Tensor, responses: Sequence[bytes]
) -> dict[str, float]:
    """Return the probability of all sampled responses of a prompt, as they were sampled and under the policy.

    Means over the prompts that have a response in `measured_BK`. A response that was sampled several times counts once,
    with the mean of its probabilities; `responses` are the tokens of each, B x K of them. Where few responses are
    likely, `sampled_mass` is near 1, and a `policy_mass` below it is probability of responses that were never sampled,
    which no reward corrects. Responses of a prompt may be from several policies, whose probabilities can add up to
    more: a prompt has at most 1.
    """
    samples = sampled_BK.shape[1]
    copies: dict[tuple[int, bytes], list[int]] = {}
    for index in measured_BK.flatten().nonzero()[:, 0].tolist():
        copies.setdefault((index // samples, responses[index]), []).append(index)

    def mean_mass(logprob_BK: Tensor) -> float:
        probability = logprob_BK.flatten().exp()
        mass: dict[int, float] = {}
        for (prompt, _), indices in copies.items():
            mass[prompt] = mass.get(prompt, 0.0) + float(probability[indices].mean())
        return sum(min(one, 1.0) for one in mass.values()) / len(mass)

    return {"sampled_mass": mean_mass(sampled_BK), "policy_mass": mean_mass(sampled_BK + log_ratio_BK)}


# Names and upper ends of the bins of the staleness histogram. One more bin has no upper end.
_STALENESS_BINS = (("0", 0), ("1", 1), ("2_3", 3), ("4_7", 7), ("8_15", 15), ("16_31", 31), ("32_63", 63))


def staleness_metrics(staleness_BK: Tensor) -> dict[str, float]:
    """Return mean, maximum and histogram of the staleness in optimiser steps; the fractions of the bins sum to 1."""
    metrics = {"staleness_mean": float(staleness_BK.mean()), "staleness_max": float(staleness_BK.max())}
    below = 0.0
    for name, last in _STALENESS_BINS:
        up_to = float((staleness_BK <= last).double().mean())
        metrics[f"staleness_share_{name}"] = up_to - below
        below = up_to
    return metrics | {"staleness_share_64_up": 1.0 - below}


def truncated_fraction(log_ratio: Tensor, bounds: tuple[float, float] | None) -> dict[str, float]:
    """Return the fraction of ratios pi / mu outside `bounds`, or {} for an objective without bounds."""
    if bounds is None or not log_ratio.numel():
        return {}
    ratio = log_ratio.double().clamp(max=LARGEST_LOG_RATIO).exp()
    return {"truncated_fraction": float(((ratio < bounds[0]) | (ratio > bounds[1])).double().mean())}


def mismatch_metrics(difference: Tensor) -> dict[str, float]:
    """Return how far the trainer's log-probabilities are from the engine's, or {} if no token is on-policy.

    `difference` is trainer minus engine, of tokens sampled from the current weights. `mismatch_kl` is the k3 estimate
    of KL(engine || trainer) per token.
    """
    if not len(difference):
        return {}
    k3 = difference.double().clamp(max=LARGEST_LOG_RATIO).exp() - 1 - difference.double()
    return {
        "mismatch_mean": float(difference.abs().mean()),
        "mismatch_max": float(difference.abs().max()),
        "mismatch_kl": float(k3.mean()),
    }


def reward_part_metrics(
    parts: Sequence[dict[str, float]], turn_rewards: Sequence[Sequence[float]] = ()
) -> dict[str, float]:
    """Return the mean of each reward part, over the responses that have it.

    The parts of an episode, a row with `turn_rewards`, are sums over its turns, in which one that is not given is 0.
    """
    names = sorted({name for part in parts for name in part})
    sums = [dict.fromkeys(names, 0.0) | part if turns else part for part, turns in zip_longest(parts, turn_rewards)]
    found = {name: [part[name] for part in sums if name in part] for name in names}
    return {f"reward_part_{name}": sum(values) / len(values) for name, values in found.items()}


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
    token_log_ratios = _token_log_ratios(log_ratio_R, rows, finite["log_ratio"])
    return RowNumbers(**finite, skipped=unused, token_log_ratios=token_log_ratios)


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
