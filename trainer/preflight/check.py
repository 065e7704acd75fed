"""Whether a trainer fits into the memory of its GPUs and its host, and what would fit instead."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tba.common.config import Config
from tba.common.config.search import TRANSFORMERS_IN_FLIGHT
from tba.common.errors import ConfigError, quantity
from tba.common.system.devices import count_gpus
from tba.trainer.batch.micro_batches import GPU_PASS_TOKENS
from tba.trainer.preflight.memory import Setup, device_bytes, host_bytes, transformers_engine_bytes
from tba.trainer.preflight.shape import ModelShape, meta_model, shape_of

# Memory of a GPU that tensors cannot use: CUDA's context, buffers of NCCL and cuBLAS; and the share lost in fragments.
_CONTEXT_BYTES = 2 << 30
_FRAGMENTS = 0.03
# What is suggested: at most this many GPUs, adapters of this rank, and micro-batches of at least this many tokens.
_MOST_GPUS = 64
_LORA_RANK = 16
_LEAST_TOKENS = 2048
# Components on the host that may wait or be smaller: with less memory than they need, training may still run.
_OPTIONAL = ("snapshots", "activations", "logits")
# A batch of shorter rows than this and `search.max_tokens` may not fill a micro-batch.
_PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Report:
    """The estimate for one trainer.

    `device` and `host` are bytes by component, of one GPU and of all ranks together; without a GPU, `gpu_total` is None
    and the components of the device are in `host`. `host_total` is None for a host that is not this one. `node` is how
    many GPUs the node has, 0 if that is not known. `instead` are settings that would fit, as text. `engines` are bytes
    of each GPU that engines take, which are not in `gpu_total`.
    """

    setup: Setup
    device: dict[str, int]
    host: dict[str, int]
    gpu_total: int | None
    host_total: int | None
    node: int = 0
    instead: tuple[str, ...] = ()
    engines: int = 0

    @property
    def fits(self) -> bool:
        """Whether the GPUs have enough memory, and the host has enough for what training cannot do without."""
        return self.fits_device and (self.host_total is None or self.host_needed <= self.host_total)

    @property
    def fits_device(self) -> bool:
        """Whether each GPU has enough memory; true without GPUs."""
        return self.gpu_total is None or sum(self.device.values()) <= usable(self.gpu_total)

    @property
    def states_fill(self) -> bool:
        """Whether weights, gradients, optimiser and reference take more than half of the GPU's memory."""
        return self.gpu_total is not None and self.device["states"] > usable(self.gpu_total) / 2

    @property
    def host_needed(self) -> int:
        """Bytes of host memory that training cannot do without: while loading or later, whichever is more.

        On a CPU these are the states: how long the rows are is not known.
        """
        later = sum(size for name, size in self.host.items() if name not in ("loading", *_OPTIONAL))
        return max(self.host["loading"], later)

    @property
    def host_peak(self) -> int:
        """Bytes of host memory with every buffer of publishing in use."""
        return max(self.host["loading"], sum(self.host.values()) - self.host["loading"])

    def check(self) -> None:
        """Raise ConfigError with the sentence if it does not fit."""
        if not self.fits:
            raise ConfigError(f"{self.sentence()}; set train.check_memory = false to start anyway")

    def sentence(self) -> str:
        """Return whether it fits, what is needed where, and what would fit instead."""
        of = "" if self.host_total is None else f" of {_gb(self.host_total)}"
        host = f"{_gb(self.host_peak)}{of} on the host ({_parts(self.host)})"
        if self.fits and self.host_total is not None and self.host_peak > self.host_total:
            host += f"; {_gb(self.host_needed)} are enough, and snapshots wait for memory"
        if self.fits:
            return f"fits: the trainer needs {self._device()}, and at most {host}" if self.device else f"fits: {host}"
        missing = host if self.fits_device else self._device()
        instead = f"; these would fit: {'; '.join(self.instead)}" if self.instead else ""
        return f"does not fit: the trainer needs {missing}{instead}"

    def _device(self) -> str:
        ranks, replicas = self.setup.ranks, self.setup.replicas
        where = "of the GPU" if ranks == 1 else f"on each of {quantity(ranks, 'GPU')}"
        where += f", {ranks // replicas} for each whole model" if replicas > 1 else ""
        besides = f" besides engines of {_gb(self.engines)}" if self.engines else ""
        total, available = sum(self.device.values()), usable(self.gpu_total or 0)
        return f"{_gb(total)} of the {_gb(available)} usable {where}{besides} ({_parts(self.device)})"


def usable(total: int) -> int:
    """Return the bytes of a GPU that tensors can use."""
    return max(int(total * (1 - _FRAGMENTS)) - _CONTEXT_BYTES, 0)


def examine(
    config: Config,
    shape: ModelShape,
    *,
    ranks: int,
    nodes: int = 1,
    gpu_total: int | None,
    host_total: int | None = None,
    supervised: bool = False,
    assumed: int | None = None,
    engines: int = 0,
) -> Report:
    """Estimate the memory of `ranks` processes that train a model, each with a GPU of `gpu_total` bytes or on the CPU.

    They are on `nodes`, equally many on each. `host_total` is by default the memory of this machine. `supervised` is
    `tba sft`: no reference, no snapshots. `assumed` is the number of GPUs of a node that is not this one. `engines` are
    bytes of each GPU that engines take.
    """
    if gpu_total is not None:
        gpu_total -= engines
    setup = setup_of(config, shape, ranks=ranks, nodes=nodes, gpu_total=gpu_total, supervised=supervised)
    if host_total is None and assumed is None:
        host_total = host_memory()
    device, host = device_bytes(shape, setup), host_bytes(shape, setup)
    if supervised:
        host["snapshots"] = 0
    if gpu_total is None:
        host |= {name: ranks // nodes * size for name, size in device.items()}
        return Report(setup, {}, host, None, host_total)
    node = count_gpus() if assumed is None else assumed
    report = Report(setup, device, host, gpu_total, host_total, node, engines=engines)
    return report if report.fits else replace(report, instead=tuple(_instead(report, shape, adapters=not supervised)))


def engine_bytes(config: Config, shape: ModelShape, gpu_total: int) -> int:
    """Return the bytes that one engine takes of a GPU of `gpu_total` bytes, which a trainer may share with it.

    vLLM reserves a fraction. Prompts of the Transformers engine are taken to be longer than most are, which covers the
    activations of the pass over them.
    """
    search = config.search
    if search.engine == "vllm":
        return int(search.gpu_memory_utilization * gpu_total)
    narrow = 2 if config.model.dtype == "bfloat16" else 4
    rows = TRANSFORMERS_IN_FLIGHT if search.max_in_flight == "auto" else search.max_in_flight
    tokens = search.max_tokens + _PROMPT_TOKENS
    return _CONTEXT_BYTES + transformers_engine_bytes(shape, narrow=narrow, rows=rows, tokens=tokens)


def require(
    config: Config, directory: Path, *, ranks: int, nodes: int = 1, gpu_total: int | None, supervised: bool = False
) -> Report:
    """Raise ConfigError if training the model of a directory does not fit, unless `train.check_memory` is off.

    Of the directory only config.json is read.
    """
    shape = shape_of(meta_model(directory), config.lora.targets)
    report = examine(config, shape, ranks=ranks, nodes=nodes, gpu_total=gpu_total, supervised=supervised)
    if config.train.check_memory:
        report.check()
    return report


def setup_of(
    config: Config, shape: ModelShape, *, ranks: int, nodes: int = 1, gpu_total: int | None, supervised: bool = False
) -> Setup:
    """Return what decides the memory of a configuration, of the ways of `train.sharding` the first that fits."""
    train = config.train
    separate = config.objective.uses_reference and not config.lora.rank and not supervised
    batch = train.prompts_per_step * train.samples_per_prompt * (config.search.max_tokens + _PROMPT_TOKENS)
    half = gpu_total is not None and config.model.dtype == "bfloat16"
    padded = train.packing == "padded" or (train.packing == "auto" and gpu_total is not None and not half)
    setup = Setup(
        ranks=ranks,
        half=half,
        reference=config.reference.kind if separate else "",
        lora_rank=0 if supervised else config.lora.rank,
        offload=train.offload == "optimizer",
        gathered=False,
        checkpointing=train.gradient_checkpointing,
        tokens=train.micro_batch_tokens if supervised else min(train.micro_batch_tokens, batch),
        published=2 if config.model.dtype == "bfloat16" else 4,
        nodes=nodes,
    )
    if padded:
        # Splitting into n passes adds about tokens / n padding and n passes; a test tries rows of many lengths.
        setup = replace(setup, padding=int(1.4 * (setup.tokens * GPU_PASS_TOKENS) ** 0.5))
    ways = _ways(setup, train.sharding)
    fitting = (one for one in ways if gpu_total is None or sum(device_bytes(shape, one).values()) <= usable(gpu_total))
    return next(fitting, ways[-1])


def _ways(setup: Setup, sharding: str) -> list[Setup]:
    """Return the ways to shard that a setting allows, the one with the least communication first."""
    if setup.ranks == 1:
        return [setup]
    replicas = {"node": [setup.nodes], "auto": [setup.nodes, 1]}.get(sharding, [1])
    gathered = {"all": [False], "optimizer": [True]}.get(sharding, [True, False])
    return [replace(setup, replicas=one, gathered=keeps) for one in dict.fromkeys(replicas) for keeps in gathered]


def _instead(report: Report, shape: ModelShape, *, adapters: bool) -> Iterator[str]:
    """Yield settings that fit, with their need: for each kind of change the one that changes least."""
    setup = report.setup
    offload = 'train.offload = "optimizer"'
    # Each node has equally many.
    more = range(setup.ranks + setup.nodes, _MOST_GPUS + 1, setup.nodes)
    wide = replace(setup, gathered=False, replicas=1)
    changes: list[tuple[str, Iterable[Setup]]] = [
        ("", [setup]),
        ("", (replace(wide, ranks=ranks) for ranks in more)),
    ]
    if not setup.lora_rank:
        if not setup.offload:
            changes.insert(1, (offload, (replace(wide, offload=True, ranks=ranks) for ranks in (setup.ranks, *more))))
        if adapters:
            small = replace(wide, lora_rank=_LORA_RANK, offload=False, reference="")
            changes.append(
                (f"lora.rank = {_LORA_RANK}", (replace(small, ranks=ranks) for ranks in (setup.ranks, *more)))
            )
    for name, setups in changes:
        leaner = (one for changed in setups for one in _leaner(changed))
        estimates = (
            replace(report, setup=one, device=device_bytes(shape, one), host=host_bytes(shape, one)) for one in leaner
        )
        found = next((one for one in estimates if one.fits), None)
        if found is not None:
            beyond = f", more than the {report.node} of this node" if 0 < report.node < found.setup.ranks else ""
            yield f"{_described(name, setup, found.setup)} ({_gb(sum(found.device.values()))} per GPU{beyond})"


def _leaner(setup: Setup) -> Iterator[Setup]:
    """Yield a setup, then with gradient checkpointing, then with smaller micro-batches too."""
    yield setup
    setup = replace(setup, checkpointing=True)
    while setup.tokens >= _LEAST_TOKENS:
        yield setup
        setup = replace(setup, tokens=setup.tokens // 2)


def _described(name: str, old: Setup, new: Setup) -> str:
    first = [name, quantity(new.ranks, "GPU") if new.ranks != old.ranks else ""]
    second = [
        "train.gradient_checkpointing = true" if new.checkpointing != old.checkpointing else "",
        f"train.micro_batch_tokens = {new.tokens}" if new.tokens != old.tokens else "",
    ]
    return " with ".join(" and ".join(filter(None, part)) for part in (first, second) if any(part))


def host_memory() -> int:
    """Return the bytes of memory that processes here may use: of the machine, or the limit of its control group."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            limits.append(int(file.read_text()))
        # Not limited, or another version of control groups.
        except (OSError, ValueError):
            continue
    return min(limits)


def _parts(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {_gb(size)}" for name, size in sizes.items() if size)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
