"""Bytes of a trainer, component by component, from the sizes of a model.

Counted from the code of this package, of FSDP2 (torch 2.13) and of the models in transformers 5. Estimates err towards
more memory. tests/unit/trainer/test_preflight.py has the same sums worked out by hand, and compares activations with
those that torch saves.

The matrices of a trainer that computes in bfloat16 (`half`) are these:

                      on the GPU                                 gathered from other GPUs by FSDP2
    all trained       float32, cast to bfloat16 by autocast      bfloat16
    with `offload`    bfloat16; float32 masters on the host      bfloat16
    adapters (LoRA)   base bfloat16, adapters float32            bfloat16
    reference         bfloat16, float32 for kind "ema"           bfloat16
"""

from dataclasses import dataclass

from tba.trainer.preflight.shape import ModelShape

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
        "reference": reference * shape.parameters,
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
    return passing * (narrow + (narrow + 4 if whole else 0)) + partial


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


def transformers_engine_bytes(shape: ModelShape, *, narrow: int, rows: int, tokens: int) -> int:
    """Return the bytes on a GPU of a Transformers engine with weights of `narrow` bytes per parameter.

    It generates `rows` responses at a time, each with its prompt at most `tokens` long. Its KV cache has half as many
    columns again as it uses (tba.searcher.engines.kv_cache). A step has logits in the dtype of the weights, and four
    float32 tensors of their size: widened, scaled, exponentials, and these padded.
    """
    cache = rows * (tokens + tokens // 2) * 2 * shape.layers * shape.key_value * narrow
    logits = rows * shape.vocabulary * (narrow + 4 * 4)
    return narrow * shape.parameters + cache + logits


def host_bytes(shape: ModelShape, setup: Setup) -> dict[str, int]:
    """Return the bytes in the memory of the host, for all ranks of this machine together.

    "loading" and the others do not add up: it ends before they begin.
    """
    trained = trained_parameters(shape, setup)
    checkpoint = 4 + _ADAM_BYTES + (4 if setup.reference in ("reset", "ema") else 0)
    # Rank 0 loads each in float32, before it is cast or sharded: the reference after the policy, whose masters wait.
    models = 2 if setup.reference and setup.ranks > 1 and setup.offload else 1
    return {
        "loading": 4 * models * shape.parameters,
        "offloaded optimizer": _offloaded(shape, setup) * setup.replicas // setup.nodes if setup.offload else 0,
        "checkpoint": checkpoint * trained,
        "snapshots": (_SNAPSHOTS + (_CONVERTED if shape.experts else 0)) * setup.published * shape.parameters,
    }


def _offloaded(shape: ModelShape, setup: Setup) -> int:
    """Return the bytes of masters, gradients and both moments, and of pinned copies in the dtype of the device.

    Pinned memory takes what its tensors take (tba.trainer.model.host_buffers).
    """
    return (4 + 4 + _ADAM_BYTES + (2 if setup.half else 4)) * shape.parameters
