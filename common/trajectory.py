"""A batch of trajectories: one column per field, one flat array per kind of token data.

Shape suffixes: N trajectories, P prompt tokens of all of them, R response tokens, V version runs.

A *version run* is a pair (policy version, number of tokens): a response that spans a hot reload has
several, and their lengths add up to the length of the response.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from tba.common.errors import WireError
from tba.common.quantity import quantity

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

STOP_EOS = "eos"
STOP_LENGTH = "length"
STOP_ERROR = "error"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One prompt and one response to it.

    `logprobs` are natural-log probabilities of the response tokens under the distribution they were
    sampled from (temperature and top-p included). `lease` is the prompt visit that this answers.
    """

    prompt_key: str
    lease: int
    prompt_ids: Int32
    response_ids: Int32
    logprobs: Float32
    version_runs: Int32  # [V, 2]
    reward: float
    reward_parts: dict[str, float]
    stop_reason: str
    sampling: dict[str, Any]
    created_at: float  # Unix time, seconds
    generation_seconds: float
    text: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    loss_mask: UInt8 = field(default_factory=lambda: np.zeros(0, np.uint8))  # empty: every token counts
    reference_logprob: float | None = None  # of the counting tokens at temperature 1; None leaves it to the trainer

    @property
    def policy_version(self) -> int:
        """The oldest version that produced a token: what staleness is counted from."""
        return int(self.version_runs[:, 0].min())


ROW_COLUMNS = (
    "prompt_key",
    "lease",
    "reward",
    "reward_parts",
    "stop_reason",
    "sampling",
    "created_at",
    "generation_seconds",
    "text",
    "error",
    "metadata",
)


@dataclass(frozen=True)
class ArrayKind:
    """How one kind of token data travels: `width` numbers of `dtype` per unit."""

    name: str
    dtype: str
    width: int

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes of one token, or of one version run."""
        return np.dtype(self.dtype).itemsize * self.width


ARRAY_KINDS = (
    ArrayKind("prompt_ids", "<i4", 1),
    ArrayKind("response_ids", "<i4", 1),
    ArrayKind("logprobs", "<f4", 1),
    ArrayKind("version_runs", "<i4", 2),
    ArrayKind("loss_mask", "|u1", 1),
)

PROMPT_IDS, RESPONSE_IDS, LOGPROBS, VERSION_RUNS, _ = range(len(ARRAY_KINDS))  # their places


def pack(trajectories: Sequence[Trajectory]) -> tuple[dict[str, Any], list[bytes]]:
    """Columns for a message header, and one frame per array kind for the whole batch."""
    columns: dict[str, Any] = {name: [getattr(t, name) for t in trajectories] for name in ROW_COLUMNS}
    if any(t.reference_logprob is not None for t in trajectories):
        columns["reference_logprob"] = [t.reference_logprob for t in trajectories]
    frames = []
    for kind in ARRAY_KINDS:
        arrays = [getattr(t, kind.name) for t in trajectories]
        columns[f"{kind.name}_count"] = [len(array) for array in arrays]
        frames.append(b"".join(np.ascontiguousarray(array, dtype=kind.dtype).tobytes() for array in arrays))
    return columns, frames


def slices(sizes: Sequence[int], frame: memoryview) -> list[memoryview]:
    """Cut a frame into one view per trajectory, of so many bytes each, without copying or decoding."""
    if not frame.nbytes:
        return [frame] * len(sizes)
    stops = list(accumulate(sizes))
    return list(map(frame.__getitem__, map(slice, [0, *stops], stops)))


def check_frames(columns: dict[str, Any], frames: Sequence[memoryview]) -> None:
    """Raise WireError unless every frame is as long as its column of counts says."""
    if len(frames) != len(ARRAY_KINDS):
        raise WireError(f"{quantity(len(frames), 'array frame')} where {len(ARRAY_KINDS)} are needed")
    for kind, frame in zip(ARRAY_KINDS, frames, strict=True):
        expected = sum(columns[f"{kind.name}_count"]) * kind.unit_bytes
        if frame.nbytes != expected:
            raise WireError(f"frame {kind.name} has {frame.nbytes} bytes, its counts add up to {expected}")
    if columns["logprobs_count"] != columns["response_ids_count"]:
        raise WireError("logprobs and response_ids differ in length: one log-probability belongs to each token")
    _check_version_runs(columns, frames)
    if any(columns["loss_mask_count"]):
        _check_loss_mask(columns)


def _check_loss_mask(columns: dict[str, Any]) -> None:
    for masked, tokens in zip(columns["loss_mask_count"], columns["response_ids_count"], strict=True):
        if masked not in (0, tokens):
            raise WireError(
                f"a loss mask has {quantity(masked, 'entry', 'entries')} for {quantity(tokens, 'response token')}"
            )


def _check_version_runs(columns: dict[str, Any], frames: Sequence[memoryview]) -> None:
    """Every response token has one version: the lengths of the runs add up to the response."""
    if not columns["version_runs_count"]:
        return
    runs = np.frombuffer(frames[VERSION_RUNS], "<i4").reshape(-1, 2)
    if len(runs) == len(columns["version_runs_count"]):  # no response spans a hot reload: what most puts are
        covered = runs[:, 1].tolist()
    else:
        starts = np.cumsum([0, *columns["version_runs_count"][:-1]])
        covered = np.add.reduceat(runs[:, 1], starts, dtype=np.int64).tolist()
        # Only an empty response has an empty run: otherwise a row could have more runs than tokens.
        in_row = np.repeat(np.array(covered) > 0, columns["version_runs_count"])
        if (runs[in_row, 1] == 0).any():
            raise WireError("version runs hold a negative number or an empty run")
    if covered != columns["response_ids_count"]:
        pairs = enumerate(zip(covered, columns["response_ids_count"], strict=True))
        row, tokens = next((row, tokens) for row, (length, tokens) in pairs if length != tokens)
        raise WireError(f"the version runs of row {row} do not cover its {quantity(tokens, 'response token')}")
    if runs.min() < 0:
        raise WireError("version runs hold a negative number or an empty run")


def check_tokens(columns: dict[str, Any], frames: Sequence[memoryview], *, failed: Sequence[bool]) -> None:
    """Raise WireError for what no model can have produced; rows of failed rollouts may be empty."""
    for name, place in (("prompt_ids", PROMPT_IDS), ("response_ids", RESPONSE_IDS)):
        if np.frombuffer(frames[place], "<i4").min(initial=0) < 0:
            raise WireError(f"negative token id in {name}")
        counts = columns[f"{name}_count"]
        if 0 in counts and any(not count and not bad for count, bad in zip(counts, failed, strict=True)):
            raise WireError(f"a trajectory without an error has empty {name}")
    logprobs = np.frombuffer(frames[LOGPROBS], "<f4")
    # A sum is finite only if all of it is, and is had in a quarter of the time; one that is not may be an overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        total = logprobs.sum()
    if not math.isfinite(total) and not np.isfinite(logprobs).all():
        raise WireError("a log-probability is not finite")


def version_runs_of(columns: dict[str, Any], frames: Sequence[memoryview]) -> list[npt.NDArray[Any]]:
    """The version runs of each trajectory, [V, 2]."""
    return arrays_of(columns["version_runs_count"], ARRAY_KINDS[VERSION_RUNS], frames[VERSION_RUNS])


def arrays_of(counts: Sequence[int], kind: ArrayKind, frame: memoryview) -> list[npt.NDArray[Any]]:
    """Decode a frame into one array per trajectory: [count] or [count, width]."""
    shape = (-1,) if kind.width == 1 else (-1, kind.width)
    views = slices([count * kind.unit_bytes for count in counts], frame)
    return [np.frombuffer(view, dtype=kind.dtype).reshape(shape) for view in views]


def unpack_arrays(columns: dict[str, Any], frames: Sequence[memoryview]) -> dict[str, list[npt.NDArray[Any]]]:
    """The arrays of a checked batch by kind, one per trajectory."""
    return {
        kind.name: arrays_of(columns[f"{kind.name}_count"], kind, frame)
        for kind, frame in zip(ARRAY_KINDS, frames, strict=True)
    }
