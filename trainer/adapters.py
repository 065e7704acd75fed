"""LoRA through PEFT: adapters beside frozen linear layers.

The frozen base is the reference policy: the model without its adapters, bit for bit and without a second copy. What is
published is merged, W + alpha / rank x B A, so that searchers load it like any other weights; or base and adapters
apart (tba.trainer.adapter_writer), which each searcher merges.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.common.adapter import HIGH, LOW
from tba.common.config import LoraSection
from tba.common.errors import ConfigError, MissingExtra
from tba.trainer.model import weights_of
from tba.trainer.sharding import whole

# What can be put together of a model, for `gathered`.
MERGED, BASE, FACTORS = "merged", "base", "factors"

_NAME = "default"
_BASE = ".base_layer."
_HASH_CHUNK_BYTES = 4 << 20


def add_adapters(model: PreTrainedModel, config: LoraSection) -> None:
    """Freeze a model and put adapters into it; B starts at zero, so nothing changes yet.

    Raises MissingExtra without PEFT, ConfigError if a target is not there or is no plain linear layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtra("peft", "lora") from error
    targets = "all-linear" if config.targets == "all" else list(config.targets)
    settings = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0, bias="none")
    model.requires_grad_(False)
    try:
        inject_adapter_in_model(settings, model, adapter_name=_NAME)
    except ValueError as error:
        raise ConfigError(f"lora.targets = {config.targets} does not fit the model: {error}") from error
    _check_targets(model)


def _check_targets(model: PreTrainedModel) -> None:
    """`selective_logprobs` takes the head's weight as it is, and merging knows linear layers only."""
    for name, layer in _adapted(model):
        if type(layer.base_layer) is not nn.Linear or layer is model.get_output_embeddings():
            raise ConfigError(f"lora.targets names {name}, which can have no adapter: only inner linear layers can")


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether `add_adapters` was here."""
    return any(True for _ in _adapted(model))


def without_adapters(model: PreTrainedModel) -> AbstractContextManager[None]:
    """The model as it was before it got adapters, while the block runs; any other model as it is."""
    return _disabled([layer for _, layer in _adapted(model)])


@contextlib.contextmanager
def _disabled(layers: list[Any]) -> Iterator[None]:
    # PEFT's own switch also freezes the adapters and unfreezes them again; the flag alone is what forward looks at.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def gathered(model: PreTrainedModel, what: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a model, one after the other, each put together from all ranks. Every rank has to go through them.

    MERGED: all weights, with adapters merged in if there are any; BASE: all weights without them; FACTORS: the
    adapters, A as low/NAME and B as high/NAME of the weight that they change. Names are those without adapters.
    """
    if what == FACTORS:
        return _factors(model)
    state = weights_of(model)
    return merged(model, state) if what == MERGED else _base(state)


def scalings(model: PreTrainedModel) -> dict[str, float]:
    """What the product of each adapter is multiplied by, by the name of its weight."""
    return {f"{name}.weight": float(layer.scaling[_NAME]) for name, layer in _adapted(model)}


def _factors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, layer in _adapted(model):
        yield f"{LOW}/{name}.weight", whole(layer.lora_A[_NAME].weight)
        yield f"{HIGH}/{name}.weight", whole(layer.lora_B[_NAME].weight)


def _base(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        if ".lora_" not in name:
            yield name.replace(_BASE, "."), whole(tensor)


def merged(model: PreTrainedModel, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A state dict under the names that it has without adapters, each tensor put together from all ranks and merged.

    One tensor at a time, so that never two models are there. Every rank has to go through all of it.
    """
    layers = dict(_adapted(model))
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.partition(_BASE)
        layer = layers.get(owner) if leaf == "weight" else None
        yield name.replace(_BASE, "."), whole(tensor) if layer is None else _merge(layer)


def _merge(layer: Any) -> Tensor:
    low, high = whole(layer.lora_A[_NAME].weight), whole(layer.lora_B[_NAME].weight)
    sum_: Tensor = whole(layer.base_layer.weight) + layer.scaling[_NAME] * (high @ low)
    return sum_


def fingerprint(directory: Path) -> str:
    """Of the weight files of a model directory: adapters belong to one base."""
    digest = xxhash.xxh3_128()
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _adapted(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))
