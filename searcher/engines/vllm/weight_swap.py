"""In-place swaps of a model's weights, with the layout recorded by `weight_layout`, in two steps.

    prepare    alongside generation, in a thread: map the files, and register them as pinned memory for a GPU
    exchange   between two generation steps: copy into the parameters and read a sample back

Copies keep the addresses of the parameters, which CUDA graphs depend on. A swap always copies all tensors: on a GPU
that takes less time and memory than scattering the changed elements would. Nothing is put on the device before the
exchange, since the engine leaves little free there, and nothing larger than a staging block during it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tba.common.errors import EngineError
from tba.common.quantity import quantity
from tba.searcher.engines.vllm.tensor_files import MappedFiles, TensorFiles, map_files, touch
from tba.searcher.engines.vllm.weight_layout import TensorSlice, differing, same_bits

# After an exchange, this number of runs of adjacent elements of each tensor is compared with the file.
_SAMPLE_RUNS, _RUN = 16, 64
# Of device memory, for a part of a tensor that is not stored as in the file.
_STAGING_BYTES = 32 << 20

Layouts = Mapping[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Elements of one tensor, on the host: positions in the parameter's storage [n], and values in the file [n]."""

    name: str
    parameter: str
    index: Tensor
    values: Tensor


@dataclass(slots=True)
class _Prepared:
    """The input of an exchange, and what must be read back after it."""

    copies: list[tuple[TensorSlice, Tensor]] = field(default_factory=list)
    samples: list[_Sample] = field(default_factory=list)


class WeightSwap:
    """Swaps the weights of one model. `layouts` are shape and dtype of each parameter right after loading.

    Raises EngineError for a model that does not compute with the parameters that were loaded.
    """

    def __init__(self, model: nn.Module, slices: Sequence[TensorSlice], layouts: Layouts) -> None:
        self._model = model
        self._prepared: _Prepared | None = None
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
        for _, source in copies:
            touch(source)
        self._prepared = _Prepared(copies, self._samples(tensors, seed))

    def exchange(self) -> None:
        """Copy the prepared weights into the parameters, and read a sample of each tensor back.

        Call it between two steps. After an EngineError the weights are undefined.
        """
        if self._prepared is None:
            raise EngineError("no weights are prepared")
        prepared, self._prepared = self._prepared, None
        self._copy(prepared)
        self._read_back(prepared.samples)

    def checked_reload(self, files: Sequence[str], seed: int, reload: Callable[[TensorFiles], None]) -> None:
        """Load with `reload` instead of an exchange, and read a sample back. Raises EngineError if it differs."""
        self._prepared = None
        tensors = self._mapped.open(files)
        samples = self._samples(tensors, seed)
        reload(tensors)
        self._read_back(samples)

    def skip_processed(self, files: Sequence[str]) -> None:
        """Read back only tensors that the parameters hold as these files do, whose weights are loaded.

        vLLM processes others after loading, for example shuffles their rows.
        """
        processed = differing(self._slices, self._parameters(), map_files(files))
        self._slices = [one for one in self._slices if one.name not in processed]

    def _samples(self, tensors: TensorFiles, seed: int) -> list[_Sample]:
        """Choose the elements to read back after the exchange, different ones for each seed."""
        generator = torch.Generator().manual_seed(seed)
        parameters = self._parameters()
        samples = []
        for one in self._slices:
            if one.name not in tensors:
                continue
            source = tensors[one.name].view(-1)
            chosen = _random_runs(source.numel(), generator)
            inside, index = one.locate(chosen)
            values = source[chosen[inside]].to(parameters[one.parameter].dtype)
            samples.append(_Sample(one.name, one.parameter, index, values))
        return samples

    @torch.no_grad()
    def _copy(self, prepared: _Prepared) -> None:
        parameters = self._parameters()
        for one, source in prepared.copies:
            _copy_box(one, source, parameters[one.parameter])
        # The device reads the mapped files: none may change or be unmapped before it has.
        if any(parameter.device.type != "cpu" for parameter in parameters.values()):
            torch.accelerator.synchronize()

    def _read_back(self, samples: Sequence[_Sample]) -> None:
        self._check_computes_with_parameters()
        parameters = self._parameters()
        held = (_flat(parameters[one.parameter]) for one in samples)
        found = [flat[one.index.to(flat.device)] for one, flat in zip(samples, held, strict=True)]
        wrong = [
            one.name for one, values in zip(samples, found, strict=True) if not same_bits(values.cpu(), one.values)
        ]
        if wrong:
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
    """Copy a tensor's box from a mapped file into a parameter."""
    source, target = one.of_checkpoint(tensor), one.of_parameter(parameter)
    same_form = source.is_contiguous() and target.is_contiguous() and source.dtype == target.dtype
    if parameter.device.type == "cpu" or same_form or not source.dim():
        target.copy_(source, non_blocking=True)
    else:
        _copy_through_staging(one, tensor, parameter)


def _copy_through_staging(one: TensorSlice, tensor: Tensor, parameter: Tensor) -> None:
    """Transfer whole rows as they are in the file, and cut and convert them on the device.

    Torch would first make a contiguous and converted copy of the box on the host, in one thread, or one of the whole
    box on the device.
    """
    target = one.of_parameter(parameter)
    rows = tensor.narrow(0, one.start[0], one.size[0])
    step = max(1, _STAGING_BYTES // max(1, rows[0].nbytes))
    for first in range(0, one.size[0], step):
        staged = rows[first : first + step].to(parameter.device, non_blocking=True)
        for dimension in range(1, staged.dim()):
            staged = staged.narrow(dimension, one.start[dimension], one.size[dimension])
        target[first : first + step].copy_(staged)


def _flat(parameter: Tensor) -> Tensor:
    """View a dense parameter's elements in the order of its storage."""
    return parameter.as_strided((parameter.numel(),), (1,), 0)


def _random_runs(count: int, generator: torch.Generator) -> Tensor:
    """Positions of a few runs of adjacent elements among `count`; all positions if they are few."""
    if count <= _SAMPLE_RUNS * _RUN:
        return torch.arange(count)
    starts = torch.randint(count - _RUN + 1, (_SAMPLE_RUNS, 1), generator=generator)
    return (starts + torch.arange(_RUN)).view(-1)
