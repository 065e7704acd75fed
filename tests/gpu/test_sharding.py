"""FSDP2 over NCCL makes the steps of one GPU."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tba.common.config import TrainSection
from tba.common.system.process import RENDEZVOUS_VARIABLE
from tba.tests.helpers.ranks import run_ranks
from tba.tests.helpers.trainer import FLAT, learner_of, objective, random_batch, tiny_model
from tba.trainer.distributed import join
from tba.trainer.model.adapters import MERGED, gathered

STEPS = 4


def train(rank: int, ranks: int, directory: Path, settings: dict[str, Any]) -> None:
    """Train on GPU `rank`, and write the steps to DIRECTORY/ranksN.json. Settings are of `[train]`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ[RENDEZVOUS_VARIABLE] = str(directory / f"rendezvous{ranks}")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = join(device)
    policy, reference = (tiny_model(seed=seed, hidden=64, layers=4).to(device) for seed in (0, 1))
    config = TrainSection.model_validate(FLAT | settings)
    learner = learner_of(policy, reference, config, objective("tb"), ranks=group)
    metrics = [learner.step(random_batch(step, prompts=2 * 8, step=step)).metrics for step in range(STEPS)]
    # Gathered in lock-step: every rank takes part.
    sums = {name: float(tensor.double().abs().sum()) for name, tensor in gathered(learner.policy, MERGED)}
    backend = dist.get_backend() if ranks > 1 else ""
    if rank == 0:
        result = {"metrics": metrics, "sums": sums, "backend": backend, "peak": torch.cuda.max_memory_allocated()}
        (directory / f"ranks{ranks}.json").write_text(json.dumps(result))
    group.close()


def train_on(ranks: int, directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train in processes, each of which has CUDA for itself. Returns what rank 0 has written."""
    run_ranks(train, ranks, directory, settings, seconds=300, method="spawn")
    result: dict[str, Any] = json.loads((directory / f"ranks{ranks}.json").read_text())
    return result


@pytest.mark.gpus(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sharding", ["all", "optimizer"])
@pytest.mark.parametrize("size", [2, 8])
def test_several_gpus_make_the_steps_of_one(tmp_path, gpus, size, sharding, record_property):
    if len(gpus) < size:
        pytest.skip(f"it needs {size} GPUs, and this machine has {len(gpus)}")
    several = train_on(size, tmp_path, {"sharding": sharding})
    alone = train_on(1, tmp_path, {})
    assert "nccl" in several["backend"]
    for found, expected in zip(several["metrics"], alone["metrics"], strict=True):
        for name in ("loss", "grad_norm", "kl"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
    assert several["sums"] == pytest.approx(alone["sums"], rel=1e-4)
    record_property("GPUs", size)
    record_property("peak_bytes_of_rank_0", several["peak"])
    record_property("nccl", ".".join(map(str, torch.cuda.nccl.version())))
