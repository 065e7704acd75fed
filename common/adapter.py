"""The file of an adapter snapshot: low-rank factors that make the complete weights of a full snapshot's.

A safetensors file. Of each weight NAME of the complete file that it changes:

    low/NAME       F32 [rank, in]    A of LoRA
    high/NAME      F32 [out, rank]   B of LoRA
    scaling/NAME   F32 [1]           alpha / rank, or what the adapters scale by

All other weights are the base's. How factors and base are merged is defined bit for bit in `tba.common.low_rank`.
Unlike a delta, an adapter must not be applied twice.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tba.common.errors import SnapshotCorrupt
from tba.common.low_rank import Factors, merge
from tba.common.quantity import quantity
from tba.common.tensor_file import Tensor, map_tensors, read_layout

FILE = "adapter.safetensors"

LOW, HIGH, SCALING = "low", "high", "scaling"


def tensors_of(factors: Mapping[str, Factors]) -> dict[str, Tensor]:
    """The tensors of an adapter file."""
    return {
        f"{kind}/{name}": Tensor("F32", array.shape, np.ascontiguousarray(array).reshape(-1).view("<u4"))
        for name, factor in factors.items()
        for kind, array in ((LOW, factor.low), (HIGH, factor.high), (SCALING, np.array([factor.scaling])))
    }


def read_factors(path: Path) -> dict[str, Factors]:
    """The factors in an adapter file. Raises SnapshotError if there is none, SnapshotCorrupt if it is malformed."""
    tensors = map_tensors(path)
    names = [key.removeprefix(f"{LOW}/") for key in tensors if key.startswith(f"{LOW}/")]
    if len(tensors) != 3 * len(names):
        found = f"{quantity(len(tensors), 'tensor')} for {quantity(len(names), 'adapter')}"
        raise SnapshotCorrupt(f"{path} has {found}: three belong to each")
    return {name: _factors(path, name, tensors) for name in names}


def changed_by(path: Path) -> set[str]:
    """The names of the weights that an adapter file changes. Raises as `read_factors`."""
    return {key.removeprefix(f"{LOW}/") for key in read_layout(path).spans if key.startswith(f"{LOW}/")}


def apply_adapter(path: Path, weights: Mapping[str, Tensor], *, threads: int = 0) -> None:
    """Merge an adapter file into the weights of its base, in place.

    Raises SnapshotError if it is unreadable or of another model.
    """
    merge(weights, read_factors(path), weights, threads=threads)


def _factors(path: Path, name: str, tensors: Mapping[str, Tensor]) -> Factors:
    try:
        low, high, scaling = (tensors[f"{kind}/{name}"] for kind in (LOW, HIGH, SCALING))
    except KeyError as error:
        raise SnapshotCorrupt(f"{path} has factors of {name!r}, and no {error}") from error
    matrices = len(low.shape) == len(high.shape) == 2 and scaling.shape == (1,)
    if {low.dtype, high.dtype, scaling.dtype} != {"F32"} or not matrices or not low.shape[0] == high.shape[1] > 0:
        raise SnapshotCorrupt(f"{path} has factors of {name!r} of shapes {list(low.shape)} and {list(high.shape)}")
    # Copied: what is mapped need not be aligned, and would be read once for each block.
    arrays = [np.array(one.bits).view(np.float32).reshape(one.shape) for one in (low, high)]
    return Factors(arrays[0], arrays[1], np.array(scaling.bits).view(np.float32)[0])
