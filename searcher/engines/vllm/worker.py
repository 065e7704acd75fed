"""The part of a weight swap that runs inside vLLM's worker processes.

vLLM imports this module in each worker before it loads the model (`worker_extension_cls`), and the engine calls
`WeightWorker` by method name, so that only strings and numbers cross processes. Importing this module imports vLLM.
The swap itself is in weight_swap.py, which does not depend on vLLM.
"""

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from tba.common.errors import EngineError, named, quantity
from tba.common.system.background import Background
from tba.common.weights.model_files import weight_files
from tba.common.weights.pretrained import tied_names
from tba.searcher.engines.vllm import weight_swap
from tba.searcher.engines.vllm.running import FAILURE
from tba.searcher.engines.vllm.start import ADAPTER_ID, adapter_request
from tba.searcher.engines.vllm.weight_state import Derived, ProcessingWatch, clear, differences, fingerprint, zeros

LOAD_FORMAT = "tba"

P = ParamSpec("P")
T = TypeVar("T")


def _reported(method: Callable[P, T]) -> Callable[P, T | dict[str, str]]:
    """Return {FAILURE: reason} instead of raising: vLLM would take other replies for those to the next call."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T | dict[str, str]:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            return {FAILURE: named(error)}

    return call


@register_model_loader(LOAD_FORMAT)
class RecordingLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not installed for type checks
    """vLLM's loader of safetensors, which also records where the model puts each tensor.

    This is only possible between loading and processing: afterwards parameters may be packed, and empty. The result is
    left on the model, since vLLM keeps no loader: `tba_slices`, or `tba_reason` with the reason why there are none.
    """

    def __init__(self, load_config: Any) -> None:
        extra = dict(load_config.model_loader_extra_config)
        self._packed = extra.pop("packed", True)
        super().__init__(dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config=extra))

    def _prepare_weights(self, model_name_or_path: str, *arguments: Any) -> tuple[Any, ...]:
        """Choose the model's own files: the directory may have others, such as consolidated.safetensors."""
        folder, _, *rest = super()._prepare_weights(model_name_or_path, *arguments)
        return folder, [*map(str, weight_files(Path(folder)))], *rest

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load, then record and compare with the files."""
        super().load_weights(model, model_config)
        parameters = dict(model.named_parameters())
        model.tba_layouts = {name: (parameter.shape, parameter.dtype) for name, parameter in parameters.items()}
        files = weight_swap.map_files(map(str, weight_files(Path(model_config.model))))
        model.tba_places = set()
        try:
            model.tba_slices = weight_swap.record(model.load_weights, parameters, files, model.tba_places)
            if wrong := weight_swap.differing(model.tba_slices, parameters, files):
                raise EngineError(f"{wrong[0]} was not found where it was recorded")
        # The model's own loading code may raise anything. The reason is logged when the engine chooses how to swap.
        except Exception as error:  # noqa: BLE001
            model.tba_slices, model.tba_reason = [], named(error)
        if not self._packed:
            for module in model.modules():
                module._cpu_skip_gemm_dispatch = True
        # Until the end of `load_model`: vLLM processes the layers next.
        model.tba_watch = self._processing.enter_context(ProcessingWatch(model))

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as self._processing:
            model: Any = super().load_model(*args, **kwargs)
        model.tba_packed = self._packed
        _unpack_heads(model)
        return model


class WeightWorker:
    """Methods added to vLLM's worker. The prefix avoids clashes with vLLM's own names, which vLLM checks for."""

    tba_swap: weight_swap.WeightSwap | None = None
    tba_thread: Background | None = None
    tba_failure: str | None = None
    # The state of the model as it was started, and what cannot be read back as not zero.
    tba_own: Mapping[str, str] = MappingProxyType({})
    tba_zeros: Set[str] = frozenset()

    @_reported
    def tba_start(self) -> str | None:
        """Find out what prevents a swap in place before one is tried; None if nothing does.

        With LoRA, also installs the adapter that all requests use, with its B at zero.
        """
        self._tba_adapt("")
        model: Any = self._tba_model()
        # Temporary tensors of loading may wait in reference cycles.
        gc.collect()
        self.tba_own = fingerprint(model, self._tba_derived())
        self.tba_zeros = zeros(model)
        reason: str | None = getattr(model, "tba_reason", None)
        if reason is None:
            try:
                self.tba_swap = weight_swap.WeightSwap(model, model.tba_slices, model.tba_layouts)
            except EngineError as error:
                reason = str(error)
        return reason

    @_reported
    def tba_unplaced(self, files: list[str]) -> dict[str, bool]:
        """Return the tensors of the files that the model does not hold, and whether each is a copy of one that it does.

        With a tied head these are a copy of it, whose own parameter vLLM gave up after loading. If the layout is
        unknown, a tensor that went nowhere may have been converted.
        """
        model: Any = self._tba_model()
        parameters = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        placed = {name for name, parameter in model.tba_places if parameter in parameters}
        given_up = {name for name, _ in model.tba_places} - placed
        tensors = weight_swap.map_files(files)
        left_out = {name for name in tensors if name in given_up or (model.tba_slices and name not in placed)}
        held = [one for name, one in tensors.items() if name not in left_out]
        copied = {
            name: any(one.shape == tensors[name].shape and weight_swap.same_bits(one, tensors[name]) for one in held)
            for name in left_out
        }
        return {name: is_copy for name, is_copy in copied.items() if is_copy or model.tba_slices}

    @_reported
    def tba_try(self, files: list[str], in_place: bool) -> list[str]:
        """Clear all weights, load those that the engine was started with, in place or by a reload, and compare.

        Returns the names of the tensors that are not what they were: their address, their layout or their content.
        """
        if in_place:
            assert self.tba_swap is not None
            self._tba_clear()
            self.tba_swap.prepare(files, 0)
            self.tba_swap.exchange()
        else:
            self._tba_reload_all(weight_swap.map_files(files))
            if self.tba_swap is not None:
                self.tba_swap.skip_processed(files)
        self._tba_adapt("")
        return differences(dict(self.tba_own), fingerprint(self._tba_model(), self._tba_derived()))

    @_reported
    def tba_is_own(self) -> bool:
        """Whether the model holds the weights that the engine was started with, bit for bit."""
        return not differences(dict(self.tba_own), fingerprint(self._tba_model(), self._tba_derived()))

    @_reported
    def tba_prepare(self, files: list[str], seed: int) -> None:
        """Start to prepare a swap in a thread, and return immediately. An earlier preparation is finished first."""
        if self.tba_thread is not None:
            self.tba_thread.join()
        self.tba_failure = None
        self.tba_thread = Background("prepare weights", functools.partial(self._tba_prepare, files, seed))
        self.tba_thread.start()

    @_reported
    def tba_prepared(self) -> tuple[bool, str | None]:
        """Whether the preparation has ended, and the reason if it failed."""
        ended = self.tba_thread is None or not self.tba_thread.running
        return ended, self.tba_failure

    @_reported
    def tba_exchange(self) -> None:
        """Copy the prepared weights into the model. Raises EngineError if they do not take effect."""
        assert self.tba_swap is not None, "this model is not swapped in place"
        self.tba_swap.exchange()

    @_reported
    def tba_reload(self, files: list[str], seed: int) -> None:
        """Overwrite all weights with vLLM's own layer-wise reload: slow, but for every model that vLLM loads.

        It removes all adapters, and after an error the weights are undefined. Raises EngineError if it leaves a tensor
        out: all are zero before, and a sample of those that are not processed later is compared with the files.
        """
        if self.tba_swap is None:
            self._tba_reload_all(weight_swap.map_files(files))
        else:
            self.tba_swap.checked_reload(files, seed, self._tba_reload_all)

    @_reported
    def tba_set_adapter(self, path: str) -> None:
        self._tba_adapt(path)

    @_reported
    def tba_close(self) -> None:
        """Unregister the files of weights: another engine of this process may map others to the same addresses."""
        if self.tba_swap is not None:
            self.tba_swap.close()

    def _tba_adapt(self, path: str) -> None:
        """Replace the adapter; "" sets its B to zero. Does nothing in an engine without LoRA."""
        worker: Any = self
        manager = getattr(worker.model_runner, "lora_manager", None)
        if manager is None:
            return
        manager.remove_adapter(ADAPTER_ID)
        request = adapter_request(path)
        if not path:
            manager.add_dummy_lora(request, rank=1)
        # Loads it unless it was added just now, and copies it to the device.
        manager.add_adapter(request)

    def _tba_model(self) -> Any:
        worker: Any = self
        return worker.get_model()

    def _tba_prepare(self, files: list[str], seed: int) -> None:
        worker: Any = self
        assert self.tba_swap is not None
        try:
            # Each thread starts on the first device.
            if not current_platform.is_cpu():
                torch.accelerator.set_device_index(worker.device.index)
            with torch.no_grad():
                self.tba_swap.prepare(files, seed)
        # Reported by `tba_prepared`: the engine decides what to do about it.
        except Exception as error:  # noqa: BLE001
            self.tba_failure = named(error)

    def _tba_derived(self) -> list[Derived]:
        """The tensors made from weights while the model was processed, as far as they are still in use."""
        model: Any = self._tba_model()
        if not hasattr(model, "tba_derived"):
            model.tba_derived = model.tba_watch.derived(model)
            del model.tba_watch
        derived: list[Derived] = model.tba_derived
        return derived

    def _tba_clear(self) -> None:
        worker: Any = self
        worker.reset_weights()
        clear(self._tba_derived())

    def _tba_reload_all(self, files: weight_swap.Tensors) -> None:
        """Reload. Raises EngineError for layers that have received nothing."""
        model: Any = self._tba_model()
        packed = weight_swap.packed_copies(model)
        self._tba_clear()
        worker: Any = self
        if current_platform.is_cpu():
            _forget_packed_experts(model)
        worker.reload_weights(weights_iterator=iter(files.items()))
        if current_platform.is_cpu():
            _repack_tied_heads(worker)
            _unpack_heads(model)
        now = weight_swap.packed_copies(model)
        missed = sorted(zeros(model) - self.tba_zeros) + [name for name, one in packed.items() if now.get(name) is one]
        if missed:
            many = quantity(len(missed), "tensor was", "tensors were")
            raise EngineError(f"{many} left out by vLLM's reload, for example {missed[0]}")


def _forget_packed_experts(model: nn.Module) -> None:
    """Let vLLM's CPU backend pack experts again.

    It does that only when it makes their kernel. Once there is one, a reload writes unpacked weights into the packed
    ones (vLLM 0.32.0). Remove this when tests/vllm/test_swap_mixture.py finds no wrong experts without it.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _unpack_heads(model: Any) -> None:
    """Without packing, also make heads and embeddings compute with their parameter.

    `_cpu_skip_gemm_dispatch` keeps linear layers from being packed, but not these, which have both forms.
    """
    if not getattr(model, "tba_packed", True):
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = nn.functional.linear


def _repack_tied_heads(worker: Any) -> None:
    """Pack tied LM heads again from the embedding that was just loaded.

    vLLM's CPU backend multiplies by a packed copy of the head's weight. A reload repacks the layers that received
    tensors, and a tied head receives none, so it would silently keep the old weights (vLLM 0.32.0: log-probabilities
    are off by up to 2). Remove this when tests/vllm/test_swap_traps.py finds no stale head without it.
    """
    model = worker.get_model()
    tied = {id(model.get_parameter(name)) for name in tied_names(model)}
    with set_current_vllm_config(worker.vllm_config):
        for layer in model.modules():
            if isinstance(layer, ParallelLMHead) and id(layer.weight) in tied:
                layer.quant_method.process_weights_after_loading(layer)
