"""Where the tensors of a checkpoint lie inside a model that stores them fused, sharded or padded.

vLLM keeps q, k and v as one parameter, gate and up as another, and with tensor parallelism a part of each. Only the
model's own `load_weights` knows which part goes where. `record` watches it once, so that later swaps are plain copies.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tba.common.errors import EngineError
from tba.common.quantity import quantity
from tba.searcher.engines.vllm.tensor_files import TensorFiles


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box of one checkpoint tensor, and its location in one parameter of the engine's model.

    `start` and `size` cut the box out of the checkpoint tensor of `shape`, by dimension. `offset` and `stride` locate
    it in the parameter's storage, in elements.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    def of_checkpoint(self, tensor: Tensor) -> Tensor:
        """Return the box as a view of the checkpoint tensor."""
        for dimension, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            tensor = tensor.narrow(dimension, start, size)
        return tensor

    def of_parameter(self, parameter: Tensor) -> Tensor:
        """Return the box as a view of the parameter."""
        return parameter.as_strided(self.size, self.stride, self.offset)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Map positions in the flattened checkpoint tensor, int64 [n], to positions in the parameter's storage.

        Returns a mask [n] of the positions inside the box, and the mapped positions of those.
        """
        inside = torch.ones_like(positions, dtype=torch.bool)
        index, rest = torch.full_like(positions, self.offset), positions
        for extent, start, size, stride in reversed(
            [*zip(self.shape, self.start, self.size, self.stride, strict=True)]
        ):
            coordinate = rest % extent - start
            rest = rest // extent
            inside &= (coordinate >= 0) & (coordinate < size)
            index += coordinate * stride
        return inside, index[inside]


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
    files: TensorFiles,
) -> list[TensorSlice]:
    """Find out where a model's `load_weights` puts each tensor, without changing a weight.

    It gets tensors without content (on the meta device), and its copies into the parameters are recorded. Source and
    destination of a copy are views, whose offsets and strides define the slice completely. Raises EngineError if a
    copy is anything but a box of a checkpoint tensor, or a parameter receives none.
    """
    markers = {name: torch.empty_like(tensor, device="meta") for name, tensor in files.items()}
    names = {_storage(marker): name for name, marker in markers.items()}
    owners = {_storage(parameter): name for name, parameter in parameters.items()}
    with torch.no_grad(), _CopyRecorder() as recorder:
        load_weights(iter(markers.items()))
    slices = []
    for target, source in recorder.copies:
        name, parameter = names.get(_storage(source)), owners.get(_storage(target))
        if name is None or parameter is None or source.shape != target.shape:
            raise EngineError(f"a copy of {list(source.shape)} into {parameter} is not a part of a checkpoint tensor")
        slices.append(_slice(name, parameter, markers[name], source, target))
    if missed := sorted(parameters.keys() - {one.parameter for one in slices}):
        many = quantity(len(missed), "parameter was", "parameters were")
        raise EngineError(f"{many} loaded in another way, for example {missed[0]}")
    return slices


def differing(slices: Iterable[TensorSlice], parameters: Mapping[str, Tensor], files: TensorFiles) -> list[str]:
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
    shape = tuple(marker.shape)
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
    return TensorSlice(name, parameter, shape, tuple(start), size, int(target.storage_offset()), tuple(target.stride()))


def _storage(tensor: Tensor) -> int:
    """Return what all views of one tensor share, also on the meta device, where there is no address."""
    return int(tensor.untyped_storage()._cdata)
