"""The sizes of a model that decide how much memory its training takes, without its weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tba.common.system.load_errors import loading
from tba.common.weights.pretrained import from_config, from_directory

# Configurations of mixtures of experts name these differently.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token")
_EXPERT_WIDTHS = ("moe_intermediate_size", "intermediate_size")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of parameters (each tied one once) and widths of activations.

    `root` are the parameters outside of the decoder layers, `largest_layer` those of one layer. `query` and `key_value`
    are heads x head width. `inner` is the width of the MLP that one token passes through, summed over its `experts`
    (0 for a dense model). `adapter` is the sum of inputs and outputs of the linear layers with adapters: times the rank
    it is the number of trained parameters with LoRA. `reference` are the parameters of another model that is the
    reference (`reference.path`), `reference_root` and `reference_layer` its root and largest layer; 0 if there is none.
    """

    parameters: int
    root: int
    largest_layer: int
    head: int
    vocabulary: int
    layers: int
    hidden: int
    query: int
    key_value: int
    inner: int
    experts: int
    normed_heads: bool
    adapter: int
    reference: int = 0
    reference_root: int = 0
    reference_layer: int = 0


def meta_model(directory: Path) -> PreTrainedModel:
    """Return the float32 model of a directory on the meta device, from its config.json alone. Raises ConfigError."""
    with loading(f"the configuration of the model in {directory}"), torch.device("meta"):
        config = from_directory(AutoConfig, directory)
        model: PreTrainedModel = from_config(AutoModelForCausalLM, config, directory, dtype=torch.float32)
    return model


def shape_of(model: PreTrainedModel, targets: Sequence[str] | Literal["all"] = "all") -> ModelShape:
    """Measure a model, on any device and not sharded. `targets` are those of `lora.targets`."""
    config = model.config.get_text_config()
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    sizes = [_count(layer) for layer in layers]
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    head = model.get_output_embeddings()
    total, experts = _count(model), experts_per_token(model)
    inner = next((getattr(config, one) for one in _EXPERT_WIDTHS if getattr(config, one, None)), 4 * head.in_features)
    if not experts:
        inner = getattr(config, "intermediate_size", None) or 4 * head.in_features
    return ModelShape(
        parameters=total,
        root=total - sum(sizes),
        largest_layer=max(sizes, default=0),
        head=head.weight.numel(),
        vocabulary=head.out_features,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        query=heads * width,
        key_value=(getattr(config, "num_key_value_heads", None) or heads) * width,
        inner=inner * max(experts, 1),
        experts=experts,
        normed_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        adapter=sum(
            module.in_features + module.out_features
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and module is not head
            and (targets == "all" or name.rpartition(".")[2] in targets)
        ),
    )


def with_reference(shape: ModelShape, directory: Path | None) -> ModelShape:
    """Return the shape of a run whose reference is the model of another directory, None for none."""
    if directory is None:
        return shape
    other = shape_of(meta_model(directory))
    return replace(shape, reference=other.parameters, reference_root=other.root, reference_layer=other.largest_layer)


def experts_per_token(model: PreTrainedModel) -> int:
    """Return how many routed experts of a layer compute each token, 0 for a dense model."""
    config = model.config.get_text_config()
    if not any(getattr(config, name, None) for name in _EXPERTS):
        return 0
    return next((getattr(config, name) for name in _EXPERTS_PER_TOKEN if getattr(config, name, None)), 0)


def active_fraction(model: PreTrainedModel) -> float:
    """Return the fraction of the routed experts' parameters that compute one token, 1 for a dense model."""
    config = model.config.get_text_config()
    experts = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), 0)
    chosen = experts_per_token(model)
    return chosen / experts if experts and chosen else 1.0


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
