"""Tiny sequence classifiers with random weights and the tokenizer of the example model."""

import shutil
from pathlib import Path
from typing import Any

EXAMPLE_MODEL = Path(__file__).parents[2] / "examples/arithmetic/model"
_SIZES = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


def make_classifier(directory: Path, kind: str = "llama", *, chat_template: str = "", **changes: Any) -> Path:
    """Save a classifier: `llama` is read at its last token, `bert` at its first.

    `changes` are keys of its configuration. Without a padding token there, its tokenizer has none either.
    """
    import torch
    from transformers import AutoTokenizer, BertConfig, LlamaConfig
    from transformers.models.bert import BertForSequenceClassification
    from transformers.models.llama import LlamaForSequenceClassification

    torch.manual_seed(0)
    keys = _SIZES | {"num_labels": 1, "initializer_range": 0.5} | changes
    if kind == "llama":
        model: Any = LlamaForSequenceClassification(LlamaConfig(**keys, num_key_value_heads=2))
    else:
        model = BertForSequenceClassification(BertConfig(**keys))
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE_MODEL)
    tokenizer.chat_template = chat_template or None
    if keys["pad_token_id"] in (None, -1):
        tokenizer.pad_token = None
    tokenizer.model_max_length = keys["max_position_embeddings"]
    tokenizer.save_pretrained(directory)
    return directory


def without_head(directory: Path) -> Path:
    """A language model whose configuration claims to be a classifier."""
    shutil.copytree(EXAMPLE_MODEL, directory)
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"architectures"', '"num_labels": 1, "architectures"'))
    return directory
