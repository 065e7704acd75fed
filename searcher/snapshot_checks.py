"""What is checked of a snapshot before an engine touches its weights, and the proof after.

Headers and the manifest are enough: no tensor is loaded here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.common import adapter
from tba.common.errors import CanaryMismatch, SnapshotError
from tba.common.quantity import quantity
from tba.common.snapshot import Canary, Snapshot
from tba.searcher.engine import Engine, in_vocabulary

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})

# Rounding makes single tokens differ far more than their mean; wrong weights make all of them differ.
_MEAN_SHARE = 0.25

TensorShapes = dict[str, tuple[str, tuple[int, ...]]]  # name: (safetensors dtype, shape)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far an engine is from the trainer on the same tokens (`LoadReport` says what the numbers are)."""

    maximum: float
    mean: float
    kl: float


def check_snapshot(snapshot: Snapshot, expected: TensorShapes, *, tied: bool, vocabulary: int) -> None:
    """Raise SnapshotError unless a snapshot is one of the model that is served."""
    name = f"v{snapshot.manifest.version}"
    if not snapshot.weight_files:
        raise SnapshotError(f"{name} is based on v{snapshot.manifest.base}, and its complete weights are not here")
    if difference := shape_difference(expected, tensor_shapes(snapshot.weight_files, tied=tied)):
        raise SnapshotError(f"{name} does not hold the weights of the model that is served: {difference}")
    if problem := canary_problem(snapshot.manifest.canary, vocabulary):
        raise SnapshotError(f"{name} has an unusable canary: {problem}")


def on_one_base(snapshot: Snapshot, served: Snapshot) -> bool:
    """Whether both are adapters on the same base, and the first changes all that the second does.

    Then what the first changes of the base is also all that it changes of the second.
    """
    new, old = snapshot.manifest, served.manifest
    if {new.change, old.change} != {adapter.FILE} or new.base_manifest_sha256 != old.base_manifest_sha256:
        return False
    changed, before = (adapter.changed_by(one.path / adapter.FILE) for one in (snapshot, served))
    return before <= changed


def prove(engine: Engine, snapshot: Snapshot, tolerance: float, *, context: int) -> Mismatch:
    """Score the canary with freshly loaded weights, and compare with what the trainer has.

    Of a sequence that fills the engine's context the beginning is scored. Raises CanaryMismatch if the largest
    difference is over the tolerance, the mean over a quarter of it, or one is not a number.

    This finds wrong weights, not stale ones: what one optimiser step changes may be less than the rounding of
    bfloat16. That the new weights are in the engine is for the engine to check.
    """
    canary = snapshot.manifest.canary
    scores = engine.score([sequence[: context - 1] for sequence in canary.sequences])
    expected = [logprobs[: len(score)] for score, logprobs in zip(scores, canary.logprobs, strict=True)]
    found = mismatch(np.concatenate(scores), np.concatenate(expected))
    if not (found.maximum <= tolerance and found.mean <= tolerance * _MEAN_SHARE):
        raise CanaryMismatch(
            f"v{snapshot.manifest.version} is not what the trainer has: its log-probabilities differ by "
            f"{found.maximum:.3g} on the canary and by {found.mean:.3g} in the mean, {tolerance:.3g} and "
            f"{tolerance * _MEAN_SHARE:.3g} are allowed"
        )
    return found


def mismatch(engine: NDArray[Any], trainer: NDArray[Any]) -> Mismatch:
    """Compare log-probabilities [T] of the same tokens, in float64. NaN if any is."""
    difference = np.asarray(engine, np.float64) - np.asarray(trainer, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        kl = np.mean(np.expm1(difference) - difference)
    return Mismatch(float(np.abs(difference).max()), float(np.abs(difference).mean()), float(kl))


def tensor_shapes(files: Sequence[Path], *, tied: bool) -> TensorShapes:
    """Names, dtypes and shapes in safetensors files, from their headers. Raises SnapshotError.

    With tied embeddings a copy of the head may or may not have been saved: it is left out.
    """
    from safetensors import SafetensorError, safe_open

    shapes: TensorShapes = {}
    for path in files:
        try:
            with safe_open(str(path), framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  # a safe_open handle does not iterate
                    entry = file.get_slice(name)
                    shapes[name] = (entry.get_dtype(), tuple(entry.get_shape()))
        except (OSError, SafetensorError) as error:
            raise SnapshotError(f"{path} is not readable safetensors: {error}") from error
    if tied:
        shapes.pop("lm_head.weight", None)
    return shapes


def shape_difference(expected: TensorShapes, found: TensorShapes) -> str | None:
    """The first difference in a few words, or None. Any float dtype will do for another: vLLM casts."""
    if missing := sorted(expected.keys() - found.keys()):
        return f"{quantity(len(missing), 'tensor is', 'tensors are')} missing, {missing[0]!r} for one"
    if unknown := sorted(found.keys() - expected.keys()):
        return f"{quantity(len(unknown), 'tensor is', 'tensors are')} unknown, {unknown[0]!r} for one"
    for name, (dtype, shape) in expected.items():
        found_dtype, found_shape = found[name]
        if found_shape != shape:
            return f"{name!r} has shape {list(found_shape)}, not {list(shape)}"
        if found_dtype != dtype and not {dtype, found_dtype} <= FLOAT_DTYPES:
            return f"{name!r} has dtype {found_dtype}, not {dtype}"
    return None


def canary_problem(canary: Canary, vocabulary: int) -> str | None:
    """Why an engine could not score this canary, in a few words, or None."""
    if not canary.sequences:
        return "it has no sequence"
    if len(canary.sequences) != len(canary.logprobs):
        return f"{len(canary.sequences)} sequences with {len(canary.logprobs)} lists of log-probabilities"
    for ids, logprobs in zip(canary.sequences, canary.logprobs, strict=True):
        if len(ids) != len(logprobs) + 1:
            return f"a sequence of {len(ids)} tokens has {len(logprobs)} log-probabilities"
        if not in_vocabulary(ids, vocabulary):
            return f"a token id is outside the vocabulary of {vocabulary}"
    return None
