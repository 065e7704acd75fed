"""The checks of a snapshot: before an engine touches its weights, and by its canary afterwards.

The check before reads headers and the manifest; no tensor is loaded here.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.common.errors import CanaryMismatch, SnapshotError, SnapshotRefused, quantity
from tba.common.log import get_logger
from tba.common.weights import adapter
from tba.common.weights.snapshot import Canary, Snapshot
from tba.common.weights.tensor_file import read_layout
from tba.common.wire.trajectory import Float32
from tba.searcher.engines.engine import Mismatch, in_vocabulary

log = get_logger(__name__)

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})

# As a fraction of the tolerance: rounding makes single tokens differ far more than the mean, wrong weights all of them.
_MEAN_FRACTION = 0.25
# Later snapshots may deviate by these multiples of the calibrated deviation. The KL grows with its square.
_MARGINS = Mismatch(3.0, 3.0, 9.0)
# The calibration may reach this multiple of the limits without it. Wrong weights differ by more.
_WIDEST = 8.0
# In config.json, for models with routed experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# By name: safetensors dtype and shape.
TensorShapes = dict[str, tuple[str, tuple[int, ...]]]
# `Engine.score`.
Score = Callable[[Sequence[Sequence[int]]], list[Float32]]


@dataclass(eq=False)
class Acceptance:
    """What an engine accepts: weights of these shapes, whose canary differs by at most some limits.

    The limits follow from `tolerance`, the largest difference of a dense model. The first snapshot of the weights that
    an engine was started with calibrates them: it shows how far two right computations are apart.

    `vocabulary` is the number of token ids. `copies` are names that a snapshot may hold too: the model has these
    tensors under one of `shapes`. `routed` is whether rounding may choose other experts, or weights are quantized:
    single tokens then differ by several nats.
    """

    shapes: TensorShapes
    vocabulary: int
    tolerance: InitVar[float]
    copies: Collection[str] = ()
    routed: bool = False
    # Until the first snapshot is accepted, which may calibrate.
    uncalibrated: bool = True

    def __post_init__(self, tolerance: float) -> None:
        # The estimate of the KL divergence is about d * d / 2 for a difference d.
        largest = math.inf if self.routed else tolerance
        self._limits = Mismatch(largest, tolerance * _MEAN_FRACTION, tolerance**2 / 2)

    def check(self, snapshot: Snapshot) -> None:
        """Raise SnapshotError unless this is a snapshot of the model that the engine serves."""
        name = f"v{snapshot.manifest.version}"
        if not snapshot.weight_files:
            raise SnapshotError(f"{name} is based on v{snapshot.manifest.base}, and its complete weights are missing")
        if difference := shape_difference(self.shapes, tensor_shapes(snapshot.weight_files, without=self.copies)):
            raise SnapshotRefused(f"{name} does not hold the weights of the model that is served: {difference}")
        if snapshot.adapter is not None and (problem := self._adapter_problem(snapshot.adapter)):
            raise SnapshotRefused(f"{name} is an adapter of another model: {problem}")
        if problem := self._canary_problem(snapshot.manifest.canary):
            raise SnapshotRefused(f"{name} has an unusable canary: {problem}")

    def _adapter_problem(self, directory: Path) -> str | None:
        for name, one in adapter.load(directory).factors.items():
            shape = (one.b.shape[0], one.a.shape[1])
            if name not in self.shapes or self.shapes[name][1] != shape:
                return f"it changes {name!r} of shape {list(shape)}"
        return None

    def _canary_problem(self, canary: Canary) -> str | None:
        if not canary.sequences or len(canary.sequences) != len(canary.logprobs):
            return f"it has logprobs for {len(canary.logprobs)} of {quantity(len(canary.sequences), 'sequence')}"
        for number, (ids, logprobs) in enumerate(zip(canary.sequences, canary.logprobs, strict=True), 1):
            if not 0 < len(logprobs) == len(ids) - 1:
                counts = f"{quantity(len(ids), 'token')} and {len(logprobs)} log-probabilities"
                return f"sequence {number} has {counts}: it needs one for each token but the first"
            if not in_vocabulary(ids, self.vocabulary):
                return f"sequence {number} has token ids outside 0 to {self.vocabulary - 1}"
        return None

    def check_canary(self, score: Score, snapshot: Snapshot, *, context: int, calibrate: bool = False) -> Mismatch:
        """Score the canary with freshly loaded weights, and compare with the trainer's log-probabilities.

        Of a sequence that fills the engine's `context`, the beginning is scored. With `calibrate` the mismatch may be
        larger, and sets the limits of later snapshots. Raises CanaryMismatch above the limits, and for NaN.

        This detects wrong weights, not stale ones: one optimiser step may change less than bfloat16 rounds. The engine
        itself must check that the new weights are in place.
        """
        canary = snapshot.manifest.canary
        scores = score([sequence[: context - 1] for sequence in canary.sequences])
        expected = [logprobs[: len(one)] for one, logprobs in zip(scores, canary.logprobs, strict=True)]
        found = mismatch(np.concatenate(scores), np.concatenate(expected))
        self.accept(found, snapshot.manifest.version, calibrate=calibrate)
        return found

    def accept(self, found: Mismatch, version: int, *, calibrate: bool = False) -> None:
        """Raise CanaryMismatch if the mismatch of a version exceeds the limits. See `check_canary`."""
        widest = Mismatch(*(_WIDEST * limit for limit in self._limits))
        limits = widest if calibrate else self._limits
        # One with NaN is not accepted.
        if not all(value <= limit and value < math.inf for value, limit in zip(found, limits, strict=True)):
            raise CanaryMismatch(
                f"v{version} does not match the trainer: its log-probabilities differ by {found.maximum:.3g} on the "
                f"canary and by {found.mean:.3g} in the mean, with a KL divergence of {found.kl:.3g}; "
                f"{limits.maximum:.3g}, {limits.mean:.3g} and {limits.kl:.3g} are allowed"
            )
        if calibrate:
            # Of later snapshots, when the same weights already differ by `found`.
            bounds = zip(self._limits, found, _MARGINS, widest, strict=True)
            self._limits = Mismatch(*(min(max(limit, margin * one), most) for limit, one, margin, most in bounds))
            log.info("canary calibrated", version=version, **found._asdict(), limits=self._limits._asdict())


def routes_or_quantizes(config: dict[str, Any]) -> bool:
    """Whether a model's config.json says that it has routed experts or quantized weights."""
    parts = [config, config.get("text_config") or {}]
    return any(part.get("quantization_config") or any(part.get(key) for key in _EXPERTS) for part in parts)


def mismatch(engine: NDArray[Any], trainer: NDArray[Any]) -> Mismatch:
    """Compare log-probabilities [T] of the same tokens, in float64. NaN if any is."""
    difference = np.asarray(engine, np.float64) - np.asarray(trainer, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        kl = np.mean(np.expm1(difference) - difference)
    return Mismatch(float(np.abs(difference).max()), float(np.abs(difference).mean()), float(kl))


def tensor_shapes(files: Sequence[Path], *, without: Collection[str] = ()) -> TensorShapes:
    """Names, dtypes and shapes in safetensors files, from their headers, `without` some. Raises SnapshotError."""
    spans = {name: span for path in files for name, span in read_layout(path).spans.items() if name not in without}
    return {name: (span.dtype, span.shape) for name, span in spans.items()}


def shape_difference(expected: TensorShapes, found: TensorShapes) -> str | None:
    """Describe the first difference, or return None. Float dtypes may differ: engines cast."""
    if missing := sorted(expected.keys() - found.keys()):
        return f"{quantity(len(missing), 'tensor is', 'tensors are')} missing, for example {missing[0]!r}"
    if unknown := sorted(found.keys() - expected.keys()):
        return f"{quantity(len(unknown), 'tensor has', 'tensors have')} no place in it, for example {unknown[0]!r}"
    for name, (dtype, shape) in expected.items():
        found_dtype, found_shape = found[name]
        if found_shape != shape:
            return f"{name!r} has shape {list(found_shape)}, not {list(shape)}"
        if found_dtype != dtype and not {dtype, found_dtype} <= FLOAT_DTYPES:
            return f"{name!r} has dtype {found_dtype}, not {dtype}"
    return None
