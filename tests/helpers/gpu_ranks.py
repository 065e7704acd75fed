"""A learner on several GPUs, for tests/gpu: `main` is one rank. It writes its steps to DIRECTORY/ranksN.json."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tba.common.config import TrainSection
from tba.common.system.process import RENDEZVOUS_VARIABLE
from tba.tests.helpers.trainer import learner_of, objective, random_batch, tiny_model
from tba.trainer.distributed import join
from tba.trainer.model.adapters import MERGED, gathered

STEPS = 4
_FLAT = {"learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0, "beta": 0.3, "beta_final": 0.3}


def main(rank: int, ranks: int, directory: Path, settings: dict[str, Any]) -> None:
    """Train on GPU `rank`, with a file in the directory as rendezvous. Settings are of `[train]`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ[RENDEZVOUS_VARIABLE] = str(directory / f"rendezvous{ranks}")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = join(device)
    policy, reference = (tiny_model(seed=seed, hidden=64, layers=4).to(device) for seed in (0, 1))
    config = TrainSection.model_validate(_FLAT | settings)
    learner = learner_of(policy, reference, config, objective("tb"), ranks=group)
    metrics = [learner.step(random_batch(step, prompts=2 * 8, step=step)).metrics for step in range(STEPS)]
    # Gathered in lock-step: every rank takes part.
    sums = {name: float(tensor.double().abs().sum()) for name, tensor in gathered(learner.policy, MERGED)}
    backend = dist.get_backend() if ranks > 1 else ""
    if rank == 0:
        result = {"metrics": metrics, "sums": sums, "backend": backend, "peak": torch.cuda.max_memory_allocated()}
        (directory / f"ranks{ranks}.json").write_text(json.dumps(result))
    group.close()
