"""The part of a weight swap that runs inside vLLM's worker process.

vLLM mixes `WeightLoader` into its worker class (`worker_extension_cls`), and the engine calls it by name, so
that only strings cross processes. Nothing here may be imported before vLLM.
"""

from collections.abc import Iterator
from typing import Any

from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform


class WeightLoader:
    """Methods added to vLLM's worker. The prefix keeps clear of vLLM's own names, which it checks."""

    def tba_load_weights(self, files: list[str]) -> None:
        """Overwrite the weights in place by those of complete safetensors files, between two steps.

        `reload_weights` rather than `model.load_weights`: on the CPU the linear layers keep only oneDNN's
        packed copy, on CUDA quantised or captured layers need their tensors processed and copied in place.
        Not transactional: after an error the weights are undefined.
        """
        worker: Any = self
        worker.reload_weights(weights_iterator=_tensors(files))
        if current_platform.is_cpu():
            _repack_tied_heads(worker)


def _tensors(files: list[str]) -> Iterator[tuple[str, Any]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # a safe_open handle does not iterate
                yield name, file.get_tensor(name)


def _repack_tied_heads(worker: Any) -> None:
    """Pack tied LM heads again from the embedding that was just loaded.

    vLLM's CPU backend multiplies by a packed copy of the head's weight. A reload repacks the layers that
    received tensors, and a tied head receives none: without this it keeps the old weights, silently (seen
    with vLLM 0.32.0: log-probabilities off by up to 2). This goes when tests/vllm/test_hot_reload.py passes
    for tied embeddings without it.
    """
    if not getattr(worker.model_config.hf_text_config, "tie_word_embeddings", False):
        return
    with set_current_vllm_config(worker.vllm_config):
        for layer in worker.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
