"""FSDP2 over NCCL makes the steps of one GPU."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tba.tests.helpers import gpu_ranks
from tba.tests.helpers.ranks import run_all


def train_on(ranks: int, directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    arguments = [(rank, ranks, directory, settings) for rank in range(ranks)]
    processes = [context.Process(target=gpu_ranks.main, args=one) for one in arguments]
    run_all(processes, 300)
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
