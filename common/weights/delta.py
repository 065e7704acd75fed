"""Deltas: a lossless record of what changed between two versions of the weights.

A delta is a safetensors file in a Zstandard frame. For a tensor NAME with few changes it holds three arrays, in the
order of the elements:

    difference/NAME [changes]   new minus old bits, unsigned and wrapping, labelled with the type of the weights
    position/NAME   [changes]   the position within a block of 256 elements of the flat tensor: U8
    count/NAME      [blocks]    the number of changes in each block: U16

and for a tensor that would not be smaller in that form

    whole/NAME      in its shape

A position takes one byte, where plain int32 indices take four, and decoding needs no search. Most differences of a
small step are one unit in the last place, 1 or -1: they compress to a fraction of the new values' size. Unchanged
tensors are absent. Comparisons are on bits.

Zstandard (RFC 8878) keeps a block that would not shrink as it is. Its frame declares the size of its content, which
must be the one that the manifest states: `unpack_delta` writes no more.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zstandard

from tba.common.errors import SnapshotCorrupt, SnapshotError, quantity
from tba.common.system.durable import open_regular
from tba.common.weights.snapshot import DELTA, MANIFEST, Delta, Manifest, SnapshotKey, describe_file, directory_name
from tba.common.weights.tensor_file import ITEM_BYTES, Bits, Tensor, content_of, map_tensors

# Level 9 saves 2 % more of the bytes and takes ten times as long (decision 15).
_LEVEL = 3
_UNPACK_BYTES = 4 << 20

Positions = npt.NDArray[np.int64]
# Positions within a chunk.
ChunkPositions = npt.NDArray[np.uint32]

# Elements compared at a time: the old and new chunk and the mask fit in a core's cache.
_CHUNK = 1 << 19
# Elements of a block: 2^8, each with a position of one byte, and a count of two, as all of them may have changed.
_BLOCK_BITS = 8


def build_delta(old: Mapping[str, Tensor], new: Mapping[str, Tensor], *, max_bytes: float) -> dict[str, Tensor] | None:
    """The tensors of the delta from `old` to `new` of the same layout; None if it would exceed `max_bytes`."""
    delta: dict[str, Tensor] = {}
    size = 0
    for name, tensor in new.items():
        added = _change_of(name, old[name], tensor, max_bytes - size)
        if added is None:
            return None
        size += sum(one.bits.nbytes for one in added.values())
        delta |= added
    return delta if size <= max_bytes else None


def write_delta(path: Path, changed: Mapping[str, Tensor]) -> int:
    """Write the file of a delta, compressed. Returns the size of its content in bytes."""
    content = content_of(changed)
    size = sum(part.nbytes for part in content)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=-1)
    with path.open("wb") as file, compressor.stream_writer(file, size=size) as packed:
        for part in content:
            packed.write(part)
    return size


def unpack_delta(path: Path, target: Path, size: int) -> None:
    """Write the safetensors file of a delta, of `size` bytes. Raises SnapshotError, SnapshotCorrupt if malformed."""
    try:
        with open_regular(path) as file, open_regular(target, "wb") as unpacked:
            if (declared := zstandard.frame_content_size(file.read(18))) != size:
                raise SnapshotCorrupt(f"{path} declares {declared} bytes, its manifest {size}")
            file.seek(0)
            reader = zstandard.ZstdDecompressor().stream_reader(file)
            while part := reader.read(min(_UNPACK_BYTES, size - unpacked.tell() + 1)):
                if unpacked.tell() + len(part) > size:
                    raise SnapshotCorrupt(f"{path} has more than the {size} bytes that its manifest states")
                unpacked.write(part)
            if unpacked.tell() != size:
                raise SnapshotCorrupt(f"{path} has {unpacked.tell()} bytes of the {size} that its manifest states")
    except zstandard.ZstdError as error:
        raise SnapshotCorrupt(f"{path} is not a delta: {error}") from error
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from error


def apply_delta(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Apply an unpacked delta in place, once. Raises SnapshotError if it is unreadable or belongs to another model."""
    tensors = map_tensors(path)
    for key, change in tensors.items():
        kind, _, name = key.partition("/")
        if kind not in ("whole", "difference"):
            continue
        tensor = weights.get(name)
        if tensor is None or tensor.dtype != change.dtype:
            raise SnapshotCorrupt(f"{path} changes {name!r} of type {change.dtype}, which the weights do not have")
        if kind == "whole":
            if len(change.bits) != len(tensor.bits):
                raise SnapshotCorrupt(f"{path} replaces {name!r} by {quantity(len(change.bits), 'element')}")
            tensor.bits[:] = change.bits
            continue
        try:
            positions = _positions(tensors[f"position/{name}"].bits, tensors[f"count/{name}"].bits)
        except KeyError as error:
            raise SnapshotCorrupt(f"{path} has differences of {name!r} but no {error}") from error
        if len(positions) != len(change.bits):
            found = f"{quantity(len(change.bits), 'difference')} of {name!r}, {quantity(len(positions), 'position')}"
            raise SnapshotCorrupt(f"{path} has {found}")
        # Ascending: the last is the largest.
        if len(positions) and positions[-1] >= len(tensor.bits):
            raise SnapshotCorrupt(f"{path} changes element {positions[-1]} of {name!r}")
        tensor.bits[positions] += change.bits


def _positions(in_block: Bits, count: Bits) -> Positions:
    """Return positions in the flat tensor, ascending; none if the counts do not add up, which the caller notices."""
    counts = count.astype(np.int64)
    # Wider ones are of blocks of another size.
    if int(counts.sum()) != len(in_block) or in_block.dtype != np.uint8:
        return np.empty(0, np.int64)
    return np.repeat(np.arange(len(count), dtype=np.int64) << _BLOCK_BITS, counts) + in_block


def _change_of(name: str, old: Tensor, new: Tensor, max_bytes: float) -> dict[str, Tensor] | None:
    """What a delta file holds of one tensor: nothing, the changed elements, or all. None if it exceeds the limit."""
    whole, width = new.bits.nbytes, ITEM_BYTES[new.dtype]
    blocks = -(-len(new.bits) >> _BLOCK_BITS)
    chunks: list[ChunkPositions] = []
    changes = 0
    for start in range(0, len(new.bits), _CHUNK):
        chunk = _differing(old.bits[start : start + _CHUNK], new.bits[start : start + _CHUNK])
        chunks.append(chunk)
        changes += len(chunk)
        # Too many changes for an encoding of single elements.
        if changes * (width + 1) > min(whole, max_bytes):
            break
    if not changes:
        return {}
    size = changes * (width + 1) + 2 * blocks
    if min(whole, size) > max_bytes:
        return None
    return {f"whole/{name}": new} if whole <= size else _encoded(name, old, new, chunks, blocks)


def _differing(old: Bits, new: Bits) -> ChunkPositions:
    """The positions at which two chunks differ, ascending.

    Searching words of eight bytes first takes half as long when 1 % has changed, and longer if most have.
    """
    mask = old != new
    whole = len(mask) & ~7
    words = mask[:whole].view(np.uint64)
    octets = np.flatnonzero(words != 0)
    if 2 * len(octets) > len(words):
        return np.flatnonzero(mask).astype(np.uint32)
    inner = np.flatnonzero(words[octets].view(np.bool_))
    found = [(octets[inner >> 3] << 3) + (inner & 7), np.flatnonzero(mask[whole:]) + whole]
    joined: ChunkPositions = np.concatenate(found).astype(np.uint32)
    return joined


def _encoded(
    name: str, old: Tensor, tensor: Tensor, chunks: Sequence[ChunkPositions], blocks: int
) -> dict[str, Tensor]:
    """The three arrays of a tensor. Every chunk but the last consists of whole blocks."""
    parts = [slice(start, start + _CHUNK) for start in range(0, len(tensor.bits), _CHUNK)]
    pairs = list(zip(parts, chunks, strict=True))
    difference = np.concatenate([tensor.bits[part][chunk] - old.bits[part][chunk] for part, chunk in pairs])
    # The conversion keeps the low bits: the position within the block.
    position = np.concatenate([chunk.astype(np.uint8) for chunk in chunks])
    counts = np.concatenate([np.bincount(chunk >> _BLOCK_BITS, minlength=_CHUNK >> _BLOCK_BITS) for chunk in chunks])
    count = counts[:blocks].astype("<u2")
    return {
        f"position/{name}": Tensor("U8", position.shape, position),
        f"count/{name}": Tensor("U16", count.shape, count),
        f"difference/{name}": Tensor(tensor.dtype, difference.shape, difference),
    }


FOLDER = "deltas"

# As a fraction of all bytes. A delta saves bytes to transfer and costs the node that fetches it a copy of its base.
_LARGEST = 0.5


class DeltaStore:
    """The deltas below a directory of snapshots. Used by one thread; others may read what it has published."""

    def __init__(self, snapshots: Path) -> None:
        self._directory = snapshots / FOLDER

    def build(
        self, version: int, base: SnapshotKey, old: Mapping[str, Tensor], new: Mapping[str, Tensor]
    ) -> Delta | None:
        """Write the delta of a version from `old` to `new`, tensors of the same layout; None if it is not worth it."""
        whole = sum(tensor.bits.nbytes for tensor in new.values())
        changed = build_delta(old, new, max_bytes=_LARGEST * whole)
        if changed is None:
            return None
        directory = self._directory / directory_name(version)
        directory.mkdir(parents=True, exist_ok=True)
        size = write_delta(directory / DELTA, changed)
        return Delta(describe_file(directory / DELTA), size, base.version, base.manifest_sha256)

    def publish(self, snapshot: Path, manifest: Manifest) -> None:
        """Serve the delta of a snapshot that is sealed, and delete deltas that no node would use any more."""
        if manifest.delta is not None:
            shutil.copyfile(snapshot / MANIFEST, self._directory / directory_name(manifest.version) / MANIFEST)
        self._collect(sum(entry.bytes for entry in manifest.files.values()))

    def discard(self, version: int) -> None:
        """Delete the delta of a snapshot that was not sealed."""
        shutil.rmtree(self._directory / directory_name(version), ignore_errors=True)

    def clear(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _collect(self, whole: int) -> None:
        size = 0
        for directory in sorted(self._directory.glob("v????????"), reverse=True):
            file = directory / DELTA
            size += file.stat().st_size if file.is_file() else 0
            if size >= whole:
                shutil.rmtree(directory, ignore_errors=True)
