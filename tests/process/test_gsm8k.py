"""A complete run on GSM8K and MATH-500 with a tiny random model; its accuracy is irrelevant."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def byte_model(tmp_path: Path) -> Path:
    """Create a random Llama of 30 k parameters with a byte-level tokenizer, which can encode any text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<eos>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=8192,
        eos_token_id=0,
        bos_token_id=None,
    )
    directory = tmp_path / "byte-model"
    LlamaForCausalLM(config).save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return directory


def test_a_mixture_of_gsm8k_and_math_trains_and_evaluates(test_data, byte_model, make_config, tba):
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    files = {"gsm8k": ("gsm8k/train.jsonl", "gsm8k/test.jsonl"), "math": ("math500/test.jsonl", "math500/test.jsonl")}
    mixture = [
        {"name": name, "train": str(test_data / train), "test": str(test_data / test), "held_out_limit": 4, "weight": 1}
        for name, (train, test) in files.items()
    ]
    run = make_config(
        model={"path": str(byte_model), "dtype": "float32"},
        task={"name": "mixture", "mixture": mixture},
        search={
            "engine": "transformers",
            "gpus": "cpu",
            "samples_per_prompt": 4,
            "max_in_flight": 16,
            "max_tokens": 24,
        },
        train={"gpu": "cpu", "steps": 2, "prompts_per_step": 2, "samples_per_prompt": 4, "warmup_steps": 1},
        eval={"at_end": True},
    )
    result = tba("run", run.file, timeout=400)
    assert result.returncode == 0, result.stderr
    # Each prompt of the smaller task occurs often enough for its weight.
    assert run.query("SELECT prompts FROM runs") == [(2 * 7473,)]
    rows = run.query("SELECT p.key, reward_parts, error FROM trajectory_rows t JOIN prompts p ON p.id = t.prompt")
    parts = {key.partition(":")[0].partition("~")[0]: set(json.loads(found)) for key, found, _ in rows}
    assert parts == {
        "gsm8k": {"correct", "gsm8k.reward", "gsm8k.correct", "gsm8k.has_number"},
        "math": {"correct", "math.reward", "math.correct", "math.has_boxed"},
    }
    assert {error for *_, error in rows} == {None}
    assert len(run.lines()) == 2
    assert {"accuracy", "reward_part_gsm8k.correct", "reward_part_math.correct"} <= run.lines("eval.jsonl")[-1].keys()
