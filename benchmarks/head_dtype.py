"""How far engine and trainer are apart in bfloat16, with logits rounded to it and with logits in float32.

    python -m benchmarks.head_dtype

vLLM samples responses from a random model, and the trainer's code scores them, as on a GPU: float32 weights under
autocast. The head is scaled so that logits have the spread of a trained model's: near zero, rounding would not show.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.table import print_table
from tba.common.config.run import ModelSection
from tba.common.config.search import SearchSection
from tba.searcher.engines.engine import Generation, GenerationRequest, SamplingSettings
from tba.trainer.batch.batch import Row
from tba.trainer.model.scorer import Scorer, load_model

RESPONSES, PROMPT, LENGTH = 64, 32, 128
VOCABULARY, HIDDEN = 32_000, 512
# Standard deviation of the logits, in nats.
SPREAD = 3.0
DTYPES = ("model", "float32")


def main() -> None:
    """Print the mismatch for each pair of settings."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_model(path)
        rows = []
        for engine_dtype in DTYPES:
            prompts, generations = sample(path, engine_dtype)
            for trainer_dtype in DTYPES:
                found = difference(path, prompts, generations, exact=trainer_dtype == "float32")
                numbers = (np.abs(found).mean(), np.sqrt((found**2).mean()), np.abs(found).max())
                rows.append([engine_dtype, trainer_dtype, *(f"{number:.4f}" for number in numbers)])
    headings = ["logits of vLLM", "of the trainer", "mean |d log p|", "RMS", "max"]
    print_table(f"{RESPONSES * LENGTH:,} tokens sampled at temperature 1", headings, rows)


def make_model(path: Path) -> None:
    """Write a random Qwen2 in bfloat16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, **special,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.lm_head.weight.data.normal_(std=SPREAD / HIDDEN**0.5)
    model.bfloat16().save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"


def sample(path: Path, head_dtype: Any) -> tuple[list[np.ndarray], list[Generation]]:
    """Return random prompts and vLLM's responses to them."""
    from tba.searcher.engines.vllm.engine import VllmEngine
    from tba.tests.helpers.end_tokens import end_tokens

    search = SearchSection(max_model_len=256, max_in_flight=RESPONSES, kv_cache_gib=0.5, enforce_eager=True)
    model = ModelSection(path=str(path), dtype="bfloat16", head_dtype=head_dtype)
    engine = VllmEngine(model, search, seed=0, canary_tolerance=0.5, stopping=end_tokens(path))
    random, prompts, found = np.random.default_rng(0), [], {}
    for number in range(RESPONSES):
        prompts.append(random.integers(0, VOCABULARY, PROMPT).astype(np.int32))
        engine.submit(GenerationRequest(number, prompts[-1], SamplingSettings(1.0, 1.0, LENGTH, seed=number)))
    while engine.in_flight:
        found |= {generation.id: generation for generation in engine.step()}
    engine.close()
    return prompts, [found[number] for number in range(RESPONSES)]


def difference(path: Path, prompts: list[np.ndarray], generations: list[Generation], *, exact: bool) -> np.ndarray:
    """Return log p of the trainer less log p of the engine, for each token."""
    rows = [
        Row(one.id, prompt, one.response_ids, one.logprobs, np.ones(0, np.uint8), on_policy=True)
        for prompt, one in zip(prompts, generations, strict=True)
    ]
    scorer = Scorer(load_model(path, torch.device("cpu")), autocast=True, exact_logits=exact)
    with torch.no_grad():
        logprobs = scorer.score(rows).logprob_R.numpy()
    return logprobs - np.concatenate([one.logprobs for one in generations])


if __name__ == "__main__":
    main()
