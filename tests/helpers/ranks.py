"""Learners on several ranks, for tests: `main` is one rank, a scenario names what it trains.

Rank 0 writes DIRECTORY/SCENARIO.pt, with what `run` returns, and a checkpoint in DIRECTORY/SCENARIO.after. Training
resumes from a checkpoint in DIRECTORY/SCENARIO if there is one. The scenario NAME/again is NAME with another directory,
so that it can resume.
"""

import math
import multiprocessing
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import asdict

from tba.common.config import Config, LoraSection, ReferenceSection
from tba.common.errors import ConfigError
from tba.common.system.process import RENDEZVOUS_VARIABLE
from tba.common.wire.trajectory import RowNumbers, encode_kept
from tba.tests.helpers import trainer
from tba.tests.helpers.puts import read_log_ratios
from tba.tests.helpers.trainer import random_batch
from tba.trainer import checkpoint
from tba.trainer.batch.batch import TrainBatch
from tba.trainer.distributed import ALONE, Ranks, full_tensor, join
from tba.trainer.model.adapters import BASE, FACTORS, MERGED, gathered
from tba.trainer.model.scorer import weights_of
from tba.trainer.step.build import build, require_memory
from tba.trainer.step.learner import Learner

# Reductions of gradients within a node, and their sums over nodes.
REDUCTIONS: list[int] = []
SUMS: list[int] = []
# Keyword arguments of `make_learner`, and the number of prompts of a batch.
SCENARIOS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 5),
    "all": ({"sharding": "all"}, 5),
    "small_chunks": ({"micro_batch_tokens": 1, "sharding": "all"}, 5),
    "small_chunks_gathered": ({"micro_batch_tokens": 1, "sharding": "optimizer"}, 5),
    "one_prompt": ({}, 1),
    "clipped": ({"max_grad_norm": 1e-3}, 3),
    "tied": ({"model": {"tie": True}}, 4),
    "recomputed": ({"gradient_checkpointing": True, "micro_batch_tokens": 60, "sharding": "all"}, 5),
    "learned_z": ({"name": "tb_learned_z"}, 3),
    # With turns of their own: `make_batch`.
    "learned_z_of_turns": ({"keys": {"log_z": "turn"}, "micro_batch_tokens": 40}, 3),
    "values_of_tokens": ({"name": "tb_prefix", "micro_batch_tokens": 40}, 3),
    "packed": ({"packing": "packed", "micro_batch_tokens": 60, "sharding": "all"}, 5),
    "packed_gathered": ({"packing": "packed", "micro_batch_tokens": 60, "sharding": "optimizer"}, 5),
    "packed_lora": (
        {"packing": "packed", "lora": LoraSection(rank=2), "gradient_checkpointing": True, "micro_batch_tokens": 60},
        4,
    ),
    "reset": ({"reference": ReferenceSection(kind="reset", every=1), "sharding": "all"}, 3),
    "ema": ({"reference": ReferenceSection(kind="ema", every=1, decay=0.5)}, 3),
    "grpo": ({"name": "grpo", "micro_batch_tokens": 40}, 4),
    "lora": ({"lora": LoraSection(rank=2), "sharding": "all"}, 4),
    "lora_recomputed": ({"lora": LoraSection(rank=2), "gradient_checkpointing": True}, 4),
    "half": ({"autocast": True, "double": False}, 4),
    "offload": ({"offload": "optimizer", "sharding": "all", "micro_batch_tokens": 30}, 5),
    "offload_tied": ({"offload": "optimizer", "model": {"tie": True}, "max_grad_norm": 1e-3}, 3),
    "offload_learned_z": ({"offload": "optimizer", "name": "tb_learned_z"}, 3),
    "offload_half": ({"offload": "optimizer", "autocast": True, "double": False}, 4),
    # At several temperatures, with demonstrations and kept tokens: `make_batch`.
    "stale": ({"name": "tb_stale", "learning_rate_by_ess": True, "micro_batch_tokens": 40}, 5),
    "stale_tba_prime": ({"name": "tba_prime", "sharding": "all"}, 3),
    "distill": ({"name": "distill", "micro_batch_tokens": 40}, 4),
    "transposed": ({"transpose": True}, 3),
    "lora_half": ({"autocast": True, "double": False, "lora": LoraSection(rank=2)}, 4),
}


def run_ranks(
    target: Callable[..., None], ranks: int, *arguments: Any, seconds: float = 400, method: str = "forkserver"
) -> None:
    """Call `target(rank, ranks, *arguments)` in processes, until each has succeeded. In the end none is left."""
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload([__name__, "torch.distributed.fsdp", "peft"])
    processes = [context.Process(target=target, args=(rank, ranks, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(seconds)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()


def make_learner(ranks: Ranks = ALONE, **settings: Any) -> Learner:
    """Return a learner of two layers, in float64 unless it is told otherwise."""
    model = {"layers": 2} | settings.pop("model", {})
    keys: dict[str, Any] = {
        "double": True,
        "trained_adapters": True,
        "own": {"entropy": True},
        "packing": "auto",
    }
    return trainer.make_learner(ranks, model=model, **keys | settings)


def make_batch(scenario: str, step: int, prompts: int) -> TrainBatch:
    """Return the batch of a step."""
    batch = random_batch(step, prompts=prompts, step=step)
    if scenario.startswith("learned_z_of_turns"):
        masks = [np.where(np.arange(len(row.response_ids)) % 3 == 1, 0, 1).astype(np.uint8) for row in batch.rows]
        return replace(batch, rows=[replace(row, loss_mask=mask) for row, mask in zip(batch.rows, masks, strict=True)])
    if not scenario.startswith("stale"):
        return batch
    rows = [
        replace(row, temperature=(0.7, 1.0, 0.0, 1.3)[n % 4], sampling_logprobs=row.sampling_logprobs - 3)
        for n, row in enumerate(batch.rows)
    ]
    for n, row in enumerate(rows):
        if row.temperature and n % 3 == 0:
            left = [np.unique([id_, 0, 5]) for id_ in row.response_ids]
            rows[n] = replace(row, kept=encode_kept(row.response_ids.tolist(), left))
    return replace(batch, rows=rows)


def run(scenario: str, directory: Path, ranks: Ranks = ALONE, *, steps: int = 2) -> dict[str, Any]:
    """Train a scenario.

    Returns metrics and numbers of rows of each step, weights by name, and how often gradients were reduced.
    """
    keys, prompts = SCENARIOS[scenario.removesuffix("/again")]
    torch.manual_seed(0)
    learner = make_learner(ranks, **keys)
    found = checkpoint.share(None if ranks.rank else checkpoint.newest(directory / scenario), ranks)
    if found is not None:
        checkpoint.restore(found, learner)
    first = learner.steps_done
    REDUCTIONS.clear()
    SUMS.clear()
    done = [learner.step(make_batch(scenario, step, prompts)) for step in range(first, first + steps)]
    weights = {
        f"{what}/{name}": tensor.clone()
        for what in (MERGED, BASE, FACTORS)
        for name, tensor in gathered(learner.policy, what)
    }
    if ranks.rank == 0:
        checkpoint.save(directory / f"{scenario}.after", learner, run="r", keep=1)
    else:
        list(checkpoint.tensors_of(learner))
    return {
        "metrics": [result.metrics for result in done],
        "rows": [columns_of(result.rows) for result in done],
        "weights": weights,
        "reductions": len(REDUCTIONS),
        "sums": len(SUMS),
    }


def columns_of(rows: RowNumbers) -> dict[str, list[Any]]:
    """Return the numbers of rows by name, those of their tokens as one column: NaN for a row without."""
    each = read_log_ratios(rows.token_log_ratios)
    tokens = [value for row in each for value in ([math.nan] if row is None else row)]
    return {**asdict(rows), "token_log_ratios": tokens}


def count_reductions() -> None:
    """Record each reduction of gradients. FSDP looks up the functions at each call."""
    reduce, add = dist.reduce_scatter_single, dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        REDUCTIONS.append(1)
        return reduce(*args, **kwargs)

    def counted_sum(*args: Any, **kwargs: Any) -> Any:
        # Only FSDP names the operation.
        SUMS.extend([1] if "op" in kwargs else [])
        return add(*args, **kwargs)

    dist.reduce_scatter_single, dist.all_reduce = counted, counted_sum


def main(rank: int, ranks: int, directory: Path, scenarios: list[str], port: int = 0) -> None:
    """Run scenarios as one of `ranks` ranks, with a file in the directory as rendezvous.

    With a port these are two nodes, which meet there, and each has a whole model.
    """
    count_reductions()
    torch.use_deterministic_algorithms(True)
    group = _join(rank, ranks, directory, port)
    if port:
        group.replicate()
    for name in scenarios:
        result = run(name, directory, group)
        if rank == 0:
            torch.save(result, directory / f"{name}.pt")
    group.close()


def _join(rank: int, ranks: int, directory: Path, port: int = 0) -> Ranks:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    if port:
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks // 2), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    else:
        os.environ |= {RENDEZVOUS_VARIABLE: str(directory / "rendezvous"), "GLOO_SOCKET_IFNAME": "lo"}
    return join(torch.device("cpu"))


def _config(directory: Path, **train: Any) -> Config:
    model = {"path": str(directory / "model"), "dtype": "float32"}
    return Config.model_validate({"model": model, "task": {"train": "t"}, "train": train})


def load(rank: int, ranks: int, directory: Path, offload: str) -> None:
    """Build a learner of DIRECTORY/model as one of the ranks.

    Writes what it has, gathered, and by how many bytes the process has grown, to DIRECTORY/`offload`RANK.pt.
    """
    config = _config(directory, offload=offload, gradient_checkpointing=True)
    group = _join(rank, ranks, directory)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    learner, _ = build(config, directory / "model", torch.device("cpu"), group)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    weights, masters = dict(learner.policy.named_parameters()), learner.masters()
    found = {
        "bytes": grown << 10,
        "policy": {name: full_tensor(weight) for name, weight in weights_of(learner.policy).items()},
        "reference": {name: full_tensor(weight) for name, weight in weights_of(learner.reference.scorer.model).items()},
        "masters": {name: full_tensor(master, weights[name]) for name, master in masters.items()},
        "buffers": dict(learner.policy.named_buffers()),
    }
    torch.save(found, directory / f"{offload}{rank}.pt")
    group.close()


def refuse(rank: int, ranks: int, directory: Path) -> None:
    """Expect that one of the ranks refuses the model of `load`."""
    with pytest.raises(ConfigError, match=r"set tie_word_embeddings = false in config\.json"):
        load(rank, ranks, directory, "none")


def differ(rank: int, ranks: int, directory: Path) -> None:
    """Expect that the ranks refuse to train together, since each has another number of tokens in a micro-batch."""
    config = _config(directory, threads=1 + rank, micro_batch_tokens=100 + rank)
    group = _join(rank, ranks, directory)
    with pytest.raises(ConfigError, match=r"different settings: copy one tba\.toml to all nodes"):
        require_memory(config, torch.device("cpu"), group)
    same = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_tokens": 100})})
    assert require_memory(same, torch.device("cpu"), group).fits
    group.close()
