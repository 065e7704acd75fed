"""Whole steps against plain torch in float64, against those of a CPU, and sharded against unsharded ones."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.bare import BareTrainer
from benchmarks.gpu_check.findings import Findings
from tba.common.config import TrainSection
from tba.tests.helpers.gpu_steps import flat, qwen, random_model, random_steps
from tba.tests.helpers.trainer import learner_of, objective
from tba.trainer.distributed import ALONE, Ranks
from tba.trainer.model.adapters import MERGED, gathered
from tba.trainer.step.host_optimizer import take_masters

_RATE = 1e-3
# The metrics of each step, all weights after the last, and whether they are sharded.
Trained = tuple[list[dict[str, float]], Tensor, bool]


class Trial:
    """Three steps of a small model, always from the same weights and on the same batches."""

    def __init__(self, options: Any) -> None:
        config = qwen("small", tiny=options.tiny, initializer_range=0.05)
        self.base, self.batches = random_model(config, "cpu"), random_steps(512, 3, (3, 4, 12, 30, 60))

    def train(self, device: str, name: Any = "rloo", *, ranks: Any = ALONE, half: Any = False, **keys: Any) -> Trained:
        """Make the steps with tba. `keys` are of `[train]`."""
        config = TrainSection(learning_rate=_RATE, warmup_steps=0, schedule="constant", micro_batch_tokens=512, **keys)
        model = copy.deepcopy(self.base)
        masters = take_masters(model, torch.device(device), half=half) if config.offload == "optimizer" else None
        reference = copy.deepcopy(self.base).to(device) if name == "tb" else None
        if ranks is ALONE:
            model.to(device)
        learner = learner_of(model, reference, config, objective(name), autocast=half, ranks=ranks, taken=masters)
        steps = [learner.step(batch).metrics for batch in self.batches]
        weights = learner.masters() or dict(gathered(learner.policy, MERGED))
        sharded = all(isinstance(parameter, DTensor) for parameter in learner.policy.parameters())
        return steps, flat(weights[key] for key in sorted(weights)), sharded

    def exact(self) -> Trained:
        """Make the steps of RLOO with plain torch in float64 on the CPU."""
        bare = BareTrainer(copy.deepcopy(self.base).double(), rate=_RATE, tokens=512)
        made = [bare.step(batch) for batch in self.batches]
        return made, flat(parameter for _, parameter in sorted(bare.model.named_parameters())), False

    def compare(
        self, findings: Findings, label: str, found: Trained, expected: Trained, limit: float, moved: float = 0.02
    ) -> None:
        """Compare metrics within a relative limit, and weights within a share of how far they moved."""
        for number, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
            for name in ("loss", "grad_norm"):
                findings.relative(f"{label}: {name} of step {number}", one[name], other[name], limit)
        start = flat(parameter for _, parameter in sorted(self.base.named_parameters()))
        distance = (found[1] - expected[1]).norm() / (expected[1] - start).norm()
        findings.check(f"{label}: distance of the weights by how far they moved", float(distance), 0.0, moved)


def step(findings: Findings, options: Any) -> None:
    """Three steps with the fused optimiser on the device, in float32."""
    trial = Trial(options)
    trial.compare(findings, "rloo and plain torch", trial.train(options.device), trial.exact(), 1e-4)
    for name in ("tb", "grpo") if options.device == "cuda" else ():
        trial.compare(findings, f"{name} and the CPU", trial.train("cuda", name), trial.train("cpu", name), 1e-3)


class _Several(int):
    """The number 1 that passes for several, so that a learner shards its model over one rank."""

    def __gt__(self, other: object) -> bool:
        return True


def fsdp(findings: Findings, options: Any) -> None:
    """FSDP2 over NCCL with one rank, against plain torch. tests/gpu/test_sharding.py needs two GPUs."""
    cuda, trial = options.device == "cuda", Trial(options)
    rendezvous = f"file://{options.work}/rendezvous"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=rendezvous, rank=0, world_size=1)
    findings.note("backend", str(dist.get_backend()))
    ranks = Ranks(0, 1, init_device_mesh(options.device, (1,)))
    ranks.size = _Several(1)
    for half in (False, True) if cuda else (False,):
        for kind in ("all", "optimizer"):
            label = f"{kind}, {'bfloat16' if half else 'float32'}"
            found = trial.train(options.device, ranks=ranks, half=half, gradient_checkpointing=True, sharding=kind)
            findings.check(f"{label}: sharded", found[2], True)
            # In bfloat16 sharded gradients are rounded, and the first steps of AdamW depend on their signs.
            trial.compare(findings, label, found, trial.exact(), *((5e-2, 0.5) if half else (1e-4, 0.02)))
    dist.destroy_process_group()
