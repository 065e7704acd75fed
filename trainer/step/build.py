"""Prepare the process, and build a learner from the configuration, the same on every rank."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import ConfigError
from tba.common.log import get_logger
from tba.common.system.devices import why_no_cuda
from tba.common.weights.model_files import model_directory
from tba.common.weights.pretrained import check_same_tokens, end_tokens, refuse_quantized
from tba.common.wire.fields import INITIAL_REFERENCE
from tba.common.wire.trajectory import ARRAY_KINDS, Float32
from tba.trainer.batch.batch import row_of_arrays
from tba.trainer.distributed import ALONE, Ranks, shard
from tba.trainer.metrics.stopwatch import Stopwatch
from tba.trainer.model.adapters import add_adapters, base_digest
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.model.packing import packs
from tba.trainer.model.reference import Reference
from tba.trainer.model.scorer import (
    Scorer,
    enable_gradient_checkpointing,
    in_half,
    load_model,
    structure_of,
    to_bfloat16,
)
from tba.trainer.objectives.from_config import Objective, make_objective
from tba.trainer.preflight.check import Report, examine
from tba.trainer.preflight.shape import meta_model, shape_of, with_reference
from tba.trainer.step.host_optimizer import take_masters
from tba.trainer.step.learner import Learner, check_tokens

log = get_logger(__name__)

# Keys of [train] that change a weight by rounding at most, given the batches, which are recorded.
_NOT_DETERMINING = {
    "gpu", "processes", "sharding", "offload", "threads", "check_memory",
    "micro_batch_tokens", "packing", "gradient_checkpointing",
    "publish_every", "snapshots_in", "keep_snapshots", "keep_snapshot_every", "serve_snapshots",
    "checkpoint_every", "min_free_mib",
}  # fmt: skip
_NOT_IN_LINEAGE: dict[str, Any] = {"train": _NOT_DETERMINING, "model": {"path"}, "reference": {"path"}}
# Sections that are the same on all nodes of one trainer, and keys in them that may differ.
_COMMON: dict[str, Any] = dict.fromkeys(("model", "train", "sft", "objective", "lora", "reference"), True) | {
    "run": {"seed"}, "search": {"max_tokens", "stop"}, "metrics": {"entropy"},
}  # fmt: skip
_OWN = {
    "model": {"path"},
    "reference": {"path"},
    "train": {"gpu", "processes", "threads", "check_memory", "serve_snapshots"},
}


def prepare(config: Config, device: str) -> None:
    """Set seed, threads and GPU of this process, and on a CPU deterministic operations. Raises ConfigError."""
    exact = config.model.head_dtype == "float32" and in_half(torch.device(device), config.model.dtype)
    if exact and "dtype" not in torch.ops.aten.mm.overloads():  # type: ignore[no-untyped-call]
        raise ConfigError(
            'model.head_dtype = "float32" needs torch 2.8 or newer on a GPU, and torch '
            f"{torch.__version__} is installed (its torch.mm has no out_dtype): install a newer one, or set it to "
            '"model"'
        )
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.gpu names a GPU, but torch sees none: {_why_no_cuda()}; or train on the CPU (--cpu)")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    transformers_logging.disable_progress_bar()
    torch.manual_seed(config.run.seed)
    torch.use_deterministic_algorithms(device == "cpu")
    # Filling each allocation with NaN would be one more pass over every result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if config.train.threads:
        torch.set_num_threads(config.train.threads)


def _why_no_cuda() -> str:
    error = ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    # AssertionError: torch is built without CUDA. RuntimeError: of the driver.
    except (AssertionError, RuntimeError) as problem:
        error = str(problem)
    return why_no_cuda(torch.__version__, torch.version.cuda, error)


def require_memory(config: Config, device: torch.device, ranks: Ranks, *, supervised: bool = False) -> Report:
    """Raise ConfigError before anything is loaded if the model does not fit. `supervised` is `tba sft`.

    Every rank must call it: it also decides how the model is sharded, and raises ConfigError on all of them if they
    have other settings.
    """
    common = config.model_dump_json(include=_COMMON, exclude=_OWN)
    if not ranks.agree(common):
        raise ConfigError("the processes of this trainer have different settings: copy one tba.toml to all nodes")
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    files = model_directory(config.model.path)
    refuse_quantized(str(files))
    if total is not None:
        # Otherwise ranks with other GPUs could choose another way to shard.
        total = ranks.least(total)
    # Of the files only config.json is read.
    teacher = _teacher(config) if config.objective.uses_reference and not supervised else None
    shape = with_reference(shape_of(meta_model(files), config.lora.targets), teacher)
    report = examine(config, shape, ranks=ranks.size, nodes=ranks.nodes, gpu_total=total, supervised=supervised)
    if config.train.check_memory:
        report.check()
    log.info("memory", estimate=report.sentence())
    if report.setup.replicas > 1:
        ranks.replicate()
    return report


def build(
    config: Config,
    files: Path,
    device: torch.device,
    ranks: Ranks,
    report: Report | None = None,
    objective: Objective | None = None,
    *,
    watch: Stopwatch | None = None,
    copies: Sequence[HostBuffers] = (),
) -> tuple[Learner, PreTrainedModel]:
    """Return a learner at step 0, and its model unwrapped: without adapters and not sharded, as the files have it.

    The unwrapped model is the policy itself, or a copy of its structure without weights if the policy has adapters, is
    sharded or has its optimiser on the host. Only rank 0 needs it, and only rank 0 loads weights. `report` is the
    preflight's; `objective` is by default the one that the configuration names. `watch` and `copies` as in `Learner`.
    Raises ConfigError, OutOfMemory.
    """
    objective = objective or make_objective(config.objective, longest_response=config.search.max_tokens)
    (host, home), half = _places(device, ranks), in_half(device, config.model.dtype)
    offload = config.train.offload == "optimizer"
    policy = load_model(files, host if offload else home)
    unwrapped = policy
    if ranks.rank == 0 and (config.lora.rank or ranks.size > 1 or offload):
        unwrapped = structure_of(policy)
    packed = _packed(config, policy, device, ranks)
    adapter = _adapted(policy, config, files, ranks, half=half) if config.lora.rank else None
    teacher, initial = _teacher(config) if objective.needs_reference else None, INITIAL_REFERENCE
    if teacher is not None:
        # The same on every rank.
        digest = int(base_digest(teacher)[:15], 16) if ranks.rank == 0 else 0
        initial = f"teacher-{int(ranks.from_rank_0(torch.tensor(digest))):015x}"
    taken = take_masters(policy, home, half=half) if offload else None
    if config.train.gradient_checkpointing:
        enable_gradient_checkpointing(policy, autocast=half)
    sharded = partial(make_scorer, ranks=ranks, autocast=half, exact_logits=config.model.head_dtype == "float32")
    scorer = of_reference = sharded(policy, packed=packed)
    # After the policy is sharded, so that rank 0 does not hold two whole models. A policy without its adapters is one.
    if objective.needs_reference and (teacher is not None or not config.lora.rank):
        other, packed = _load_reference(config, files, teacher, device, ranks, packed=packed)
        of_reference = sharded(other, packed=packed)
    reference = Reference(of_reference, config.reference, lineage_of(config), initial)
    learner = Learner(
        scorer,
        reference,
        config.train,
        objective,
        taken=taken,
        adapter=adapter,
        ranks=ranks,
        report=report,
        entropy=config.metrics.entropy,
        end_ids=end_ids(config, files),
        watch=watch or Stopwatch(SystemClock()),
        copies=copies,
    )
    return learner, unwrapped


def _adapted(policy: PreTrainedModel, config: Config, files: Path, ranks: Ranks, *, half: bool) -> dict[str, Any]:
    """Add adapters to the policy, and return what identifies them: their settings, and on rank 0 their base."""
    add_adapters(policy, config.lora)
    if half:
        to_bfloat16(policy)
    # `publish` may change between starts: it does not affect the adapters.
    settings = config.lora.model_dump(mode="json", exclude={"publish"})
    return settings | {"base": base_digest(files) if ranks.rank == 0 else ""}


def _places(device: torch.device, ranks: Ranks) -> tuple[torch.device, torch.device]:
    """Return where a model is loaded, and where it is before it is sharded.

    FSDP moves each layer's shard to the GPU; the whole model is never there, and only rank 0 loads it.
    """
    host = torch.device("cpu" if ranks.rank == 0 else "meta")
    return host, device if ranks.size == 1 else host


def _packed(config: Config, model: PreTrainedModel, device: torch.device, ranks: Ranks) -> bool:
    half = in_half(device, config.model.dtype)
    return ranks.rank == 0 and packs(config.train.packing, model, device.type, half=half)


def make_scorer(
    model: PreTrainedModel, *, ranks: Ranks = ALONE, autocast: bool, packed: bool = False, exact_logits: bool = False
) -> Scorer:
    """Return the scorer of a model, sharded over the ranks. Raises ConfigError.

    Of `packed` (`tba.trainer.model.packing.packs`) that of rank 0 counts: the others have no weights to try it with.
    """
    # The other ranks wait here for as long as rank 0 loads: unlike NCCL's collectives, this has no time limit.
    packed = bool(ranks.sum(torch.tensor(int(packed and ranks.rank == 0))))
    scorer = Scorer(model, autocast=autocast, packed=packed, exact_logits=exact_logits)
    if ranks.size > 1:
        shard(scorer, model._no_split_modules or (), ranks, autocast=autocast)
    return scorer


def end_ids(config: Config, files: Path) -> frozenset[int] | None:
    """Return the ids that end a response; None if strings end it, too: no token shows that."""
    ids, strings = end_tokens(files, config.search.stop)
    return None if strings else frozenset(ids)


def open_scorer(files: Path, config: Config, device: str) -> Callable[[Sequence[Mapping[str, Any]]], list[Float32]]:
    """Load a model. Returns what computes, as the trainer does, log-probabilities of the response tokens of records.

    A record has an `id`, a `temperature` (0 counts as 1) and the lists of ARRAY_KINDS. Raises ConfigError, OutOfMemory.
    """
    prepare(config, device)
    place = torch.device(device)
    half, model = in_half(place, config.model.dtype), load_model(files, place).requires_grad_(False)
    packed = _packed(config, model, place, ALONE)
    if half:
        to_bfloat16(model)
    scorer = Scorer(model, autocast=half, packed=packed, exact_logits=config.model.head_dtype == "float32")

    @torch.no_grad()
    def score(records: Sequence[Mapping[str, Any]]) -> list[Float32]:
        arrays = [{kind.name: np.asarray(one[kind.name], kind.dtype) for kind in ARRAY_KINDS} for one in records]
        rows = [row_of_arrays(one["id"], each, one["temperature"]) for one, each in zip(records, arrays, strict=True)]
        check_tokens(rows, scorer.vocabulary)
        found = scorer.score(rows, tempered=True).tempered_R.float().cpu().numpy()
        return np.split(found, np.cumsum([len(row.response_ids) for row in rows])[:-1])

    return score


def lineage_of(config: Config) -> str:
    """Return a hash of the settings that determine the weights of each step, given its batch."""
    included: dict[str, Any] = dict.fromkeys(("model", "train", "objective", "reference"), True)
    if config.objective.name == "dr_grpo":
        # Its loss is divided by this.
        included["search"] = {"max_tokens"}
    # The same model may be named by another path; another model is refused.
    determining = config.model_dump_json(include=included, exclude=_NOT_IN_LINEAGE)
    return xxhash.xxh32_hexdigest(determining.encode())


def _load_reference(
    config: Config, files: Path, teacher: Path | None, device: torch.device, ranks: Ranks, *, packed: bool
) -> tuple[PreTrainedModel, bool]:
    """Load the reference: the model in `files`, or the teacher. Returns also whether its rows are packed.

    On a GPU its matrices are in bfloat16, so that only these ever are on the device.
    """
    if teacher is not None and ranks.rank == 0:
        check_same_tokens(files, teacher)
    host, home = _places(device, ranks)
    # A moving average of bfloat16 weights would lose small changes.
    narrow = in_half(device, config.model.dtype) and config.reference.kind != "ema"
    reference = load_model(teacher or files, host if narrow else home).requires_grad_(False)
    if teacher is not None:
        # It may have other attention, which is tried in float32.
        packed = _packed(config, reference, device, ranks)
    if narrow:
        to_bfloat16(reference)
    return reference.to(home), packed


def _teacher(config: Config) -> Path | None:
    """Return the directory of `reference.path`, None if the reference is `model.path`."""
    path = config.reference.path
    return model_directory(path, setting="reference.path") if path else None
