"""What changed between two versions of the weights: a lossless overwrite of elements, or of whole tensors.

A delta is a safetensors file. Of a tensor NAME with few changes it holds three arrays, in the order of the elements:

    value/NAME      [changes]   the new values, in the type of the weights
    position/NAME   [changes]   the place within a block of 2^8 or 2^16 elements of the flat tensor: U8 or U16
    count/NAME      [blocks]    how many of the changes lie in each block: U16 or U32

and of a tensor that would not be smaller that way

    whole/NAME      in its shape

Positions cost one or two bytes each where plain int32 indices cost four, and are found with no search. Unchanged
tensors are absent. Applying a delta twice does no harm. All comparing is on bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tba.common.errors import SnapshotCorrupt
from tba.common.quantity import quantity
from tba.common.tensor_file import ITEM_BYTES, Bits, Tensor, map_tensors

FILE = "delta.safetensors"

Positions = npt.NDArray[np.int64]
Piece = npt.NDArray[np.uint32]  # positions within a chunk

# Elements compared at a time: the two pieces and the mask stay in a core's cache.
_CHUNK = 1 << 19
_BLOCK_BITS = (8, 16)
_POSITION = {8: "U8", 16: "U16"}
_COUNT = {8: "U16", 16: "U32"}  # a block of 256 may hold 256 changes


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one tensor. `positions` [changes] index the flat tensor, ascending; None replaces all of it."""

    name: str
    dtype: str
    positions: Positions | None
    values: Bits


def build_delta(old: Mapping[str, Tensor], new: Mapping[str, Tensor], *, most_bytes: float) -> dict[str, Tensor] | None:
    """The tensors of a delta file that makes `new` of `old`; None as soon as it would be over `most_bytes`.

    Both must have the same names, types and shapes.
    """
    delta: dict[str, Tensor] = {}
    size = 0
    for name, tensor in new.items():
        added = _change_of(name, old[name], tensor, most_bytes - size)
        if added is None:
            return None
        size += sum(one.bits.nbytes for one in added.values())
        delta |= added
    return delta if size <= most_bytes else None


def read_delta(path: Path) -> Iterator[Change]:
    """The changes in a delta file. Raises SnapshotError if there is none, SnapshotCorrupt if it is malformed."""
    tensors = map_tensors(path)
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "whole":
            yield Change(name, tensor.dtype, None, tensor.bits)
        elif kind == "value":
            try:
                positions = _positions(tensors[f"position/{name}"], tensors[f"count/{name}"])
            except KeyError as error:
                raise SnapshotCorrupt(f"{path} has values of {name!r}, and no {error}") from error
            if len(positions) != len(tensor.bits):
                found = f"{quantity(len(tensor.bits), 'value')} of {name!r}, {quantity(len(positions), 'position')}"
                raise SnapshotCorrupt(f"{path} has {found}")
            yield Change(name, tensor.dtype, positions, tensor.bits)


def apply_delta(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Overwrite what a delta file changes. Raises SnapshotError if it is unreadable or of another model."""
    for change in read_delta(path):
        tensor = weights.get(change.name)
        if tensor is None or tensor.dtype != change.dtype:
            raise SnapshotCorrupt(
                f"{path} changes {change.name!r} of type {change.dtype}, which the weights do not have"
            )
        if change.positions is None:
            if len(change.values) != len(tensor.bits):
                raise SnapshotCorrupt(f"{path} replaces {change.name!r} by {quantity(len(change.values), 'element')}")
            tensor.bits[:] = change.values
        elif len(change.positions):
            if change.positions[-1] >= len(tensor.bits):  # ascending: the last is the largest
                raise SnapshotCorrupt(f"{path} changes element {change.positions[-1]} of {change.name!r}")
            tensor.bits[change.positions] = change.values


def _change_of(name: str, old: Tensor, new: Tensor, most_bytes: float) -> dict[str, Tensor] | None:
    """What a delta file holds of one tensor: nothing, changes, or all of it. None if that is over the limit."""
    whole, width = new.bits.nbytes, ITEM_BYTES[new.dtype]
    pieces: list[Piece] = []
    changes = 0
    for start in range(0, len(new.bits), _CHUNK):
        piece = _differing(old.bits[start : start + _CHUNK], new.bits[start : start + _CHUNK])
        pieces.append(piece)
        changes += len(piece)
        if changes * (width + 1) > min(whole, most_bytes):  # too many for any encoding
            break
    if not changes:
        return {}
    sizes = {bits: changes * (width + bits // 8) + _blocks(new, bits) * (bits // 4) for bits in _BLOCK_BITS}
    bits = min(_BLOCK_BITS, key=sizes.__getitem__)
    if min(whole, sizes[bits]) > most_bytes:
        return None
    return {f"whole/{name}": new} if whole <= sizes[bits] else _encoded(name, new, pieces, bits)


def _differing(old: Bits, new: Bits) -> Piece:
    """Where two pieces differ, ascending.

    Looking for the set bytes of a mask eight at a time halves what `flatnonzero` of the mask takes at 1 % changed.
    """
    mask = old != new
    whole = len(mask) & ~7
    words = mask[:whole].view(np.uint64)
    octets = np.flatnonzero(words != 0)
    if 2 * len(octets) > len(words):
        return np.flatnonzero(mask).astype(np.uint32)
    inner = np.flatnonzero(words[octets].view(np.bool_))
    found = [(octets[inner >> 3] << 3) + (inner & 7), np.flatnonzero(mask[whole:]) + whole]
    joined: Piece = np.concatenate(found).astype(np.uint32)
    return joined


def _encoded(name: str, tensor: Tensor, pieces: Sequence[Piece], bits: int) -> dict[str, Tensor]:
    """The three arrays. Chunks are whole numbers of blocks, the last one excepted."""
    chunks = [tensor.bits[start : start + _CHUNK] for start in range(0, len(tensor.bits), _CHUNK)]
    values = np.concatenate([np.take(chunk, piece) for chunk, piece in zip(chunks, pieces, strict=True)])
    position = np.concatenate([piece.astype(f"<u{bits // 8}") for piece in pieces])  # the low bits
    counts = [np.bincount(piece >> bits, minlength=_CHUNK >> bits) for piece in pieces]
    count = np.concatenate(counts)[: _blocks(tensor, bits)].astype(f"<u{bits // 4}")
    return {
        f"position/{name}": Tensor(_POSITION[bits], position.shape, position),
        f"count/{name}": Tensor(_COUNT[bits], count.shape, count),
        f"value/{name}": Tensor(tensor.dtype, values.shape, values),
    }


def _blocks(tensor: Tensor, bits: int) -> int:
    return -(-len(tensor.bits) >> bits)


def _positions(place: Tensor, count: Tensor) -> Positions:
    bits = 8 * place.bits.itemsize
    starts = np.arange(len(count.bits), dtype=np.int64) << bits
    counts = count.bits.astype(np.int64)
    if int(counts.sum()) != len(place.bits):
        return np.empty(0, np.int64)  # the caller compares the lengths
    positions: Positions = np.repeat(starts, counts)
    positions += place.bits
    return positions
