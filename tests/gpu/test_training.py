"""The trainer on one GPU: its speed as a share of the peak, and what it does when memory runs out."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tba.common.config import Config, ObjectiveSection, TrainSection
from tba.common.config.run import ModelSection
from tba.common.errors import MemoryShort
from tba.tests.helpers.trainer import make_batch, make_row, objective
from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.metrics.flops import Throughput
from tba.trainer.model.packing import packs
from tba.trainer.preflight.check import report_on
from tba.trainer.step.learner import Learner

VOCABULARY = 32_000
GIB = 1 << 30
# The model of examples/gsm8k/node.toml, and a small one.
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}


def make_model(shape: dict[str, int]) -> Any:
    """Return a random Llama with float32 weights on the GPU."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, max_position_embeddings=4096, **shape)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).float()


def batch_of(step: int, *, prompts: int, samples: int, prompt_tokens: int, response_tokens: int) -> TrainBatch:
    rng = np.random.default_rng(step)
    rows: list[Row] = []
    for _ in range(prompts):
        prompt = rng.integers(0, VOCABULARY, prompt_tokens)
        rows += [make_row(len(rows) + n, prompt, rng.integers(0, VOCABULARY, response_tokens)) for n in range(samples)]
    return make_batch(rows, rng.random((prompts, samples)), step=step)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_a_step_reaches_a_share_of_the_peak_in_the_memory_of_the_estimate(tmp_path, checkpointing, record_property):
    """32,768 tokens a step in bfloat16: an H100 should reach 0.3 to 0.5 without recomputation."""
    total = torch.cuda.get_device_properties(0).total_memory
    large = total > 60 * GIB
    torch.cuda.reset_peak_memory_stats()
    model = make_model(LARGE if large else SMALL)
    train = TrainSection(micro_batch_tokens=8192, gradient_checkpointing=checkpointing, warmup_steps=0)
    packed = packs("auto", model, "cuda", half=True)
    learner = Learner(model, None, train, objective("rloo"), autocast=True, packed=packed)
    shape = {"prompts": 8, "samples": 8, "prompt_tokens": 128, "response_tokens": 384}
    seconds, steps = 0.0, 6
    for step in range(2 + steps):
        batch = batch_of(step, **shape)
        torch.cuda.synchronize()
        started = time.perf_counter()
        assert learner.step_in_memory(batch).metrics["skipped"] == 0
        torch.cuda.synchronize()
        # The first steps choose kernels and allocate memory.
        seconds += time.perf_counter() - started if step >= 2 else 0.0
    found = Throughput(model, "auto").metrics(batch, seconds / steps)
    for name, value in found.items():
        record_property(name, value)
    record_property("parameters", sum(parameter.numel() for parameter in model.parameters()))
    record_property("seconds_step", seconds / steps)
    model.config.save_pretrained(tmp_path)
    config = Config(model=ModelSection(dtype="bfloat16"), train=train, objective=ObjectiveSection(name="rloo"))
    estimate = sum(report_on(config, tmp_path, ranks=1, gpu_total=total).device.values())
    peak = torch.cuda.max_memory_allocated()
    record_property("peak_gib", peak / GIB)
    record_property("estimated_gib", estimate / GIB)
    assert 0.1 < found.get("mfu", 0.3) < 1
    assert peak <= estimate


def test_a_trainer_that_runs_out_of_memory_says_so_and_can_go_on():
    learner = Learner(
        make_model(SMALL), None, TrainSection(micro_batch_tokens=1 << 20), objective("rloo"), autocast=True
    )
    batch = batch_of(0, prompts=4, samples=8, prompt_tokens=128, response_tokens=896)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + GIB) / total)
    try:
        with pytest.raises(MemoryShort, match="out of memory in step 0"):
            learner.step_in_memory(batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    short = batch_of(0, prompts=2, samples=2, prompt_tokens=32, response_tokens=32)
    assert learner.step_in_memory(short).metrics["skipped"] == 0
