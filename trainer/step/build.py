"""Build a learner from the configuration, the same on every rank."""

from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel

from tba.common.config import Config, LoraSection
from tba.common.weights.model_files import eos_ids
from tba.trainer.distributed.ranks import Ranks
from tba.trainer.model.adapters import add_adapters, base_digest
from tba.trainer.model.packing import packs
from tba.trainer.model.scorer import halve, in_half, load_model, structure_of
from tba.trainer.objectives.from_config import Objective, make_objective
from tba.trainer.preflight.check import Report
from tba.trainer.step.host_optimizer import take_masters
from tba.trainer.step.learner import Learner

# Keys of [train] that change a weight by rounding at most, given the batches, which are recorded.
_NOT_DETERMINING = {
    "gpu", "processes", "sharding", "offload", "threads", "check_memory",
    "micro_batch_tokens", "packing", "gradient_checkpointing",
    "publish_every", "snapshots_in", "keep_snapshots", "keep_snapshot_every", "serve_snapshots",
    "checkpoint_every", "min_free_mib",
}  # fmt: skip


def build(
    config: Config,
    files: Path,
    device: torch.device,
    ranks: Ranks,
    report: Report | None = None,
    objective: Objective | None = None,
) -> tuple[Learner, PreTrainedModel]:
    """Return a learner at step 0, and its model unwrapped: without adapters and not sharded, as the files have it.

    The unwrapped model is the policy itself, or a copy of its structure without weights if the policy has adapters, is
    sharded or has its optimiser on the host. Only rank 0 needs it, and only rank 0 loads weights. `report` is the
    preflight's; `objective` is by default the one that the configuration names. Raises ConfigError, MemoryShort.
    """
    objective = objective or make_objective(config.objective, longest_response=config.search.max_tokens)
    # FSDP moves each layer's shard to the GPU; the whole model is never there, and only rank 0 loads it.
    host = torch.device("cpu" if ranks.rank == 0 else "meta")
    home = device if ranks.size == 1 else host
    half = in_half(device, config.model.dtype)
    offload = config.train.offload == "optimizer"
    policy = load_model(files, host if offload else home)
    unwrapped, reference, adapter, masters = policy, None, None, None
    if ranks.rank == 0 and (config.lora.rank or ranks.size > 1 or offload):
        unwrapped = structure_of(policy)
    packed = ranks.rank == 0 and packs(config.train.packing, policy, device.type, half=half)
    if config.lora.rank:
        adapter = _put_adapters(policy, config.lora, files, half=half)
    elif objective.needs_reference:
        reference = _load_reference(config, files, host, home, half=half)
    if offload:
        masters = take_masters(policy, home, half=half)
    learner = Learner(
        policy,
        reference,
        config.train,
        objective,
        autocast=half,
        ranks=ranks,
        reference_config=config.reference,
        entropy=config.metrics.entropy,
        exact_logits=config.model.head_dtype == "float32",
        lineage=lineage_of(config),
        masters=masters,
        fits_gathered=report is None or report.setup.gathered,
        packed=packed,
        adapter=adapter,
        end_ids=end_ids(config, files),
        states_fill=report is not None and report.states_fill,
    )
    return learner, unwrapped


def end_ids(config: Config, files: Path) -> frozenset[int] | None:
    """Return the ids that end a response; None if strings end it, too: no token shows that."""
    if any(isinstance(one, str) for one in config.search.stop):
        return None
    return frozenset([*eos_ids(files), *(one for one in config.search.stop if isinstance(one, int))])


def lineage_of(config: Config) -> str:
    """Return a hash of the settings that determine the weights of each step, given its batch."""
    included: dict[str, Any] = dict.fromkeys(("model", "train", "objective", "reference"), True)
    if config.objective.name == "dr_grpo":
        # Its loss is divided by this.
        included["search"] = {"max_tokens"}
    determining = config.model_dump_json(include=included, exclude={"train": _NOT_DETERMINING})
    return xxhash.xxh32_hexdigest(determining.encode())


def _put_adapters(policy: PreTrainedModel, config: LoraSection, files: Path, *, half: bool) -> dict[str, Any]:
    """Put adapters into a policy, whose weights become bfloat16 if `half`. Returns what identifies the adapters."""
    add_adapters(policy, config)
    if half:
        halve(policy)
    # `publish` may change between starts: it does not affect the adapters.
    return {**config.model_dump(mode="json", exclude={"publish"}), "base": base_digest(files)}


def _load_reference(
    config: Config, files: Path, host: torch.device, device: torch.device, *, half: bool
) -> PreTrainedModel:
    """Load the reference, with matrices in bfloat16 if `half`, so that only these ever are on the device."""
    # A moving average of bfloat16 weights would lose small changes.
    narrow = half and config.reference.kind != "ema"
    reference = load_model(files, host if narrow else device).requires_grad_(False)
    if narrow:
        halve(reference)
    return reference.to(device)
