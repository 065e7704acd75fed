"""Random models for benchmarks of generation: several token ids end a response, so that lengths are geometric."""

import json
from dataclasses import dataclass
from pathlib import Path

from tba.common.weights.snapshot import Canary

# Responses per prompt.
SAMPLES = 8
PROMPTS = 400
CONTEXT = 512


@dataclass(frozen=True)
class Size:
    """A model and its generation settings. `endings` of the `vocabulary` ids end a response."""

    shape: dict[str, int]
    vocabulary: int
    endings: int
    dtype: str
    in_flight: int
    max_tokens: int


SIZES = {
    "small": Size(
        {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2}, 2048, 16, "float32", 256, 256,
    ),
    "large": Size(
        {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_key_value_heads": 4}, 32_000, 500, "bfloat16", 64, 128,
    ),
}  # fmt: skip


def make_model(size: Size, folder: Path) -> Path:
    """Write a random Llama with a tokenizer of invented words, and prompts.jsonl. Returns the model's path."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    shape = size.shape | special | {"max_position_embeddings": CONTEXT, "vocab_size": size.vocabulary}
    model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **shape)).to(getattr(torch, size.dtype))
    model.generation_config.eos_token_id = endings(size)
    model.save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(size.vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(PROMPTS):
            ids = random.integers(1, size.vocabulary - size.endings, random.integers(20, 100))
            file.write(json.dumps({"question": " ".join(f"w{n}" for n in ids), "answer": "#### 7"}) + "\n")
    return folder / "model"


def endings(size: Size) -> list[int]:
    """Return the token ids that end a response."""
    return list(range(size.vocabulary - size.endings, size.vocabulary))


def mean_tokens(size: Size) -> float:
    """Return the mean length of a response: geometric, cut at `max_tokens`."""
    ends = size.endings / size.vocabulary
    return float((1 - (1 - ends) ** size.max_tokens) / ends)


def make_canary(model: Path, size: Size) -> Canary:
    """Return the canary that a trainer would publish with the model: three sequences of 6 random tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from tba.trainer.publishing import canary

    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return canary.make_canary(
        made, dict(made.named_parameters()), canary.canary_sequences(model, size.vocabulary, long=False)
    )
