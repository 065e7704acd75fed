"""In-place swaps of a model's weights: where a checkpoint's tensors lie in the model, their files, and the copies.

vLLM keeps q, k and v as one parameter, gate and up as another, and with tensor parallelism a part of each. Only the
model's own `load_weights` knows which part goes where. `record` watches it once, so that later swaps are plain copies:

    prepare    alongside generation, in a thread: map the files, and register them as pinned memory for a GPU
    exchange   between two generation steps: copy into the parameters and read a sample back

Copies keep the addresses of the parameters, which CUDA graphs depend on. A swap always copies all tensors: on a GPU
that takes less time and memory than scattering the changed elements would. Nothing is put on the device before the
exchange, since the engine leaves little free there, and nothing larger than a staging block during it.

A mapping and its registration belong to an inode, not to a path: a trainer on the same node writes a new version into
the file of an old one, and mapping and registering 15 GB again takes seconds. All processes of the node that map a file
share its pages, where `torch.empty(pin_memory=True)` would give each process its own, rounded up to a power of two.
"""

import contextlib
import math
import mmap
import os
import resource
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tba.common.errors import EngineError, quantity
from tba.common.log import get_logger
from tba.common.weights.tensor_file import read_layout

log = get_logger(__name__)

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
# The tensors of some files by name, as views of their mappings.
Tensors = Mapping[str, Tensor]

# Besides the files that were opened last: those of the version before, and two for a trainer to write to by turns.
_OTHER_FILES = 3
_PAGE = 4096
# Flags of cudaHostRegister. A read-only mapping needs the second one; drivers without it need a writable mapping.
_PORTABLE, _READ_ONLY = 1, 8

# Torch warns once that a tensor of a read-only buffer could be written to; none of these is.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


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
        # Devices of file systems that refuse: that of the model may, and that of the weights directory not.
        self._refused: set[int] = set()
        # By device and inode, the least recently opened first.
        self._files: dict[tuple[int, int], _File] = {}

    def open(self, paths: Sequence[str]) -> Tensors:
        """Map files, or find their mappings. Raises OSError if one is missing, SnapshotError if it is malformed."""
        for key in [key for key, file in self._files.items() if not file.is_current()]:
            self._files.pop(key).close()
        buffers = {}
        for path in paths:
            status = os.stat(path)
            key = status.st_dev, status.st_ino
            file = self._files.pop(key, None) or self._mapped(path, status.st_dev)
            self._files[key] = file
            buffers[Path(path)] = file.content
        for key in list(self._files)[: -(len(buffers) + _OTHER_FILES)]:
            self._files.pop(key).close()
        return _tensors(buffers)

    def close(self) -> None:
        """Unregister all files: CUDA would read their pages in place of what is mapped to these addresses later."""
        for file in self._files.values():
            file.close()
        self._files.clear()

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


def _tensors(buffers: Mapping[Path, mmap.mmap]) -> dict[str, Tensor]:
    tensors = {}
    for path, buffer in buffers.items():
        for name, span in read_layout(path).spans.items():
            dtype = _DTYPES[span.dtype]
            count = (span.end - span.start) // dtype.itemsize
            # Torch makes no tensor of an empty part of a buffer.
            flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=span.start) if count else torch.empty(0)
            tensors[name] = flat.to(dtype).view(span.shape)
    return tensors


def map_files(paths: Iterable[str]) -> Tensors:
    """Map files for one use, without registering them."""
    mapped = MappedFiles(pin=False)
    tensors = mapped.open([*paths])
    # The tensors keep the mappings.
    mapped.close()
    return tensors


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


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box of one checkpoint tensor, and its location in one parameter of the engine's model.

    `start` and `size` cut the box out of the checkpoint tensor, by dimension. `offset` and `stride` locate it in the
    parameter's storage, in elements.
    """

    name: str
    parameter: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    def of_checkpoint(self, tensor: Tensor) -> Tensor:
        for dimension, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            tensor = tensor.narrow(dimension, start, size)
        return tensor

    def of_parameter(self, parameter: Tensor) -> Tensor:
        return parameter.as_strided(self.size, self.stride, self.offset)


class _CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every `copy_` instead of executing it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


def record(
    load_weights: Callable[[Iterable[tuple[str, Tensor]]], Any],
    parameters: Mapping[str, Tensor],
    files: Tensors,
    places: set[tuple[str, str]],
) -> list[TensorSlice]:
    """Find out where a model's `load_weights` puts each tensor, without changing a weight.

    It gets tensors without content (on the meta device), and its copies into the parameters are recorded. Source and
    destination of a copy are views, whose offsets and strides define the slice completely. `places` receives which
    tensor goes into which parameter, in any form. Raises EngineError if a copy is anything but a box of a checkpoint
    tensor, or a parameter receives none.
    """
    markers = {name: torch.empty_like(tensor, device="meta") for name, tensor in files.items()}
    names = {_storage(marker): name for name, marker in markers.items()}
    owners = {_storage(parameter): name for name, parameter in parameters.items()}
    with torch.no_grad(), _CopyRecorder() as recorder:
        load_weights(iter(markers.items()))
    slices = []
    pairs = [(names.get(_storage(source)), owners.get(_storage(target))) for target, source in recorder.copies]
    places |= {(name, parameter) for name, parameter in pairs if name is not None and parameter is not None}
    for (target, source), (name, parameter) in zip(recorder.copies, pairs, strict=True):
        if name is None or parameter is None or source.shape != target.shape:
            raise EngineError(f"a copy of {list(source.shape)} into {parameter} is not a part of a checkpoint tensor")
        slices.append(_slice(name, parameter, markers[name], source, target))
    if missed := sorted(parameters.keys() - {one.parameter for one in slices}):
        many = quantity(len(missed), "parameter was", "parameters were")
        raise EngineError(f"{many} loaded in another way, for example {missed[0]}")
    return slices


def differing(slices: Iterable[TensorSlice], parameters: Mapping[str, Tensor], files: Tensors) -> list[str]:
    """Return the names of tensors that the parameters do not hold bit for bit (in the parameter's dtype)."""
    names = []
    for one in slices:
        held = one.of_parameter(parameters[one.parameter])
        if not same_bits(held, one.of_checkpoint(files[one.name]).to(held.device, held.dtype)):
            names.append(one.name)
    return names


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare all bits: a NaN equals itself, and 0 differs from -0."""
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def _slice(name: str, parameter: str, marker: Tensor, source: Tensor, target: Tensor) -> TensorSlice:
    found = [stride for stride, size in zip(source.stride(), source.shape, strict=True) if size > 1]
    expected = [stride for stride, size in zip(marker.stride(), source.shape, strict=False) if size > 1]
    if source.dim() != marker.dim() or found != expected:
        raise EngineError(f"{name} is loaded transposed or reshaped")
    # The storage offset of a contiguous tensor's view, written in mixed radix of its strides, is the box's corner.
    start, rest = [], source.storage_offset()
    for stride in marker.stride():
        start.append(rest // stride)
        rest %= stride
    size = tuple(source.shape)
    return TensorSlice(name, parameter, tuple(start), size, int(target.storage_offset()), tuple(target.stride()))


def _storage(tensor: Tensor) -> int:
    """Return what all views of one tensor share, also on the meta device, where there is no address."""
    return int(tensor.untyped_storage()._cdata)


# After an exchange, this number of runs of adjacent elements of each tensor is compared with the file.
_SAMPLE_RUNS, _RUN = 16, 64
# Device memory for a part of a tensor that is not stored as in the file.
_STAGING_BYTES = 32 << 20

Layouts = Mapping[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Elements of one slice, on the host: coordinates in its box [dimensions, n], and values in the file [n]."""

    slice: TensorSlice
    index: Tensor
    values: Tensor


class WeightSwap:
    """Swaps the weights of one model. `layouts` are shape and dtype of each parameter right after loading.

    Raises EngineError for a model that does not compute with the parameters that were loaded.
    """

    def __init__(self, model: nn.Module, slices: Sequence[TensorSlice], layouts: Layouts) -> None:
        self._model = model
        # The copies of the next exchange, and what must be read back after it.
        self._prepared: tuple[list[tuple[TensorSlice, Tensor]], list[_Sample]] | None = None
        self._check_computes_with_parameters()
        parameters = self._parameters()
        self._mapped = MappedFiles(pin=any(one.device.type == "cuda" for one in parameters.values()))
        # A tied head whose copy was saved too has become the embedding, which receives the same tensor.
        self._slices = [one for one in slices if one.parameter in parameters]
        for one in self._slices:
            shape, dtype = layouts[one.parameter]
            if (parameters[one.parameter].shape, parameters[one.parameter].dtype) != (shape, dtype):
                raise EngineError(f"{one.parameter} was reshaped or converted after loading")

    def prepare(self, files: Sequence[str], seed: int) -> None:
        """Do everything that needs no pause. Does not touch what serves, so it may run alongside generation."""
        self._prepared = None
        tensors = self._mapped.open(files)
        copies = [(one, tensors[one.name]) for one in self._slices if one.name in tensors]
        # Of a tied head and its embedding one is enough.
        written = {(one.parameter, one.offset) for one, _ in copies}
        if stale := [one for one in self._slices if (one.parameter, one.offset) not in written]:
            raise EngineError(f"the files lack {stale[0].name} and would leave a part of {stale[0].parameter} as it is")
        # Each page is read once, or page faults would interrupt the copy in the pause.
        for _, source in copies:
            source.view(-1).view(torch.uint8)[::_PAGE].max()
        self._prepared = copies, self._samples(tensors, seed)

    def exchange(self) -> None:
        """Copy the prepared weights, and read a sample back. After an EngineError the weights are undefined."""
        if self._prepared is None:
            raise EngineError("no weights are prepared")
        (copies, samples), self._prepared = self._prepared, None
        self._copy(copies)
        self._read_back(samples)

    def checked_reload(self, files: Sequence[str], seed: int, reload: Callable[[Tensors], None]) -> None:
        """Load with `reload` instead of an exchange, and read a sample back. Raises EngineError if it differs."""
        self._prepared = None
        tensors = self._mapped.open(files)
        samples = self._samples(tensors, seed)
        reload(tensors)
        self._read_back(samples)

    def close(self) -> None:
        """Unregister the files. No swap is possible afterwards."""
        self._prepared = None
        self._mapped.close()

    def skip_processed(self, files: Sequence[str]) -> None:
        """Read back only what the parameters hold as in these files, which are loaded: vLLM may process the others."""
        processed = differing(self._slices, self._parameters(), map_files(files))
        self._slices = [one for one in self._slices if one.name not in processed]

    def _samples(self, tensors: Tensors, seed: int) -> list[_Sample]:
        """Choose the elements to read back after the exchange, different ones for each seed."""
        generator = torch.Generator().manual_seed(seed)
        parameters = self._parameters()
        samples = []
        for one in self._slices:
            if one.name in tensors:
                index = _random_elements(one.size, generator)
                values = one.of_checkpoint(tensors[one.name])[tuple(index)]
                samples.append(_Sample(one, index, values.to(parameters[one.parameter].dtype)))
        return samples

    @torch.no_grad()
    def _copy(self, copies: Iterable[tuple[TensorSlice, Tensor]]) -> None:
        parameters = self._parameters()
        for one, source in copies:
            _copy_box(one, source, parameters[one.parameter])
        # The device reads the mapped files: none may change or be unmapped before it has.
        if any(parameter.device.type != "cpu" for parameter in parameters.values()):
            torch.accelerator.synchronize()

    def _read_back(self, samples: Sequence[_Sample]) -> None:
        self._check_computes_with_parameters()
        parameters = self._parameters()
        found = []
        for one in samples:
            box = one.slice.of_parameter(parameters[one.slice.parameter])
            found.append(box[tuple(one.index.to(box.device))])
        pairs = zip(samples, found, strict=True)
        if wrong := [one.slice.name for one, values in pairs if not same_bits(values.cpu(), one.values)]:
            many = quantity(len(wrong), "tensor differs", "tensors differ")
            raise EngineError(f"{many} from the files after the swap, for example {wrong[0]}")

    def _check_computes_with_parameters(self) -> None:
        """Raise EngineError for a layer that multiplies by a packed copy: it would keep the old weights."""
        if packed := packed_copies(self._model):
            raise EngineError(f"{next(iter(packed))} computes with a packed copy of its weight")

    def _parameters(self) -> dict[str, Tensor]:
        """The parameters by the names they had when loaded: vLLM's LoRA wraps layers as `base_layer` afterwards."""
        return {name.replace(".base_layer.", "."): one for name, one in self._model.named_parameters()}


def packed_copies(model: nn.Module) -> dict[str, object]:
    """By name of the module, the functions that multiply by a packed copy of its weight, as on vLLM's CPU backend."""
    linear = nn.functional.linear
    functions = {name: getattr(module, "cpu_linear", linear) for name, module in model.named_modules()}
    return {name: one for name, one in functions.items() if one is not linear}


def _copy_box(one: TensorSlice, tensor: Tensor, parameter: Tensor) -> None:
    source, target = one.of_checkpoint(tensor), one.of_parameter(parameter)
    same_form = source.is_contiguous() and target.is_contiguous() and source.dtype == target.dtype
    if parameter.device.type == "cpu" or same_form or not source.dim():
        target.copy_(source, non_blocking=True)
    else:
        _copy_through_staging(one, tensor, parameter)


def _copy_through_staging(one: TensorSlice, tensor: Tensor, parameter: Tensor) -> None:
    """Transfer whole rows, and cut and convert them on the device: torch would do it before, in a copy of the box."""
    target = one.of_parameter(parameter)
    rows = tensor.narrow(0, one.start[0], one.size[0])
    step = max(1, _STAGING_BYTES // max(1, rows[0].nbytes))
    for first in range(0, one.size[0], step):
        staged = rows[first : first + step].to(parameter.device, non_blocking=True)
        for dimension in range(1, staged.dim()):
            staged = staged.narrow(dimension, one.start[dimension], one.size[dimension])
        target[first : first + step].copy_(staged)


def _random_elements(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Coordinates of a few runs of adjacent elements of a tensor of this size; of all elements if they are few."""
    count = math.prod(size)
    if count <= _SAMPLE_RUNS * _RUN:
        positions = torch.arange(count)
    else:
        starts = torch.randint(count - _RUN + 1, (_SAMPLE_RUNS, 1), generator=generator)
        positions = (starts + torch.arange(_RUN)).view(-1)
    # A scalar has no coordinates.
    return torch.stack(torch.unravel_index(positions, size)) if size else torch.empty(0, 1)
