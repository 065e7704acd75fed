"""Whether a trainer fits into the memory of its GPUs and its host, and what would fit instead.

Bytes are counted, component by component, from the code of this package, of FSDP2 (torch 2.13) and of the models in
transformers 5. Estimates err towards more memory. tests/unit/trainer/test_preflight.py has the same sums worked out by
hand, and compares activations with those that torch saves.

The matrices of a trainer that computes in bfloat16 (`half`) are these:

                      on the GPU                                 gathered from other GPUs by FSDP2
    all trained       float32, cast to bfloat16 by autocast      bfloat16
    with `offload`    bfloat16; float32 masters on the host      bfloat16
    adapters (LoRA)   base bfloat16, adapters float32            bfloat16
    reference         bfloat16, float32 for kind "ema"           bfloat16
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tba.common.config import Config
from tba.common.config.search import TRANSFORMERS_IN_FLIGHT
from tba.common.errors import ConfigError, quantity
from tba.common.system.devices import count_gpus
from tba.trainer.batch.micro_batches import GPU_PASS_TOKENS
from tba.trainer.preflight.shape import ModelShape

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
# Logits that exist at the same time on a GPU (tba.trainer.model.chunked_logprobs), 10 bytes each: in the dtype of
# the product, in float32, and their exponentials for the entropy.
_GPU_LOGITS = 1 << 27
_LOGIT_BYTES = 10
_ADAM_BYTES = 8
# Copies of a snapshot on the host: four files in `search.weights_dir` or four sets of host buffers. Experts that the
# files hold one by one go through host buffers first: a set that is being converted, and one that waits.
_SNAPSHOTS, _CONVERTED = 4, 2
# Layers whose gathered weights exist at the same time: FSDP2 gathers the next one during the computation of one.
_GATHERED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Setup:
    """What decides the memory of a trainer besides its model.

    `half` computes in bfloat16. `reference` is the kind of a separate reference model, empty for none. `gathered`
    keeps gathered weights and gradients during a step (`train.sharding`). `published` are the bytes per parameter of a
    snapshot. `padding` are the tokens that padded passes add to the `tokens` of a micro-batch. `ranks` are those of all
    `nodes`; `replicas` are whole models, each sharded over the ranks of one node.
    """

    ranks: int
    half: bool
    reference: str
    lora_rank: int
    offload: bool
    gathered: bool
    checkpointing: bool
    tokens: int
    published: int = 2
    padding: int = 0
    nodes: int = 1
    replicas: int = 1


def device_bytes(shape: ModelShape, setup: Setup) -> dict[str, int]:
    """Return the bytes on each GPU by component. Raises nothing; sums are an estimate of the peak."""
    return {
        "states": sum(state_bytes(shape, setup).values()),
        "gathered weights and gradients": _gathered(shape, setup),
        "activations": activation_bytes(shape, setup),
        "logits": _logits(shape, setup),
    }


def state_bytes(shape: ModelShape, setup: Setup) -> dict[str, int]:
    """Return the bytes on each GPU, during the whole run, of weights, gradients, optimiser and reference."""
    trained = trained_parameters(shape, setup)
    adapters = 4 * trained if setup.lora_rank else 0
    narrow = 2 if setup.half else 4
    weights = narrow if setup.offload or setup.lora_rank else 4
    reference = 0 if not setup.reference else 4 if setup.reference == "ema" else narrow
    on_device = 0 if setup.offload else trained
    found = {
        "weights": weights * shape.parameters + adapters,
        "gradients": 4 * on_device,
        "optimizer": _ADAM_BYTES * on_device,
        "reference": reference * (shape.reference or shape.parameters),
    }
    return {name: -(-size * setup.replicas // setup.ranks) for name, size in found.items()}


def trained_parameters(shape: ModelShape, setup: Setup) -> int:
    """Return the number of parameters that are trained: those of the adapters, or all."""
    return setup.lora_rank * shape.adapter if setup.lora_rank else shape.parameters


def _gathered(shape: ModelShape, setup: Setup) -> int:
    """Return the bytes of gathered weights (bfloat16 copies on a single GPU) and of gradients on their way.

    FSDP2 holds the root (embeddings, last norm and head) around all layers. A gradient is first in the dtype of the
    gathered weight, then in float32 as the input of the reduction.
    """
    narrow = 2 if setup.half else 4
    whole = not setup.lora_rank
    if setup.ranks == 1:
        if setup.offload:
            return narrow * (shape.root + _GATHERED_LAYERS * shape.largest_layer)
        # Autocast keeps its copies from the forward to the backward pass.
        return 2 * shape.parameters if setup.half and whole else 0
    passing = shape.root + _GATHERED_LAYERS * shape.largest_layer
    if setup.gathered:
        gradients = 4 * (shape.parameters + max(shape.root, shape.largest_layer)) if whole else 0
        return narrow * shape.parameters + gradients
    # Between micro-batches, the sum of a node's gradients of its shard: one reduction over the nodes ends the step.
    partial = 4 * shape.parameters * setup.replicas // setup.ranks if setup.offload and setup.replicas > 1 else 0
    # The reference, which is gathered at another time and has no gradients, may be a larger model.
    reference = narrow * (shape.reference_root + _GATHERED_LAYERS * shape.reference_layer) if setup.reference else 0
    return max(passing * (narrow + (narrow + 4 if whole else 0)) + partial, reference + partial)


def activation_bytes(shape: ModelShape, setup: Setup) -> int:
    """Return the bytes that the backward pass of one micro-batch needs.

    With gradient checkpointing: the input of each layer, and the activations of one layer at a time. To both are added
    the gradients that exist at the same time in the backward pass of a layer, and 5 copies of the last hidden states.
    """
    layer = layer_activation_bytes(shape, setup)
    narrow = 2 if setup.half else 4
    backward = 3 * narrow * shape.inner + 8 * shape.hidden
    kept = 4 * shape.hidden * shape.layers + layer if setup.checkpointing else layer * shape.layers
    return (setup.tokens + setup.padding) * (kept + backward + 20 * shape.hidden)


def layer_activation_bytes(shape: ModelShape, setup: Setup) -> int:
    """Return the bytes per token that autograd saves in one decoder layer of the Llama and Qwen families.

    Hidden states are float32, products are in bfloat16. A norm saves its input and its normalised input; each linear
    layer behind it saves its own bfloat16 copy of the output; attention saves queries, keys, values and its output;
    the MLP saves four tensors of its inner width.
    """
    narrow, hidden, heads = 2 if setup.half else 4, shape.hidden, shape.query + shape.key_value
    # q, k and v, then gate and up.
    norms = 2 * 8 * hidden + ((3 + 2) * 2 if setup.half else 2 * 4) * hidden
    attention = 2 * narrow * heads + (6 if setup.half else 8) * heads * shape.normed_heads
    mlp = 4 * narrow * shape.inner
    # A copy of the hidden state for each expert, its result, and that result times the router's weight.
    routing = shape.experts * (narrow + narrow + 4) * hidden
    # PEFT casts what enters an adapter to float32: here attention's output and the MLP's inner states.
    adapters = 4 * (shape.query + shape.inner) if setup.lora_rank else 0
    return norms + attention + mlp + routing + adapters


def _logits(shape: ModelShape, setup: Setup) -> int:
    """Return the bytes of one chunk of logits, and of the head's gradient: float32, and the product added to it."""
    narrow = 2 if setup.half else 4
    chunk = min(setup.tokens * shape.vocabulary, _GPU_LOGITS) * _LOGIT_BYTES
    return chunk + (0 if setup.lora_rank else (4 + narrow) * shape.head)


def host_bytes(shape: ModelShape, setup: Setup) -> dict[str, int]:
    """Return the bytes in the memory of the host, for all ranks of this machine together.

    "loading" and the others do not add up: it ends before they begin.
    """
    trained = trained_parameters(shape, setup)
    checkpoint = 4 + _ADAM_BYTES + (4 if setup.reference in ("reset", "ema") else 0)
    # Rank 0 loads each in float32, before it is cast or sharded: the reference after the policy, whose masters wait.
    models = 2 if setup.reference and setup.offload else 1
    # Masters, gradients and both moments, and pinned copies in the dtype of the device, which take what their tensors
    # take (tba.trainer.model.host_buffers).
    offloaded = (4 + 4 + _ADAM_BYTES + (2 if setup.half else 4)) * shape.parameters * setup.replicas // setup.nodes
    return {
        "loading": 4 * max(models * shape.parameters, shape.reference + (models - 1) * shape.parameters),
        "offloaded optimizer": offloaded if setup.offload else 0,
        "checkpoint": checkpoint * trained,
        "snapshots": (_SNAPSHOTS + (_CONVERTED if shape.experts else 0)) * setup.published * shape.parameters,
    }


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

    vLLM reserves a fraction. The Transformers engine's KV cache has half as many columns again as it uses
    (tba.searcher.engines.kv_cache). A step has logits in the dtype of the weights, and four float32 tensors of their
    size: widened, scaled, exponentials, and these padded. Prompts are taken to be longer than most are, which covers
    the activations of the pass over them.
    """
    search = config.search
    if search.engine == "vllm":
        return int(search.gpu_memory_utilization * gpu_total)
    narrow = 2 if config.model.dtype == "bfloat16" else 4
    rows = TRANSFORMERS_IN_FLIGHT if search.max_in_flight == "auto" else search.max_in_flight
    tokens = search.max_tokens + _PROMPT_TOKENS
    cache = rows * (tokens + tokens // 2) * 2 * shape.layers * shape.key_value * narrow
    logits = rows * shape.vocabulary * (narrow + 4 * 4)
    return _CONTEXT_BYTES + narrow * shape.parameters + cache + logits


def setup_of(
    config: Config, shape: ModelShape, *, ranks: int, nodes: int = 1, gpu_total: int | None, supervised: bool = False
) -> Setup:
    """Return what decides the memory of a configuration, of the ways of `train.sharding` the first that fits."""
    train = config.train
    separate = config.objective.uses_reference and (config.reference.path or not config.lora.rank) and not supervised
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
    changes: list[tuple[str, Iterable[Setup]]] = [("", [setup]), ("", (replace(wide, ranks=ranks) for ranks in more))]
    if not setup.lora_rank:
        if not setup.offload:
            changes.insert(1, (offload, (replace(wide, offload=True, ranks=ranks) for ranks in (setup.ranks, *more))))
        if adapters:
            reference = setup.reference * bool(shape.reference)
            small = replace(wide, lora_rank=_LORA_RANK, offload=False, reference=reference)
            changes.append((f"lora.rank = {_LORA_RANK}", (replace(small, ranks=n) for n in (setup.ranks, *more))))
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
