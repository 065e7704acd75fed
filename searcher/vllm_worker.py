"""The part of a weight swap that runs inside vLLM's worker processes.

vLLM imports this module in each worker before it loads the model (`worker_extension_cls`), and the engine calls
`WeightWorker` by method name, so that only strings and numbers cross processes. Nothing here may be imported
before vLLM. What is done with the weights is in weight_places.py and weight_swap.py, which know nothing of vLLM.
"""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from tba.common.errors import EngineError
from tba.common.model_files import weight_files
from tba.searcher.weight_places import Checkpoint, differing, record
from tba.searcher.weight_swap import Multiply, WeightSwap

LOAD_FORMAT = "tba"
# Methods after which a layer computes with the parameter that was loaded or (on the CPU) with `cpu_linear`. Others,
# quantisation and mixtures of experts for two, may permute or convert, and keep what was derived.
_KNOWN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})


@register_model_loader(LOAD_FORMAT)
class RecordingLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not installed for type checks
    """vLLM's loader of safetensors, which also records where the model puts each tensor.

    That is known only between loading and processing: afterwards parameters may be packed, and empty. The result
    is left on the model, as vLLM keeps no loader: `tba_places`, or `tba_obstacle`, why there are none.
    """

    def __init__(self, load_config: Any) -> None:
        extra = dict(load_config.model_loader_extra_config)
        self._packed = extra.pop("packed", True)
        super().__init__(dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config=extra))

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load, then record and compare."""
        super().load_weights(model, model_config)
        parameters = dict(model.named_parameters())
        model.tba_layouts = {name: (parameter.shape, parameter.dtype) for name, parameter in parameters.items()}
        checkpoint = Checkpoint(map(str, weight_files(Path(model_config.model))))
        try:
            model.tba_places = record(model.load_weights, parameters, checkpoint)
            if wrong := differing(model.tba_places, parameters, checkpoint):
                raise EngineError(f"{wrong[0]} was not found where it was recorded")
        except Exception as error:  # noqa: BLE001 - whatever the model's own loading raises: it is told and logged
            model.tba_places, model.tba_obstacle = [], f"{type(error).__name__}: {error}"
        if not self._packed:
            for module in model.modules():
                module._cpu_skip_gemm_dispatch = True

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load and process."""
        model: Any = super().load_model(*args, **kwargs)
        model.tba_packed = self._packed
        _settle(model)
        return model


class WeightWorker:
    """Methods added to vLLM's worker. The prefix keeps clear of vLLM's own names, which it checks."""

    tba_swap: WeightSwap | None = None
    tba_thread: threading.Thread | None = None
    tba_failure: str | None = None

    def tba_start(self) -> dict[str, str]:
        """Decide how weights are swapped: `way` is "in place", "exchange" or "reload", and `reason` says why."""
        model: Any = self._tba_model()
        obstacle = getattr(model, "tba_obstacle", None if hasattr(model, "tba_places") else "no places were recorded")
        obstacle = obstacle or _processed_otherwise(model)
        if obstacle is None:
            try:
                self.tba_swap = WeightSwap(model, model.tba_places, model.tba_layouts, _pack)
                return {"way": "in place" if self.tba_swap.in_place else "exchange", "reason": ""}
            except EngineError as error:
                obstacle = str(error)
        return {"way": "reload", "reason": obstacle}

    def tba_prepare(self, files: list[str], delta: str | None, seed: int) -> None:
        """Begin to prepare a swap, in a thread, and return at once. An earlier preparation is finished first."""
        if self.tba_thread is not None:
            self.tba_thread.join()
        self.tba_failure = None
        if self.tba_swap is not None:
            self.tba_thread = threading.Thread(target=self._tba_prepare, args=(files, delta, seed), daemon=True)
            self.tba_thread.start()

    def tba_prepared(self) -> tuple[bool, str | None]:
        """Whether preparing has ended, and what it failed on."""
        ended = self.tba_thread is None or not self.tba_thread.is_alive()
        return ended, self.tba_failure

    def tba_exchange(self, files: list[str], seed: int) -> None:
        """Make the weights that were prepared serve. Raises EngineError if they do not."""
        if self.tba_swap is None:
            self.tba_reload(files, seed)
        else:
            self.tba_swap.exchange()

    def tba_undo(self) -> bool:
        """Go back to the weights before the exchange; False if they have to be loaded again."""
        return self.tba_swap is not None and self.tba_swap.undo()

    def tba_keep(self) -> None:
        """The new weights are proven: forget the old ones."""
        if self.tba_swap is not None:
            self.tba_swap.keep()

    def tba_reload(self, files: list[str], seed: int) -> None:
        """Overwrite all weights by vLLM's own layer-wise reload: slow, and for every model that vLLM loads.

        Not transactional: after an error the weights are undefined.
        """
        if self.tba_swap is None:
            self._tba_reload(Checkpoint(files))
        else:
            self.tba_swap.checked_reload(files, seed, self._tba_reload)

    def tba_hashes(self) -> dict[str, str]:
        """sha256 of each tensor's part on this worker; packed ones are left out, and all if places are unknown."""
        return {} if self.tba_swap is None else self.tba_swap.hashes()

    def _tba_model(self) -> Any:
        worker: Any = self
        return worker.get_model()

    def _tba_prepare(self, files: list[str], delta: str | None, seed: int) -> None:
        worker: Any = self
        assert self.tba_swap is not None
        try:
            if not current_platform.is_cpu():
                torch.accelerator.set_device_index(worker.device.index)  # each thread starts on the first device
            with torch.no_grad():
                self.tba_swap.prepare(files, delta, seed)
        except Exception as error:  # noqa: BLE001 - told by tba_prepared
            self.tba_failure = f"{type(error).__name__}: {error}"

    def _tba_reload(self, checkpoint: Checkpoint) -> None:
        worker: Any = self
        worker.reload_weights(weights_iterator=checkpoint.items())
        if current_platform.is_cpu():
            _repack_tied_heads(worker)
            _settle(worker.get_model())


def _processed_otherwise(model: nn.Module) -> str | None:
    """A layer that may keep something derived from its weights, which a copy into the weights would leave stale."""
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if (
            method not in _KNOWN_METHODS
            and any(True for _ in module.parameters(recurse=False))
            and method != "NoneType"
        ):
            return f"{name} is processed by {method} after loading"
    return None


def _settle(model: Any) -> None:
    """Drop the packed copies, which vLLM's CPU backend makes of every embedding, that nobody computes with.

    Beside a head, an embedding only looks rows up. Without packing, `_cpu_skip_gemm_dispatch` keeps linear layers
    from being packed, but not heads; they have their weight beside the packed copy.
    """
    packed = getattr(model, "tba_packed", True)
    has_head = any(isinstance(module, ParallelLMHead) for module in model.modules())
    for module in model.modules():
        if hasattr(module, "cpu_linear") and (not packed or (has_head and type(module) is VocabParallelEmbedding)):
            module.cpu_linear = nn.functional.linear


def _pack(module: nn.Module, weight: Tensor) -> Multiply:
    """What vLLM's CPU backend makes of a linear layer's weight when it loads one. Raises EngineError if it cannot."""
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    owner: Any = module
    owner.quant_method.process_weights_after_loading(layer)
    if layer.weight.numel() and not owner.weight.numel():  # vLLM warns, and would go on with the weight itself
        raise EngineError(f"vLLM could not pack a weight of {list(weight.shape)}: its warning says why")
    multiply: Multiply = layer.cpu_linear
    return multiply


def _repack_tied_heads(worker: Any) -> None:
    """Pack tied LM heads again from the embedding that was just loaded.

    vLLM's CPU backend multiplies by a packed copy of the head's weight. A reload repacks the layers that
    received tensors, and a tied head receives none: without this it keeps the old weights, silently (seen
    with vLLM 0.32.0: log-probabilities off by up to 2). This goes when the test of a stale head in
    tests/vllm/test_swap_traps.py finds none without it.
    """
    if not getattr(worker.model_config.hf_text_config, "tie_word_embeddings", False):
        return
    with set_current_vllm_config(worker.vllm_config):
        for layer in worker.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
