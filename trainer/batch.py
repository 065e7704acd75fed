"""A batch of the buffer as the trainer uses it, cut into micro-batches of whole prompt groups.

Shape suffixes: B prompts, K samples of each, N rows of a micro-batch, T tokens of the longest of them,
R response tokens of all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.common.errors import ConfigError, WireError
from tba.common.trajectory import ARRAY_KINDS, Float32, Int32, UInt8, unpack_arrays
from tba.common.wire import Batch


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory: its tokens, and what its sampler said of them."""

    id: int
    prompt_ids: Int32
    response_ids: Int32
    sampling_logprobs: Float32
    loss_mask: UInt8  # one entry per response token; 0 does not count
    on_policy: bool  # sampled at temperature 1 and top-p 1 from the weights that now train

    @property
    def tokens(self) -> int:
        """Length of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """B x K trajectories; row i belongs to prompt i // K. `reference_BK` is NaN where nothing is stored.

    `reward_parts` is one dict per row, or nothing at all.
    """

    step: int
    rows: list[Row]
    reward_BK: Tensor
    reference_BK: Tensor
    staleness_BK: Tensor
    reward_parts: list[dict[str, float]] = field(default_factory=list)

    @property
    def prompts(self) -> int:
        """B."""
        return self.reward_BK.shape[0]

    @property
    def samples(self) -> int:
        """K."""
        return self.reward_BK.shape[1]


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows as a model takes them: side by side and padded, or packed into one (`tba.trainer.packing`).

    Flat positions count through `tokens_NT` row by row: a row begins at `starts[n]`, and response token r is predicted
    at `source_R[r]`.
    """

    tokens_NT: Tensor
    source_R: Tensor
    starts: list[int]
    prompt_lengths: list[int]
    lengths: list[int]  # response tokens of each row, summing to R
    told: dict[str, Any] = field(default_factory=dict)  # what the model's forward gets beside the tokens


def decode(batch: Batch, frames: Sequence[memoryview], *, prompts: int, samples: int) -> TrainBatch:
    """The batch of a step. Raises ConfigError if it has not the asked shape, WireError if groups are mixed."""
    if len(batch.trajectory_ids) != prompts * samples:
        raise ConfigError(
            f"step {batch.step} is recorded with {len(batch.trajectory_ids)} trajectories, the configuration asks "
            f"for {prompts} x {samples}: train.prompts_per_step and samples_per_prompt cannot change within a run"
        )
    _check_groups(batch, samples)
    reference = [float("nan") if value is None else value for value in batch.reference_logprobs]
    return TrainBatch(
        step=batch.step,
        rows=_rows(batch, frames),
        reward_BK=torch.tensor(batch.reward, dtype=torch.float64).view(prompts, samples),
        reference_BK=torch.tensor(reference, dtype=torch.float64).view(prompts, samples),
        staleness_BK=torch.tensor(batch.staleness, dtype=torch.float64).view(prompts, samples),
        reward_parts=batch.reward_parts,
    )


def _check_groups(batch: Batch, samples: int) -> None:
    """log Z is a mean over the samples of one prompt; a batch in another order would mix prompts silently."""
    for start in range(0, len(batch.prompt_key), samples):
        if len(set(batch.prompt_key[start : start + samples])) != 1:
            raise WireError(f"slots {start} to {start + samples - 1} of step {batch.step} are of several prompts")


def _rows(batch: Batch, frames: Sequence[memoryview]) -> list[Row]:
    columns = batch.model_dump(include={f"{kind.name}_count" for kind in ARRAY_KINDS})
    arrays = unpack_arrays(columns, frames)
    rows = []
    for i, id_ in enumerate(batch.trajectory_ids):
        response = arrays["response_ids"][i]
        mask = arrays["loss_mask"][i]
        if len(arrays["prompt_ids"][i]) == 0:
            raise WireError(f"trajectory {id_} has an empty prompt: nothing predicts its first response token")
        rows.append(
            Row(
                id=id_,
                prompt_ids=arrays["prompt_ids"][i],
                response_ids=response,
                sampling_logprobs=arrays["logprobs"][i],
                loss_mask=mask if len(mask) else np.ones(len(response), np.uint8),
                on_policy=batch.staleness[i] == 0 and batch.plain_sampling[i],
            )
        )
    return rows


def cut(groups: Sequence[Sequence[int]], tokens_of: Callable[[int], int], limit: int) -> list[list[int]]:
    """Put whole groups of rows together so that micro-batches stay within `limit` tokens, padding not counted.

    Returns indices into `groups`, longest first. A group that is over the limit by itself stands alone.
    """
    sizes = [sum(tokens_of(row) for row in group) for group in groups]
    parts: list[list[int]] = []
    room = 0
    for group in sorted(range(len(groups)), key=lambda index: -sizes[index]):
        if not parts or sizes[group] > room:
            parts.append([])
            room = limit
        parts[-1].append(group)
        room -= sizes[group]
    return parts


def by_length(lengths: Sequence[int], overhead: int) -> list[list[int]]:
    """Cut rows into forward passes of rows of like length, where the least is computed.

    A pass costs its rows times the longest of them, plus `overhead`, the tokens that a pass more is worth. Returns
    indices into `lengths`, each exactly once. The best cut of the sorted rows, by dynamic programming, O(N^2).
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best = np.zeros(len(order) + 1)  # least cost of the first n rows
    start_of = np.zeros(len(order) + 1, int)  # where their last pass begins
    for end in range(1, len(order) + 1):
        costs = best[:end] + np.arange(end, 0, -1) * lengths[order[end - 1]]
        start_of[end] = int(costs.argmin())
        best[end] = costs[start_of[end]] + overhead
    passes, end = [], len(order)
    while end > 0:
        passes.append(order[start_of[end] : end])
        end = start_of[end]
    return passes


def pad(rows: Sequence[Row], device: torch.device) -> Layout:
    """Rows side by side, padded on the right with token 0.

    There is no attention mask: attention is causal, and padding comes after everything that counts.
    """
    width = max(row.tokens for row in rows)
    tokens = np.zeros((len(rows), width), np.int64)
    sources = []
    for n, row in enumerate(rows):
        tokens[n, : row.tokens] = np.concatenate([row.prompt_ids, row.response_ids])
        first = n * width + len(row.prompt_ids) - 1
        sources.append(np.arange(first, first + len(row.response_ids)))
    return Layout(
        tokens_NT=torch.from_numpy(tokens).to(device),
        source_R=torch.from_numpy(np.concatenate(sources)).to(device),
        starts=list(range(0, len(rows) * width, width)),
        prompt_lengths=[len(row.prompt_ids) for row in rows],
        lengths=[len(row.response_ids) for row in rows],
    )


def counted(rows: Sequence[Row]) -> Tensor:
    """[R], bool: which response tokens of the rows count."""
    return torch.from_numpy(np.concatenate([row.loss_mask for row in rows]) != 0)
