"""The tensors of safetensors files, mapped into memory and, for a GPU, registered as pinned memory.

A mapping and its registration belong to an inode, not to a path: a trainer on the same node writes a new version into
the file of an old one, and mapping and registering 15 GB again takes seconds. All processes of the node that map a file
share its pages, where `torch.empty(pin_memory=True)` would give each process its own, rounded up to a power of two.
"""

import contextlib
import mmap
import os
import resource
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tba.common.log import get_logger
from tba.common.weights.tensor_file import Span, read_layout

log = get_logger(__name__)

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
# Besides the files that were opened last: those of the version before, and two for a trainer to write to by turns.
_OTHER_FILES = 3
_PAGE = 4096
# Flags of cudaHostRegister. A read-only mapping needs the second one; drivers without it need a writable mapping.
_PORTABLE, _READ_ONLY = 1, 8

# Torch warns once that a tensor of a read-only buffer could be written to; none of these is.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


class TensorFiles:
    """The tensors of some files by name, as views of their mappings."""

    def __init__(self, buffers: Mapping[Path, mmap.mmap]) -> None:
        self._spans: dict[str, tuple[mmap.mmap, Span]] = {}
        for path, buffer in buffers.items():
            self._spans |= {name: (buffer, span) for name, span in read_layout(path).spans.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._spans

    def __getitem__(self, name: str) -> Tensor:
        buffer, span = self._spans[name]
        dtype = _DTYPES[span.dtype]
        count = (span.end - span.start) // dtype.itemsize
        if not count:
            return torch.empty(span.shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=span.start).view(span.shape)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, one at a time."""
        return ((name, self[name]) for name in self._spans)


@dataclass(slots=True)
class _File:
    """A mapping of a file's whole content; `descriptor` keeps the inode's number from being used again."""

    descriptor: int
    content: mmap.mmap
    registered: int = 0
    """The address that was registered; 0 if it was not."""

    def is_current(self) -> bool:
        """Whether the file still has a name, and the size that it was mapped with."""
        status = os.fstat(self.descriptor)
        return status.st_nlink > 0 and status.st_size == len(self.content)

    def close(self) -> None:
        """Give the mapping up. Views of it keep it until they are gone."""
        if self.registered:
            _cudart().cudaHostUnregister(self.registered)
        os.close(self.descriptor)


class MappedFiles:
    """The mappings of one process. With `pin`, copies to a CUDA device read them without a staging copy.

    At most the files of one snapshot and three others stay mapped. Used by one thread at a time.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        # File systems, by device, whose files could not be registered: the model's own may be on a disk that refuses
        # what the weights directory allows.
        self._refused: set[int] = set()
        # By device and inode, the least recently opened first.
        self._files: dict[tuple[int, int], _File] = {}

    def open(self, paths: Sequence[str]) -> TensorFiles:
        """Map files, or find their mappings. Raises OSError if one is missing, SnapshotError if it is malformed."""
        for key in [key for key, file in self._files.items() if not file.is_current()]:
            self._files.pop(key).close()
        buffers = {Path(path): self._map(path) for path in paths}
        for key in list(self._files)[: -(len(buffers) + _OTHER_FILES)]:
            self._files.pop(key).close()
        return TensorFiles(buffers)

    def close(self) -> None:
        """Unregister all files and give their mappings up."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _map(self, path: str) -> mmap.mmap:
        status = os.stat(path)
        key = status.st_dev, status.st_ino
        file = self._files.pop(key, None) or self._mapped(path, status.st_dev)
        self._files[key] = file
        return file.content

    def _mapped(self, path: str, device: int) -> _File:
        if self._pin and device not in self._refused:
            # A mapping that can be registered: read-only, or else writable, which nothing makes use of.
            reasons = []
            for opened, protection, flags in (
                (os.O_RDONLY, mmap.PROT_READ, _PORTABLE | _READ_ONLY),
                (os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE, _PORTABLE),
            ):
                try:
                    file = _open(path, opened, protection)
                except OSError as error:
                    reasons.append(str(error.strerror))
                    continue
                if not (reason := _register(file, flags)):
                    return file
                file.close()
                reasons.append(reason)
            self._refused.add(device)
            log.warning("weights are not pinned, so copies to the GPU are slower", reason=_limits(path, reasons))
        return _open(path, os.O_RDONLY, mmap.PROT_READ)


def map_files(paths: Iterable[str]) -> TensorFiles:
    """Map files for one use, without registering them."""
    return MappedFiles(pin=False).open([*paths])


def touch(tensor: Tensor) -> None:
    """Read each page of a contiguous tensor, or page faults would interrupt the copy in the pause."""
    tensor.view(-1).view(torch.uint8)[::_PAGE].max()


def _open(path: str, flags: int, protection: int) -> _File:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        # Shared: the kernel copies the pages of a private mapping when it pins them.
        return _File(descriptor, mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=protection))
    except BaseException:
        os.close(descriptor)
        raise


def _register(file: _File, flags: int) -> str:
    """Pin a mapping's pages. Returns the reason if that is impossible."""
    address = torch.frombuffer(file.content, dtype=torch.uint8).data_ptr()
    found = int(_cudart().cudaHostRegister(address, len(file.content), flags))
    if not found:
        file.registered = address
        return ""
    _clear_last_error()
    return f"cudaHostRegister returned error {found}"


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_last_error() -> None:
    """Take CUDA's error of the failed call: else the next kernel that this thread launches would report it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _limits(path: str, reasons: Sequence[str]) -> str:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "no limit" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    return (
        f"{path} cannot be registered ({'; '.join(reasons)}): locked memory has {limit} (ulimit -l, LimitMEMLOCK= of a "
        "unit), and the file system must allow it, as /dev/shm does (search.weights_dir)"
    )
