"""Learners over several ranks, for tests: `main` is one rank, a scenario names what it trains.

Rank 0 leaves DIRECTORY/SCENARIO.pt: the metrics of each step, and all that may be published. A checkpoint
that is there under DIRECTORY/SCENARIO is gone on from; one is left under DIRECTORY/SCENARIO.after. NAME/again is the
scenario NAME in a folder of its own, where there may be a checkpoint.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tba.common.config import LoraSection, ReferenceSection, TrainSection
from tba.common.process import RENDEZVOUS_VARIABLE
from tba.trainer import checkpoint
from tba.trainer.adapters import BASE, FACTORS, MERGED, add_adapters, gathered
from tba.trainer.ranks import ALONE, Ranks, join
from tba.trainer.step import Learner

from .tb_lab import objective, random_batch, tiny_model

_FLAT = {"learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0, "beta": 0.3, "beta_final": 0.3}
REDUCTIONS: list[int] = []
# Keyword arguments of `make_learner`, and how many prompts a batch has.
SCENARIOS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 5),
    "all": ({"sharding": "all"}, 5),
    "small_parts": ({"micro_batch_tokens": 1, "sharding": "all"}, 5),
    "small_parts_whole": ({"micro_batch_tokens": 1, "sharding": "optimizer"}, 5),
    "one_prompt": ({}, 1),
    "clipped": ({"max_grad_norm": 1e-3}, 3),
    "tied": ({"tie": True}, 4),
    "recomputed": ({"gradient_checkpointing": True, "micro_batch_tokens": 60, "sharding": "all"}, 5),
    "learned_z": ({"name": "tb_learned_z"}, 3),
    "packed": ({"packing": "packed", "micro_batch_tokens": 60, "sharding": "all"}, 5),
    "packed_whole": ({"packing": "packed", "micro_batch_tokens": 60, "sharding": "optimizer"}, 5),
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
    "lora_half": ({"autocast": True, "double": False, "lora": LoraSection(rank=2)}, 4),
}


def make_learner(
    ranks: Ranks = ALONE,
    *,
    name: str = "tb",
    tie: bool = False,
    double: bool = True,
    autocast: bool = False,
    lora: LoraSection | None = None,
    reference: ReferenceSection | None = None,
    **keys: Any,
) -> Learner:
    """A learner of two layers; its reference is another random model, or the model without its adapters."""
    policy, initial = (tiny_model(seed=seed, tie=tie, layers=2) for seed in (0, 1))
    if lora is not None:
        initial = None
        add_adapters(policy, lora)
        with torch.no_grad():
            for name_, parameter in policy.named_parameters():
                if "lora_B" in name_:
                    parameter.normal_(std=0.1)
    if double:
        policy, initial = policy.double(), initial and initial.double()
    config = TrainSection.model_validate(_FLAT | keys)
    return Learner(
        policy,
        initial,
        config,
        objective(name),
        autocast=autocast,
        ranks=ranks,
        reference_config=reference,
        entropy=True,
    )


def run(scenario: str, directory: Path, ranks: Ranks = ALONE, *, steps: int = 2) -> dict[str, Any]:
    """Train a scenario: {"metrics": one dict per step, "weights": by name, "reductions": of gradients}."""
    keys, prompts = SCENARIOS[scenario.removesuffix("/again")]
    torch.manual_seed(0)
    learner = make_learner(ranks, **keys)
    found = checkpoint.newest(directory / scenario)
    if found is not None:
        checkpoint.restore(found, learner)
    first = learner.steps_done
    REDUCTIONS.clear()
    metrics = [
        learner.step(random_batch(step, prompts=prompts, step=step)).metrics for step in range(first, first + steps)
    ]
    weights = {
        f"{what}/{name}": tensor.clone()
        for what in (MERGED, BASE, FACTORS)
        for name, tensor in gathered(learner.policy, what)
    }
    if ranks.rank == 0:
        checkpoint.save(directory / f"{scenario}.after", learner, run="r", keep=1)
    else:
        list(checkpoint.tensors_of(learner))
    return {"metrics": metrics, "weights": weights, "reductions": len(REDUCTIONS)}


def count_reductions() -> None:
    """Have each reduction of gradients on record; FSDP looks the function up when it calls it."""
    reduce = dist.reduce_scatter_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        REDUCTIONS.append(1)
        return reduce(*args, **kwargs)

    dist.reduce_scatter_single = counted


def main(rank: int, ranks: int, directory: Path, scenarios: list[str]) -> None:
    """Run scenarios as one rank of so many, which meet by a file in the directory."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ[RENDEZVOUS_VARIABLE] = str(directory / "meeting")
    count_reductions()
    torch.use_deterministic_algorithms(True)
    group = join(torch.device("cpu"))
    for name in scenarios:
        result = run(name, directory, group)
        if rank == 0:
            torch.save(result, directory / f"{name}.pt")
    group.close()
