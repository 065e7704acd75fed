"""Safetensors files: view, patch and lay out one without loading its tensors.

    u64 header length | JSON header | data: the tensors, one after the other, without gaps

Format: https://github.com/huggingface/safetensors. The numpy part of that package does not support bfloat16. Here a
tensor is its bits, as unsigned integers of the element's width, so that comparisons are lossless for every type (NaN,
-0.0).
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from tba.common.errors import SnapshotCorrupt, SnapshotError, named
from tba.common.system.durable import open_regular

# One-dimensional, of any unsigned type.
Bits = npt.NDArray[Any]

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
# The limit of the safetensors package.
_MAX_HEADER_BYTES = 100 << 20
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as its bits [elements], unsigned, of the width of `dtype`, which is a safetensors name."""

    dtype: str
    shape: tuple[int, ...]
    bits: Bits


@dataclass(frozen=True, slots=True)
class Span:
    """The position of a tensor: bytes `start` to `end` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The header of a file: `prefix` is every byte before the data; `spans` are in the order of the file."""

    prefix: bytes
    spans: dict[str, Span]

    @property
    def bytes(self) -> int:
        """The size of the file."""
        return max((span.end for span in self.spans.values()), default=len(self.prefix))

    def view(self, data: Bits) -> dict[str, Tensor]:
        """The tensors in the content of the file, bytes [size], whose memory they share."""
        tensors = {}
        for name, span in self.spans.items():
            kind = unsigned(span.dtype)
            # Unlike a view of a slice, `frombuffer` accepts a start that is not aligned.
            bits = np.frombuffer(data, kind, (span.end - span.start) // kind.itemsize, span.start)
            tensors[name] = Tensor(span.dtype, span.shape, bits)
        return tensors


def layout_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Layout:
    """The layout of a file of tensors with these types and shapes."""
    # Wide elements first, as in the package, so that each tensor is aligned to its elements.
    names = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name][0]], name))
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        dtype, shape = tensors[name]
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    prefix = len(text).to_bytes(8, "little") + text
    return Layout(prefix, _spans(fields, len(prefix), len(prefix) + offset))


def unsigned(dtype: str) -> np.dtype[Any]:
    """The numpy type for the bits of a safetensors dtype. Raises KeyError for an unknown one."""
    return np.dtype(f"<u{ITEM_BYTES[dtype]}")


def read_layout(path: Path) -> Layout:
    """Read and check a header. Raises SnapshotError if there is no file, SnapshotCorrupt if it is malformed."""
    try:
        with open_regular(path) as file:
            size = path.stat().st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise SnapshotCorrupt(f"{path} is not a safetensors file: its header does not fit")
            prefix += file.read(length)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from error
    try:
        return Layout(prefix, _spans(json.loads(prefix[8:]), len(prefix), size))
    # The last one for a header that nests thousands of levels deep.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SnapshotCorrupt(f"{path} is not a safetensors file: {named(error)}") from error


def map_tensors(path: Path, *, writable: bool = False) -> dict[str, Tensor]:
    """Map the tensors of a file into memory. If `writable`, changes go to the file. Raises as `read_layout`."""
    layout = read_layout(path)
    data = np.memmap(path, np.uint8, "r+" if writable else "r") if layout.spans else np.empty(0, np.uint8)
    return layout.view(data)


def content_of(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """Return the bytes of a safetensors file, part by part: the header, then each tensor without a copy of it."""
    layout = layout_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    return [memoryview(layout.prefix), *(tensors[name].bits.view(np.uint8).data for name in layout.spans)]


def _spans(header: dict[str, Any], data_start: int, size: int) -> dict[str, Span]:
    spans = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        first, last = fields["data_offsets"]
        shape = tuple(int(length) for length in fields["shape"])
        spans[name] = Span(fields["dtype"], shape, data_start + first, data_start + last)
    spans = dict(sorted(spans.items(), key=lambda item: (item[1].start, item[1].end)))
    _check_cover(spans.values(), data_start, size)
    return spans


def _check_cover(spans: Iterable[Span], data_start: int, size: int) -> None:
    """Raise ValueError unless the spans follow each other to the end of the file, so that none hides bytes."""
    reached = data_start
    for span in spans:
        elements = int(np.prod(span.shape, dtype=np.int64))
        if span.start != reached or span.end - span.start != elements * ITEM_BYTES[span.dtype] or elements < 0:
            raise ValueError(f"a tensor of shape {list(span.shape)} lies at bytes {span.start} to {span.end}")
        reached = span.end
    if reached != size:
        raise ValueError(f"the tensors end at byte {reached}, the file at {size}")


def blake3_of(path: Path) -> str:
    """The BLAKE3 of a file as hex digits. The file is mapped, not copied. Raises OSError."""
    with open_regular(path):
        return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def blake3_of_bytes(content: memoryview | bytes) -> str:
    return blake3(content, max_threads=blake3.AUTO).hexdigest()
