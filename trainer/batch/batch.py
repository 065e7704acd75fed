"""A batch of the buffer as the trainer uses it: rows, rewards, reference log-probabilities.

Shape suffixes: B prompts, K samples of each, N rows of a forward pass, T tokens of the longest of them,
R response tokens of all of them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from tba.common.errors import ConfigError, WireError
from tba.common.wire.messages import Batch
from tba.common.wire.trajectory import ARRAY_KINDS, Float32, Int32, UInt8, kept_between, sequence_spans, unpack_arrays


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory: its tokens, and the log-probabilities with which the engine sampled them.

    `sampling_logprobs` and `loss_mask` have one entry per response token; a token with mask 0 does not count.
    They are of softmax(logits / `temperature`) over the `kept` tokens (`tba.common.wire.trajectory`), empty for all of
    the vocabulary; 0 means that they are of no such distribution, or unknown. `on_policy` means: sampled from it with
    the weights that are being trained; `explored`: by an explorer (`search.policy`). `segments` are the positions in
    the response at which a new context begins, usually none.
    """

    id: int
    prompt_ids: Int32
    response_ids: Int32
    sampling_logprobs: Float32
    loss_mask: UInt8
    on_policy: bool
    temperature: float = 1.0
    segments: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    kept: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    explored: bool = False

    @property
    def tokens(self) -> int:
        """Length of prompt and response, which is that of all its sequences."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Where the turns, the maximal runs of counted tokens, start and end in the response."""
        edges = np.flatnonzero(np.diff(self.loss_mask != 0, prepend=False, append=False)).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        return sequence_spans(self.loss_mask, self.segments)

    @property
    def sequences(self) -> list["Row"]:
        """The sequences of the row, each as a row that a model computes by itself; usually the row itself."""
        if not len(self.segments):
            return [self]
        return [
            dataclasses.replace(
                self,
                prompt_ids=self.response_ids[start:first] if first else self.prompt_ids,
                response_ids=self.response_ids[first:end],
                sampling_logprobs=self.sampling_logprobs[first:end],
                loss_mask=self.loss_mask[first:end],
                segments=self.segments[:0],
                kept=kept_between(self.kept, first, end),
            )
            for start, first, end in self.spans
        ]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """B x K trajectories; row i belongs to prompt i // K.

    `reward_BK`, `reference_BK` and `staleness_BK` are float64: the reward, the reference log-probability of the whole
    response (NaN where the buffer has none) and the staleness in optimiser steps. `reward_parts` is one dict per row,
    or empty. `recency_window` is in optimiser steps; `recency_missed` is the fraction of the prompts drawn by recency
    that have no data within it, NaN if none was. `reuse_mean` is how often earlier batches had each trajectory, on
    average. `turn_rewards` are those of the turns of each row, or empty if no row is an episode. `guided` says which
    rows are of guided visits, or is empty if none is.
    """

    step: int
    rows: list[Row]
    reward_BK: Tensor
    reference_BK: Tensor
    staleness_BK: Tensor
    reward_parts: list[dict[str, float]] = field(default_factory=list)
    recency_window: int = 0
    recency_missed: float = math.nan
    reuse_mean: float = math.nan
    turn_rewards: list[list[float]] = field(default_factory=list)
    guided: list[bool] = field(default_factory=list)

    @property
    def prompts(self) -> int:
        return self.reward_BK.shape[0]

    @property
    def samples(self) -> int:
        return self.reward_BK.shape[1]


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows as the input of a model: padded to the same length, or packed into one (`tba.trainer.model.packing`).

    Positions index the flattened `tokens_NT`: row n starts at `starts[n]`, and response token r is predicted at
    `source_R[r]`. `lengths` are the response tokens of each row and sum to R. `model_kwargs` are further arguments of
    the model's forward.
    """

    tokens_NT: Tensor
    source_R: Tensor
    starts: list[int]
    prompt_lengths: list[int]
    lengths: list[int]
    model_kwargs: dict[str, Any] = field(default_factory=dict)


def decode(batch: Batch, frames: Sequence[memoryview], *, prompts: int, samples: int) -> TrainBatch:
    """Decode the buffer's reply into a batch of `prompts` x `samples` rows.

    Raises ConfigError if it has another shape, WireError if a group mixes prompts or a prompt is empty.
    """
    if len(batch.trajectory_ids) != prompts * samples:
        raise ConfigError(
            f"step {batch.step} is recorded with {len(batch.trajectory_ids)} trajectories, the configuration asks "
            f"for {prompts} x {samples}: train.prompts_per_step and samples_per_prompt cannot change within a run"
        )
    for start in range(0, len(batch.prompt_key), samples):
        # Log Z, a mean over the group, would mix prompts silently.
        if len(set(batch.prompt_key[start : start + samples])) != 1:
            raise WireError(f"slots {start} to {start + samples - 1} of step {batch.step} are of several prompts")
    reference = [math.nan if value is None else value for value in batch.reference_logprobs]
    return TrainBatch(
        step=batch.step,
        rows=_rows(batch, frames),
        reward_BK=torch.tensor(batch.reward, dtype=torch.float64).view(prompts, samples),
        reference_BK=torch.tensor(reference, dtype=torch.float64).view(prompts, samples),
        staleness_BK=torch.tensor(batch.staleness, dtype=torch.float64).view(prompts, samples),
        reward_parts=batch.reward_parts,
        recency_window=batch.recency_window,
        recency_missed=batch.recency_missed / batch.recency_groups if batch.recency_groups else math.nan,
        reuse_mean=batch.reuse_mean,
        turn_rewards=batch.turn_rewards or [],
        guided=batch.guided or [],
    )


def _rows(batch: Batch, frames: Sequence[memoryview]) -> list[Row]:
    columns = {f"{kind.name}_count": getattr(batch, f"{kind.name}_count") for kind in ARRAY_KINDS}
    arrays = unpack_arrays(columns, frames)
    rows = []
    for i, id_ in enumerate(batch.trajectory_ids):
        temperature = batch.temperature[i]
        on_policy = batch.staleness[i] == 0 and batch.policy_version[i] >= 0 and temperature > 0
        own, is_explored = {name: arrays[name][i] for name in arrays}, bool(batch.explored and batch.explored[i])
        rows.append(row_of_arrays(id_, own, temperature, on_policy=on_policy, explored=is_explored))
    return rows


def row_of_arrays(
    id_: int, arrays: Mapping[str, Any], temperature: float, *, on_policy: bool = False, explored: bool = False
) -> Row:
    """Return the row of a trajectory whose arrays are those of ARRAY_KINDS. Raises WireError for an empty prompt."""
    if len(arrays["prompt_ids"]) == 0:
        raise WireError(f"trajectory {id_} has an empty prompt: nothing predicts its first response token")
    response, mask = arrays["response_ids"], arrays["loss_mask"]
    return Row(
        id=id_,
        prompt_ids=arrays["prompt_ids"],
        response_ids=response,
        sampling_logprobs=arrays["logprobs"],
        loss_mask=mask if len(mask) else np.ones(len(response), np.uint8),
        on_policy=on_policy,
        explored=explored,
        temperature=temperature,
        segments=arrays["segments"],
        # Greedy responses and demonstrations are of no distribution.
        kept=arrays["kept"] if temperature else arrays["kept"][:0],
    )


def plain_row(id_: int, prompt_ids: Sequence[int] | Int32, response_ids: Sequence[int] | Int32) -> Row:
    """Return a row of an unknown sampler, of which all response tokens count."""
    size = len(response_ids)
    tokens = np.asarray(prompt_ids, np.int32), np.asarray(response_ids, np.int32)
    return Row(id_, *tokens, np.zeros(size, np.float32), np.ones(size, np.uint8), on_policy=False, temperature=0.0)


def pack_batch(batch: TrainBatch) -> bytes:
    """Encode a batch for `Ranks.send`, as msgpack. Reward parts are left out: only rank 0 records them."""
    fields = dataclasses.asdict(dataclasses.replace(batch, reward_parts=[]))
    packed: bytes = msgpack.packb(fields, default=_array_fields)
    return packed


def unpack_batch(packed: bytes) -> TrainBatch:
    """Decode a batch of `pack_batch`. It is equal bit for bit, except that it has no reward parts."""
    fields = _with_arrays(msgpack.unpackb(packed))
    rows = [Row(**_with_arrays(row)) for row in fields.pop("rows")]
    tensors = {name: torch.tensor(value) for name, value in fields.items() if isinstance(value, np.ndarray)}
    return TrainBatch(**{**fields, **tensors, "rows": rows})


def _array_fields(array: Any) -> dict[str, Any]:
    values = np.asarray(array)
    return {"dtype": values.dtype.str, "shape": list(values.shape), "bytes": values.tobytes()}


def _with_arrays(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: np.frombuffer(value["bytes"], value["dtype"]).reshape(value["shape"])
        if isinstance(value, dict)
        else value
        for name, value in fields.items()
    }


def pad(rows: Sequence[Row], device: torch.device) -> Layout:
    """Pad rows on the right with token 0.

    No attention mask is needed: attention is causal, and padding comes after every token that counts.
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


def known(rows: Sequence[Row]) -> Tensor:
    """Return which rows have sampling log-probabilities that can be compared with a policy's: [N], bool."""
    return torch.tensor([row.temperature > 0 for row in rows])


def measured(rows: Sequence[Row]) -> Tensor:
    """Return which rows show how far the policy has moved since it sampled: [N], bool.

    A sampler is known that was an earlier policy, and a token counts: the log-ratio of a response without any is an
    empty sum, and to an explorer it says how far that one is.
    """
    return known(rows) & ~explored(rows) & torch.tensor([bool(row.loss_mask.any()) for row in rows])


def explored(rows: Sequence[Row]) -> Tensor:
    """Return which rows an explorer sampled: [N], bool."""
    return torch.tensor([row.explored for row in rows])


def counted(rows: Sequence[Row]) -> Tensor:
    """Return which response tokens of the rows count: [R], bool."""
    return torch.from_numpy(np.concatenate([row.loss_mask for row in rows]) != 0)
