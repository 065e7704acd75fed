"""The layout of a safetensors file: enough to view, patch, hash and write one without loading its tensors.

    u64 header length | JSON header | data: the tensors, one after the other, without gaps

Format: https://github.com/huggingface/safetensors. The package's numpy part does not know bfloat16; here a tensor
is its bits, as unsigned integers of the element's width, so that comparing is lossless for every type (NaN, -0.0).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tba.common.errors import SnapshotCorrupt, SnapshotError

# Any unsigned type, one-dimensional.
Bits = npt.NDArray[Any]

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_MOST_HEADER_BYTES = 100 << 20  # the limit of the safetensors package
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as its bits: `bits` is [elements], unsigned, of the width of `dtype` (a safetensors name)."""

    dtype: str
    shape: tuple[int, ...]
    bits: Bits


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor lies: bytes `start` to `end` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`prefix` is everything before the data; `spans` are in the order of the file."""

    prefix: bytes
    spans: dict[str, Span]


def unsigned(dtype: str) -> np.dtype[Any]:
    """The type of the bits of a safetensors dtype. Raises KeyError for one that is not known."""
    return _UNSIGNED[ITEM_BYTES[dtype]]


def read_layout(path: Path) -> Layout:
    """Read and check a header. Raises SnapshotError if there is no file, SnapshotCorrupt if it is malformed."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
                raise SnapshotCorrupt(f"{path} is no safetensors file: its header does not fit")
            prefix += file.read(length)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from error
    try:
        return Layout(prefix, _spans(json.loads(prefix[8:]), len(prefix), size))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SnapshotCorrupt(f"{path} is no safetensors file: {type(error).__name__}: {error}") from error


def map_tensors(path: Path, *, writable: bool = False) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory; written to, they change the file. Raises as `read_layout`."""
    layout = read_layout(path)
    data = np.memmap(path, np.uint8, "r+" if writable else "r") if layout.spans else np.empty(0, np.uint8)
    return {
        name: Tensor(span.dtype, span.shape, _view(data, span.start, span.end, unsigned(span.dtype)))
        for name, span in layout.spans.items()
    }


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a safetensors file. Returns its size and its sha256, taken on the way."""
    # Wide elements first, as the package does: then each tensor is aligned to its elements.
    names = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        header = memoryview(_header({name: tensors[name] for name in names}))
        for view in [header, *(_bytes(tensors[name].bits) for name in names)]:
            digest.update(view)
            file.write(view)
        return file.tell(), digest.hexdigest()


def sha256_of_tensors(layout: Layout, tensors: Mapping[str, Tensor]) -> str:
    """The hash that a file of this layout would have with these tensors in it."""
    digest = hashlib.sha256(layout.prefix)
    for name in layout.spans:
        digest.update(_bytes(tensors[name].bits))
    return digest.hexdigest()


def fits(layout: Layout, tensors: Mapping[str, Tensor]) -> bool:
    """Whether tensors have the names, types and shapes of a layout."""
    return {name: (span.dtype, span.shape) for name, span in layout.spans.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()
    }


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
    """Spans must follow each other to the end of the file: what they do not cover could not be proved."""
    reached = data_start
    for span in spans:
        elements = int(np.prod(span.shape, dtype=np.int64))
        if span.start != reached or span.end - span.start != elements * ITEM_BYTES[span.dtype] or elements < 0:
            raise ValueError(f"a tensor of shape {list(span.shape)} lies at bytes {span.start} to {span.end}")
        reached = span.end
    if reached != size:
        raise ValueError(f"the tensors end at byte {reached}, the file at {size}")


def _view(data: Bits, start: int, end: int, dtype: np.dtype[Any]) -> Bits:
    return np.frombuffer(data, dtype, (end - start) // dtype.itemsize, start)  # need not be aligned


def _bytes(bits: Bits) -> memoryview:
    return bits.data.cast("B") if len(bits) else memoryview(b"")  # no view without elements can be cast


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    fields, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.bits.nbytes
        fields[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
