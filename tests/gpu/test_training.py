"""The trainer on one GPU: its speed as a share of the peak, and what it does when memory runs out."""

from statistics import mean

import pytest
import torch

from tba.common.config import TrainSection
from tba.common.errors import OutOfMemory
from tba.tests.helpers.gpu_steps import GIB, estimate_for, little_memory, qwen, random_model, random_steps, timed
from tba.tests.helpers.trainer import learner_of, objective
from tba.trainer.metrics.flops import Throughput
from tba.trainer.model.packing import packs


@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_a_step_reaches_a_share_of_the_peak_in_the_memory_of_the_estimate(tmp_path, checkpointing, record_property):
    """About 32,768 tokens a step in bfloat16: an H100 should reach 0.3 to 0.5 without recomputation."""
    total = torch.cuda.get_device_properties(0).total_memory
    shape = qwen("1.5B" if total > 60 * GIB else "0.5B")
    torch.cuda.reset_peak_memory_stats()
    model = random_model(shape, "cuda")
    train = TrainSection(micro_batch_tokens=8192, gradient_checkpointing=checkpointing, warmup_steps=0)
    packed = packs("auto", model, "cuda", half=True)
    learner = learner_of(model, None, train, objective("rloo"), autocast=True, packed=packed)
    batches = random_steps(shape.vocab_size, 8, (8, 8, 128, 384, 2048))
    made = [timed("cuda", learner.step_in_memory, batch) for batch in batches]
    assert all(result.metrics["skipped"] == 0 for result, _ in made)
    # The first steps choose kernels and allocate memory.
    seconds = [elapsed for _, elapsed in made[2:]]
    throughput = Throughput(model)
    rates = [throughput.metrics(batch, elapsed) for batch, elapsed in zip(batches[2:], seconds, strict=True)]
    found = {name: mean(rate[name] for rate in rates) for name in rates[0]}
    for name, value in found.items():
        record_property(name, value)
    record_property("parameters", sum(parameter.numel() for parameter in model.parameters()))
    record_property("seconds_step", mean(seconds))
    estimate = sum(estimate_for(shape, train, tmp_path).device.values())
    peak = torch.cuda.max_memory_allocated()
    record_property("peak_gib", peak / GIB)
    record_property("estimated_gib", estimate / GIB)
    assert 0.1 < found.get("mfu", 0.3) < 1
    assert peak <= estimate


def test_a_trainer_that_runs_out_of_memory_says_so_and_can_go_on():
    shape, train = qwen("0.5B"), TrainSection(micro_batch_tokens=1 << 20)
    learner = learner_of(random_model(shape, "cuda"), None, train, objective("rloo"), autocast=True)
    (batch,) = random_steps(shape.vocab_size, 1, (4, 8, 128, 2000, 896))
    with little_memory("cuda"), pytest.raises(OutOfMemory, match="out of memory in step 0"):
        learner.step_in_memory(batch)
    (short,) = random_steps(shape.vocab_size, 1, (2, 2, 32, 32, 64))
    assert learner.step_in_memory(short).metrics["skipped"] == 0
