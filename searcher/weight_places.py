"""Where the tensors of a checkpoint lie inside a model that stores them otherwise: fused, sharded, padded.

vLLM keeps q, k and v as one parameter, gate and up as another, and with tensor parallelism a part of each. Only
the model's own `load_weights` knows which part goes where; `record` lets it show that once, so that later swaps
are plain copies.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tba.common.errors import EngineError
from tba.common.quantity import quantity


@dataclass(frozen=True, slots=True)
class Place:
    """A box of one checkpoint tensor, and where it lies in one parameter of the engine's model.

    `start` and `size` cut the box out of the checkpoint tensor of `shape`, by dimension. `offset` and `stride`
    place it in the parameter's storage, in elements.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    def box(self, tensor: Tensor) -> Tensor:
        """The part of a checkpoint tensor that lies here; a view."""
        for dimension, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            tensor = tensor.narrow(dimension, start, size)
        return tensor

    def view(self, parameter: Tensor) -> Tensor:
        """The part of the parameter that holds it; a view."""
        return parameter.as_strided(self.size, self.stride, self.offset)

    def locate(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Positions in the flattened checkpoint tensor, int64 [n], as positions in the parameter's storage.

        Returns a mask [n] of those that lie in the box, and their places [number in the mask].
        """
        inside, index, rest = torch.ones_like(flat, dtype=torch.bool), torch.full_like(flat, self.offset), flat
        for extent, start, size, stride in reversed(
            [*zip(self.shape, self.start, self.size, self.stride, strict=True)]
        ):
            coordinate = rest % extent - start
            rest = rest // extent
            inside &= (coordinate >= 0) & (coordinate < size)
            index += coordinate * stride
        return inside, index[inside]

    @property
    def whole(self) -> bool:
        """Whether the box is the whole tensor and lies in one piece."""
        return self.size == self.shape and self.stride == _contiguous_stride(self.shape)


class Checkpoint:
    """Tensors of safetensors files by name, mapped into memory and not read before they are used."""

    def __init__(self, files: Iterable[str]) -> None:
        # Any: the package annotates nothing.
        handles: list[Any] = [safe_open(path, framework="pt") for path in files]
        self._handles = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor

    def names(self) -> list[str]:
        """All names."""
        return list(self._handles)

    def items(self) -> Iterable[tuple[str, Tensor]]:
        """Names and tensors, one at a time."""
        return ((name, self[name]) for name in self._handles)


class _CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every `copy_` instead of doing it."""

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
    checkpoint: Checkpoint,
) -> list[Place]:
    """Let a model's `load_weights` show where each tensor goes, without changing a weight.

    It is given tensors without content (on the meta device), and its copies into the parameters are noted:
    source and destination are views, whose offsets and strides say it all. Raises EngineError if a copy is
    anything else than a box of a checkpoint tensor, or a parameter receives none.
    """
    markers = {name: torch.empty_like(tensor, device="meta") for name, tensor in checkpoint.items()}
    names = {_storage(marker): name for name, marker in markers.items()}
    owners = {_storage(parameter): name for name, parameter in parameters.items()}
    with torch.no_grad(), _CopyRecorder() as recorder:
        load_weights(iter(markers.items()))
    places = []
    for target, source in recorder.copies:
        name, parameter = names.get(_storage(source)), owners.get(_storage(target))
        if name is None or parameter is None or source.shape != target.shape:
            raise EngineError(f"a copy of {list(source.shape)} into {parameter} is not a part of a checkpoint tensor")
        places.append(_place(name, parameter, markers[name], source, target))
    if missed := sorted(parameters.keys() - {place.parameter for place in places}):
        raise EngineError(
            f"{quantity(len(missed), 'parameter was', 'parameters were')} loaded in another way, {missed[0]} for one"
        )
    return places


def differing(places: Iterable[Place], parameters: Mapping[str, Tensor], checkpoint: Checkpoint) -> list[str]:
    """Names of tensors that the parameters do not hold bit for bit (in the parameter's type)."""
    names = []
    for place in places:
        held = place.view(parameters[place.parameter])
        if not same_bits(held, place.box(checkpoint[place.name]).to(held.device, held.dtype)):
            names.append(place.name)
    return names


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality of all bits, in which a NaN is equal to itself and 0 differs from -0."""
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def flat(parameter: Tensor) -> Tensor:
    """A dense parameter's elements in the order of its storage; a view."""
    return parameter.as_strided((parameter.numel(),), (1,), 0)


def _place(name: str, parameter: str, marker: Tensor, source: Tensor, target: Tensor) -> Place:
    shape = tuple(marker.shape)
    aligned = [one for one, size in zip(source.stride(), source.shape, strict=True) if size > 1]
    expected = [one for one, size in zip(marker.stride(), source.shape, strict=False) if size > 1]
    if source.dim() != marker.dim() or aligned != expected:
        raise EngineError(f"{name} is loaded transposed or reshaped")
    start, rest = [], source.storage_offset()
    for stride in marker.stride():
        start.append(rest // stride)
        rest %= stride
    size = tuple(source.shape)
    return Place(name, parameter, shape, tuple(start), size, int(target.storage_offset()), tuple(target.stride()))


def _storage(tensor: Tensor) -> int:
    """What views of one tensor have in common, also on the meta device, where there is no address."""
    return int(tensor.untyped_storage()._cdata)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides[: len(shape)]))
