"""LoRA (Hu et al. 2021) through PEFT: low-rank adapters on frozen linear layers.

The frozen base is also the reference policy: the model without its adapters, bit for bit and without a second copy.
Merged weights, W + alpha / rank x B A, are published like any other weights; or base and adapters are published
separately (tba.trainer.publishing.snapshot_writer), and the engine applies the adapters.
"""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.common.config import LoraSection
from tba.common.errors import ConfigError, MissingExtra
from tba.common.system.durable import open_regular
from tba.common.weights.pretrained import tied_names
from tba.trainer.distributed import full_tensor
from tba.trainer.model.scorer import weights_of

# The kinds of tensors that `gathered` returns.
MERGED, BASE, FACTORS = "merged", "base", "factors"
# FACTORS are named A or B, a slash, and the name of the weight.
A, B = "a", "b"

_NAME = "default"
_BASE = ".base_layer."
_HASH_CHUNK_BYTES = 4 << 20


def add_adapters(model: PreTrainedModel, config: LoraSection) -> None:
    """Freeze a model and put adapters into it; B starts at zero, so nothing changes yet.

    Raises MissingExtra without PEFT, ConfigError if a target does not exist or is not a plain linear layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtra("peft", "lora") from error
    plain = _plain_layers(model)
    if not plain:
        raise ConfigError(
            f"lora.rank = {config.rank} does not fit the model: its layers are no plain linear ones; set lora.rank = 0"
        )
    usable = ", ".join(sorted({name.rpartition(".")[2] for name in plain}))
    chosen = set(plain if config.targets == "all" else ())
    for target in () if config.targets == "all" else config.targets:
        found = [name for name, _ in model.named_modules() if f".{name}".endswith(f".{target}")]
        if not found or (wrong := [name for name in found if name not in plain]):
            why = f"names {wrong[0]}, which cannot have an adapter" if found else f"has {target}, no layer of the model"
            raise ConfigError(f'lora.targets {why}: name some of its plain inner linear layers, {usable}, or set "all"')
        chosen |= {*found}
    model.requires_grad_(False)
    settings = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=["-"], lora_dropout=0.0, bias="none")
    # By whole names, as from a file: of `target_modules` PEFT makes experts by the kind of model, whatever they name.
    names = dict.fromkeys(f"{name}.lora_A.weight" for name in chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        inject_adapter_in_model(settings, model, adapter_name=_NAME, state_dict=names)


def _plain_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers that may have adapters: those that a forward pass calls."""
    # `token_logprobs` uses the head's weight directly, and merging supports linear layers only. PEFT's "all-linear"
    # would also take experts, which are one tensor for all of them, and routers.
    # Of two layers with one weight, each would have an adapter, and one would be published.
    tied = {name for pair in tied_names(model).items() for name in pair}
    left_out = {id(model.get_output_embeddings())}
    left_out |= {id(one) for name, one in model.named_modules() if f"{name}.weight" in tied}
    for mixer in model.modules():
        # Kernels of state-space layers (Mamba) take these weights without calling the layers.
        if hasattr(mixer, "A_log") and hasattr(mixer, "D"):
            left_out |= {id(getattr(mixer, name, None)) for name in ("dt_proj", "out_proj")}
    return [name for name, one in model.named_modules() if type(one) is nn.Linear and id(one) not in left_out]


@contextlib.contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Disable the adapters while the block runs. Does nothing to a model without adapters."""
    layers = [layer for _, layer in _adapted(model)]
    # PEFT's own switch also changes `requires_grad` of the adapters. The forward pass depends on this flag alone.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def gathered(model: PreTrainedModel, what: str) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a model one by one, each gathered from all ranks. Every rank must iterate over all of them.

    MERGED: all weights, with any adapters merged in. BASE: all weights without adapters. FACTORS: the adapters in their
    own dtype, A [rank, in] as a/NAME and B [out, rank] as b/NAME of the weight that they change. Names are those that
    the model has without adapters.
    """
    layers = dict(_adapted(model))
    if what == FACTORS:
        for name, layer in layers.items():
            yield f"{A}/{name}.weight", full_tensor(layer.lora_A[_NAME].weight)
            yield f"{B}/{name}.weight", full_tensor(layer.lora_B[_NAME].weight)
        return
    for name, tensor in weights_of(model).items():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.partition(_BASE)
        layer = layers.get(owner) if what == MERGED and leaf == "weight" else None
        yield name.replace(_BASE, "."), full_tensor(tensor) if layer is None else _merge(layer)


def _merge(layer: Any) -> Tensor:
    a, b = full_tensor(layer.lora_A[_NAME].weight), full_tensor(layer.lora_B[_NAME].weight)
    sum_: Tensor = full_tensor(layer.base_layer.weight) + layer.scaling[_NAME] * (b @ a)
    return sum_


def base_digest(directory: Path) -> str:
    """Hash the weight files of a model directory: adapters belong to one base."""
    digest = xxhash.xxh3_128()
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(path.name.encode())
        with open_regular(path) as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _adapted(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))
