"""Swapping the weights of a model whose places are known (searcher/weight_places.py), in two steps.

    prepare    beside generation, in a thread: read, convert and pack; nothing that serves is touched
    exchange   between two generation steps: the visible part

Where the model computes with its parameters (GPUs), the exchange copies into them: `in place`. On the CPU, vLLM
computes with packed copies that only oneDNN can make; there `prepare` makes new parameters and new packed copies, and
the exchange is of references: `exchange`. It takes the memory of a second set of weights until the new ones are kept.

Packing may be done in any thread. Only the one that steps may multiply: vLLM gives all its products one scratch memory.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tba.common import adapter
from tba.common.delta import Change, Positions, read_delta
from tba.common.errors import EngineError
from tba.common.quantity import quantity
from tba.common.tensor_file import Bits
from tba.searcher.weight_places import Checkpoint, Place, flat, same_bits

# After an exchange this many runs of neighbouring elements of each tensor are compared with the file.
_SAMPLE_RUNS, _RUN = 16, 64
# Of a packed copy, relative to the largest output: rounding of the products alone makes up to about 1e-2 in bfloat16.
_PACKING_ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_PAGE = 4096
_PRODUCT_ELEMENTS = 1 << 22  # of a weight, in float32 at the same time

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # what a packed layer computes: (input, weight, bias)


@dataclass(frozen=True, slots=True)
class _Product:
    """What a random input gives with a module's new weight, and so must give with its packed copy."""

    module: str
    probe: Tensor  # [1, in]
    expected: Tensor  # [1, out] in float32


@dataclass(slots=True)
class _Prepared:
    """All that an exchange needs, and what must be seen in the model after it."""

    names: set[str]
    copies: list[tuple[Place, Tensor]] = field(default_factory=list)
    scatters: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # parameter, index [n], values [n]
    parameters: dict[str, Tensor] = field(default_factory=dict)
    packed: dict[str, Multiply] = field(default_factory=dict)  # by module
    products: list[_Product] = field(default_factory=list)
    samples: list[tuple[str, str, Tensor, Tensor]] = field(default_factory=list)  # name, parameter, index, values


class WeightSwap:
    """The swaps of one model. `pack(module, weight)` makes a module's packed copy of a weight.

    `layouts` are shape and type of each parameter as the checkpoint loads it, before any packing.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Sequence[Place],
        layouts: Mapping[str, tuple[torch.Size, torch.dtype]],
        pack: Callable[[nn.Module, Tensor], Multiply],
    ) -> None:
        self._model = model
        self._places = places
        self._layouts = layouts
        self._pack = pack
        self._packed = packed_modules(model, self._parameters())
        self._prepared: _Prepared | None = None
        self._old: _Prepared | None = None
        if wrong := self._changed_layouts():
            raise EngineError(f"{wrong} was given another shape after loading")

    @property
    def in_place(self) -> bool:
        """Whether swaps copy into the parameters; otherwise they exchange packed copies."""
        return not self._packed

    def prepare(self, files: Sequence[str], delta: str | None, seed: int) -> None:
        """Do everything that needs no pause. `files` hold all weights; `delta`, if it is given, or an adapter in its
        place, says what differs from those that serve.

        Touches nothing that serves, so it may run in a thread beside generation.
        """
        self._prepared = self._old = None
        checkpoint = Checkpoint(files)
        changes = _changes_in(Path(delta)) if delta else None
        prepared = _Prepared(set(checkpoint.names()) if changes is None else set(changes))
        self._choose_samples(prepared, checkpoint, changes or {}, seed)
        if self._packed:
            self._make_second_set(prepared, checkpoint)
        else:
            self._gather(prepared, checkpoint, changes or {})
        self._prepared = prepared

    def exchange(self) -> None:
        """Make the prepared weights serve, and see that they do. Raises EngineError if they do not.

        To be called between two steps. After an error the weights are undefined, unless `undo` can go back.
        """
        if self._prepared is None:
            raise EngineError("no weights are prepared")
        prepared, self._prepared = self._prepared, None
        before = self._multiplies()
        with torch.no_grad():
            if self._packed:
                self._old = self._install(prepared)
            else:
                self._copy(prepared)
        self._check(prepared, before)

    def undo(self) -> bool:
        """Go back to what served before the exchange. False if that is gone: then it has to be loaded again."""
        if self._old is None:
            return False
        self._install(self._old)
        self._old = None
        return True

    def keep(self) -> None:
        """Forget what served before the exchange."""
        self._old = None

    def checked_reload(self, files: Sequence[str], seed: int, reload: Callable[[Checkpoint], None]) -> None:
        """Load by another way than this class's, and see that it took effect. Raises EngineError if it did not.

        After an exchange of references, `undo` still goes back: what served before is in other tensors.
        """
        self._prepared = None
        checkpoint = Checkpoint(files)
        expected = _Prepared(set(checkpoint.names()))
        self._choose_samples(expected, checkpoint, {}, seed)
        before = self._multiplies()
        reload(checkpoint)
        self._check(expected, before)

    def hashes(self) -> dict[str, str]:
        """sha256 of each tensor (of its part on this device) as the parameters hold it, in the type it was loaded in.

        Packed ones are left out.
        """
        parameters = self._parameters()
        return {
            place.name: _sha256(place.view(parameters[place.parameter]).to(self._layouts[place.parameter][1]))
            for place in self._places
            if parameters[place.parameter].numel()
        }

    # ------------------------------------------------------------ preparing

    def _gather(self, prepared: _Prepared, checkpoint: Checkpoint, changes: Mapping[str, Change | None]) -> None:
        """For copies in place: bring what is to be copied close to the device."""
        parameters = self._parameters()
        for place in self._places:
            parameter = parameters[place.parameter]
            if place.name not in prepared.names:
                continue
            source = checkpoint[place.name]
            change = changes.get(place.name)
            if change is not None and change.positions is not None:
                index, values = scattered(place, change.positions, change.values, source.dtype)
                near = index.to(parameter.device), values.to(parameter.device, parameter.dtype)
                prepared.scatters.append((place.parameter, *near))
                continue
            box = place.box(source)
            if parameter.device.type == "cpu":
                # Else the first access of each page interrupts the copy.
                box.contiguous().view(-1).view(torch.uint8)[::_PAGE].max()
            else:
                box = torch.empty(box.shape, dtype=parameter.dtype, pin_memory=True).copy_(box)
            prepared.copies.append((place, box))

    def _make_second_set(self, prepared: _Prepared, checkpoint: Checkpoint) -> None:
        """For exchanges: new parameters of all that changed, and what to pack of them."""
        live = self._parameters()
        widest = max(self._layouts[parameter][0][-1] for parameter in self._packed.values())
        room = torch.empty(max(_PRODUCT_ELEMENTS, widest))
        for parameter in sorted({place.parameter for place in self._places if place.name in prepared.names}):
            shape, dtype = self._layouts[parameter]
            served = live[parameter]
            new = torch.zeros(shape, dtype=served.dtype if served.numel() else dtype)  # vLLM pads with zeros
            for place in self._places:
                if place.parameter == parameter:
                    place.view(new).copy_(place.box(checkpoint[place.name]))
            for name in self._modules_of(parameter):
                prepared.products.append(_product(name, new, room))
                prepared.packed[name] = self._pack(self._model.get_submodule(name), new)
            if served.numel():
                prepared.parameters[parameter] = new
            else:
                _compare(prepared, {parameter: new})

    def _choose_samples(
        self, prepared: _Prepared, checkpoint: Checkpoint, changes: Mapping[str, Change | None], seed: int
    ) -> None:
        """Elements to look at after the exchange: others each time, and of a delta those that it changes."""
        generator = torch.Generator().manual_seed(seed)
        parameters = self._parameters()
        for place in self._places:
            if place.name not in prepared.names:
                continue
            source = checkpoint[place.name].view(-1)
            chosen = _random_runs(source.numel(), generator)
            change = changes.get(place.name)
            if change is not None and change.positions is not None and len(change.positions):
                picks = torch.randint(len(change.positions), (_SAMPLE_RUNS * _RUN,), generator=generator)
                chosen = torch.cat([chosen, torch.from_numpy(change.positions[picks.numpy()])])
            inside, index = place.locate(chosen)
            served = parameters[place.parameter]
            dtype = served.dtype if served.numel() else self._layouts[place.parameter][1]
            sample = (index.to(served.device), source[chosen[inside]].to(served.device, dtype))
            prepared.samples.append((place.name, place.parameter, *sample))

    # ------------------------------------------------------------ exchanging

    def _copy(self, prepared: _Prepared) -> None:
        parameters = self._parameters()
        for place, source in prepared.copies:
            place.view(parameters[place.parameter]).copy_(source, non_blocking=True)
        for parameter, index, values in prepared.scatters:
            # Twice as fast as index_copy_ on a CPU.
            flat(parameters[parameter]).index_put_((index,), values)
        if any(parameter.device.type != "cpu" for parameter in parameters.values()):
            torch.accelerator.synchronize()

    def _install(self, prepared: _Prepared) -> _Prepared:
        """Exchange references. Returns what served before."""
        old = _Prepared(prepared.names)
        parameters = self._parameters()
        for name, tensor in prepared.parameters.items():
            old.parameters[name] = parameters[name].data
            parameters[name].data = tensor
        for name, multiply in prepared.packed.items():
            module: Any = self._model.get_submodule(name)
            old.packed[name] = module.cpu_linear
            module.cpu_linear = multiply
        return old

    def _check(self, expected: _Prepared, before: Mapping[str, Multiply]) -> None:
        """See that the model computes with the new weights.

        Parameters are read back where the samples are. A packed copy cannot be read, but it multiplies as its weight
        does, and one that is still the object of before the swap is stale: vLLM's own reload leaves the head of a
        model with tied embeddings so.
        """
        parameters = self._parameters()
        _compare(expected, {name: tensor for name, tensor in parameters.items() if tensor.numel()})
        changed = {place.parameter for place in self._places if place.name in expected.names}
        now = self._multiplies()
        if now.keys() != self._packed.keys():
            raise EngineError(
                f"{min(now.keys() ^ self._packed.keys())} is packed otherwise than when the engine started"
            )
        for module, parameter in self._packed.items():
            if parameter in changed and now[module] is before[module]:
                raise EngineError(f"{module} still computes with a packed copy of the old weights")
        for product in expected.products:
            self._multiply(product)

    def _multiply(self, product: _Product) -> None:
        """See that a module computes with its new weight."""
        module: Any = self._model.get_submodule(product.module)
        found, expected = module.cpu_linear(product.probe, module.weight, None), product.expected
        error = (found.float() - expected).abs().max()
        # Weights that are not finite, or overflow, have no such proof; the canary finds them.
        if (
            expected.to(found.dtype).isfinite().all()
            and not error <= _PACKING_ERROR[found.dtype] * expected.abs().max()
        ):
            raise EngineError(f"{product.module} multiplies differently from its weight, by {error:.3g}")

    # ------------------------------------------------------------ the model

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self._model.named_parameters())

    def _modules_of(self, parameter: str) -> list[str]:
        return [module for module, packed in self._packed.items() if packed == parameter]

    def _multiplies(self) -> dict[str, Multiply]:
        return {name: module.cpu_linear for name, module in _packed(self._model)}

    def _changed_layouts(self) -> str | None:
        """A parameter that does not have the layout it was loaded with, nor was emptied when it was packed."""
        for name, parameter in self._parameters().items():
            if parameter.shape != self._layouts[name][0] and name not in self._packed.values():
                return name
        return None


def packed_modules(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Modules that compute with a packed copy of their weight, each with its parameter (of a tied head: the
    embedding's)."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {name: names[id(module.weight)] for name, module in _packed(model)}


def _changes_in(path: Path) -> dict[str, Change | None]:
    """The tensors that a delta or an adapter changes; None for one whose new values the complete files have."""
    if path.name == adapter.FILE:
        return dict.fromkeys(adapter.changed_by(path))
    return {change.name: change for change in read_delta(path)}


def scattered(place: Place, positions: Positions, values: Bits, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A change's elements that fall into a place: positions in the parameter's storage [n], and values [n]."""
    flat_positions, elements = torch.from_numpy(positions), torch.from_numpy(np.array(values)).view(dtype)
    if place.whole:
        return (flat_positions + place.offset if place.offset else flat_positions), elements
    inside, index = place.locate(flat_positions)
    return index, elements[inside]


def _packed(model: nn.Module) -> list[tuple[str, Any]]:
    plain = nn.functional.linear
    return [
        (name, module) for name, module in model.named_modules() if getattr(module, "cpu_linear", plain) is not plain
    ]


def _product(module: str, weight: Tensor, room: Tensor) -> _Product:
    """Computed by BLAS in float32, as much of the weight at a time as there is `room` for: only the thread that steps
    may use oneDNN, which multiplies in bfloat16."""
    probe = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    wide = probe[0].float()
    # Large parts, since each waits for the interpreter; and always in the same memory, since a first touch costs more
    # than the product.
    parts = torch.split(weight, len(room) // weight.shape[1])
    expected = torch.cat([room[: part.numel()].view(part.shape).copy_(part) @ wide for part in parts])[None]
    return _Product(module, probe, expected)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def _random_runs(count: int, generator: torch.Generator) -> Tensor:
    """Positions of a few runs of neighbours among `count` elements; all, if they are few."""
    if count <= _SAMPLE_RUNS * _RUN:
        return torch.arange(count)
    starts = torch.randint(count - _RUN + 1, (_SAMPLE_RUNS, 1), generator=generator)
    return (starts + torch.arange(_RUN)).view(-1)


def _compare(prepared: _Prepared, parameters: Mapping[str, Tensor]) -> None:
    wrong = [
        name
        for name, parameter, index, values in prepared.samples
        if parameter in parameters and not same_bits(flat(parameters[parameter])[index], values)
    ]
    if wrong:
        many = quantity(len(wrong), "tensor is", "tensors are")
        raise EngineError(f"{many} not in the engine as in the files, {wrong[0]} for one")
