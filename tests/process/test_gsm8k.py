"""A complete run on GSM8K with a tiny random model; its accuracy is irrelevant."""

import json
import sqlite3
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
        max_position_embeddings=2048,
        eos_token_id=0,
        bos_token_id=None,
    )
    directory = tmp_path / "byte-model"
    LlamaForCausalLM(config).save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return directory


def test_gsm8k_trains_and_evaluates(test_data, byte_model, make_config, tba):
    run = make_config(
        model={"path": str(byte_model), "dtype": "float32"},
        task={
            "name": "gsm8k",
            "train": str(test_data / "gsm8k/train.jsonl"),
            "test": str(test_data / "gsm8k/test.jsonl"),
            "held_out_limit": 16,
        },
        search={
            "engine": "transformers",
            "gpus": "cpu",
            "samples_per_prompt": 4,
            "max_in_flight": 16,
            "max_tokens": 24,
            "temperature": 0.7,
        },
        train={"gpu": "cpu", "steps": 3, "prompts_per_step": 2, "samples_per_prompt": 4, "warmup_steps": 1},
        eval={"at_end": True},
    )
    result = tba("run", run.file, timeout=400)
    assert result.returncode == 0, result.stderr
    with sqlite3.connect(run.database) as database:
        assert database.execute("SELECT prompts FROM runs").fetchone() == (7473,)
        parts, text, error = database.execute("SELECT reward_parts, text, error FROM trajectory_rows").fetchone()
    assert set(json.loads(parts)) == {"correct", "has_number"}
    assert text
    assert error is None
    assert len((run.directory / "metrics.jsonl").read_text().splitlines()) == 3
