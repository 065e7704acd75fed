"""Model directories whose config.json and files say different things about the head, and snapshots as trainers make."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def _save(
    directory: Path, kind: str, *, tied: bool | None, head: str = "lm_head.weight", noise: float | None = None
) -> None:
    """Save a random model. `tied` None removes the flag from config.json; with `noise` the files get a `head` too."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = SHAPE if kind != "gemma3" else {"text_config": SHAPE | {"sliding_window": 64}, "vision_config": VISION}
    if kind == "gpt_neox":
        # It has no groups, and vLLM reads this field all the same.
        shape = SHAPE | {"num_key_value_heads": 2}
    if kind == "gpt2":
        shape = SHAPE | {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}
    config = AutoConfig.for_model(kind, **shape, tie_word_embeddings=tied is not False)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    if tied is None:
        fields = json.loads((directory / "config.json").read_text())
        fields.pop("tie_word_embeddings", None)
        (directory / "config.json").write_text(json.dumps(fields))
    if noise is not None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        (embedding,) = (one for name, one in tensors.items() if name.endswith(EMBEDDINGS))
        tensors[head] = embedding + noise * torch.randn_like(embedding)
        save_file(tensors, path, metadata={"format": "pt"})


EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight")
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
# By name: how to save the model, and whether transformers loads it with one tensor for embedding and head.
DIRECTORIES: dict[str, tuple[Callable[[Path], None], bool]] = {
    "tied, no head": (lambda path: _save(path, "qwen2", tied=True), True),
    "tied, the same head": (lambda path: _save(path, "qwen2", tied=True, noise=0.0), True),
    "tied, another head": (lambda path: _save(path, "qwen2", tied=True, noise=0.5), False),
    "tied by the class, the same head": (lambda path: _save(path, "gemma", tied=None, noise=0.0), True),
    "tied by the class, another head": (lambda path: _save(path, "gemma", tied=None, noise=0.5), False),
    "not tied": (lambda path: _save(path, "qwen2", tied=False), False),
    "not tied, the same head": (lambda path: _save(path, "qwen2", tied=False, noise=0.0), False),
    # Older releases of transformers saved such buffers, which no model has now.
    "not tied, a tensor that no model has": (
        lambda path: _save(path, "llama", tied=False, head="model.layers.0.self_attn.rotary_emb.inv_freq", noise=0.5),
        False,
    ),
    "GPT-NeoX, the same head": (
        lambda path: _save(path, "gpt_neox", tied=True, head="embed_out.weight", noise=0.0),
        True,
    ),
    "GPT-NeoX, not tied": (lambda path: _save(path, "gpt_neox", tied=False), False),
    # vLLM transposes its layers, so that it cannot be swapped in place.
    "GPT-2, the same head": (lambda path: _save(path, "gpt2", tied=True, noise=0.0), True),
    "wrapped, the same head": (
        lambda path: _save(path, "gemma3", tied=True, head="language_model.lm_head.weight", noise=0.0),
        True,
    ),
}


class Saved:
    """Saves a model under the names, and with the tensors, that the trainer publishes."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def save_pretrained(self, directory: Path) -> None:
        """Write model.safetensors."""
        from safetensors.torch import save_file

        from tba.trainer.model.scorer import weights_of
        from tba.trainer.publishing.snapshot_writer import as_saved

        save_file(as_saved(self.model, weights_of(self.model)), directory / "model.safetensors")


def moved(directory: Path, seed: int) -> Any:
    """Load a model as the trainer does, and change every weight."""
    import torch

    from tba.trainer.model.scorer import load_model

    model = load_model(directory, torch.device("cpu")).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model
