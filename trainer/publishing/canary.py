"""The canary of a snapshot: fixed token sequences with their log-probabilities under its weights.

The weights are those in the file, in their own type; each layer widens its own while it computes, so that there is
never a second, wider model.

Shape suffixes: N sequences, T tokens of the longest, R all their tokens, H features, V vocabulary or outputs, K experts
of a token.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.common.weights.pretrained import load_tokenizer
from tba.common.weights.snapshot import Canary
from tba.trainer.model.packed_attention import ATTENTION
from tba.trainer.model.scorer import structure_of

_TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Question: What is 12 + 30?\nAnswer: 12 + 30 = 42",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5",
    "Der schnelle braune Fuchs springt über den faulen Hund. 1, 2, 3, 4, 5, 6, 7",
)
# Sequences, and tokens of each. On a CPU the time of up to 15 tokens goes into reading and widening the weights, and
# beyond that into arithmetic. 3 x 5 of the short ones are computed, since nothing follows the last token of a sequence.
_SHORT = 3, 6
# On a GPU more tokens cost next to nothing, and show smaller errors. With routed experts few tokens would pass through
# few of them, and rounding may choose others, which changes a token by nats.
_LONG = 4, 16
_SEED = 20250319
# Elements of a linear layer that are widened at a time. On a CPU they stay in a core's second-level cache; on a GPU the
# blocks are few, as each takes three kernels.
_CPU_BLOCK, _GPU_BLOCK = 1 << 17, 1 << 24
_CPU = torch.device("cpu")


def canary_sequences(directory: Path, vocabulary: int, *, long: bool) -> list[list[int]]:
    """A few short texts in the model's tokens, replaced by seeded random ids where the tokenizer does not suit them.

    `long` is for models with routed experts, and for models on a GPU.

    Text is the better canary: bfloat16 rounding differs more on unlikely tokens. But a tokenizer of a few characters
    turns every text into unknown tokens.
    """
    count, length = _LONG if long else _SHORT
    texts: list[list[int]] = []
    if any((directory / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        tokenizer = load_tokenizer(directory)
        texts = [[int(id_) for id_ in tokenizer.encode(text)[:length]] for text in _TEXTS[:count]]
    # Fewer distinct tokens would leave most of the embedding untested.
    texts = [ids for ids in texts if len(set(ids)) >= length // 2 and max(ids) < vocabulary]
    generator = torch.Generator().manual_seed(_SEED)
    seeded: list[list[int]] = torch.randint(vocabulary, (count - len(texts), length), generator=generator).tolist()
    return texts + seeded


def skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The modules of a model without its weights, so that another thread can run them during training."""
    made = structure_of(model).eval()
    # Right padding needs a causal mask and no more. Models that cannot be packed keep their own attention.
    if made.config._attn_implementation == ATTENTION:
        made.set_attn_implementation("sdpa")
    return made


def use_one_core(device: torch.device) -> None:
    """Let torch use one core for what the calling thread computes from now on, if models are on the CPU.

    Several threads would wait for each other after every block of a layer. Where other work uses the cores, that takes
    many times as long as the block. Threads that exist are not affected; those that start later inherit it.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)


@torch.no_grad()
def make_canary(
    modules: PreTrainedModel,
    weights: dict[str, Tensor],
    sequences: list[list[int]],
    device: torch.device = _CPU,
    stream: torch.cuda.Stream | None = None,
) -> Canary:
    """Compute the log-probabilities [T - 1] of each sequence under `weights`, in float32 on `device`.

    `modules` is the model's skeleton, which one thread uses at a time. All sequences are in one batch: causal attention
    does not see the padding after them. Of the weights, a part of one layer at a time is on the device, and in float32.
    `stream` is where a GPU computes: the same at each call, so that its memory is used again.
    """
    tokens_NT = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for row, sequence in zip(tokens_NT, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    tokens_NT = tokens_NT.to(device)
    on_stream = torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
    with on_stream, _weights_by_layer(modules, weights, device):
        logits_NTV = modules(input_ids=tokens_NT[:, :-1], use_cache=False).logits
        logprob_NTV = logits_NTV.float().log_softmax(dim=2)
        logprob_NT = logprob_NTV.gather(2, tokens_NT[:, 1:, None])[..., 0].cpu()
    rows = zip(logprob_NT.tolist(), sequences, strict=True)
    return Canary(sequences, [row[: len(sequence) - 1] for row, sequence in rows])


@contextlib.contextmanager
def _weights_by_layer(modules: PreTrainedModel, weights: dict[str, Tensor], device: torch.device) -> Iterator[None]:
    """Give each layer its weights in float32 while it computes, and take them away afterwards."""
    # By identity, so that a tied head finds the weights of the embedding.
    names = {id(one): name for name, one in modules.named_parameters(remove_duplicate=False) if name in weights}
    buffers = dict(modules.named_buffers())
    for name, buffer in buffers.items():
        buffer.data = weights[name].to(device) if name in weights else buffer.data.to(device)
    with contextlib.ExitStack() as undo:
        for module in modules.modules():
            own = {leaf: weights[names[id(one)]] for leaf, one in module.named_parameters(recurse=False)}
            if type(module) is nn.Linear:
                undo.callback(module.__dict__.pop, "forward")
                module.forward = partial(_linear, own["weight"], own.get("bias"))  # type: ignore[method-assign]
            elif type(module) is nn.Embedding:
                undo.callback(module.__dict__.pop, "forward")
                module.forward = partial(_embedding, own["weight"])  # type: ignore[method-assign]
            # Routed experts in the form that nearly all models of transformers have.
            elif own.keys() == {"gate_up_proj", "down_proj"} and getattr(module, "is_transposed", None) is False:
                undo.callback(module.__dict__.pop, "forward")
                module.forward = partial(_experts, module, own)
            elif own:
                empty = dict(module.named_parameters(recurse=False))
                undo.callback(module.register_forward_pre_hook(partial(_fill, own, device)).remove)
                undo.callback(module.register_forward_hook(partial(_empty, empty)).remove)
        yield


def _linear(weight: Tensor, bias: Tensor | None, input_NTH: Tensor) -> Tensor:
    """A linear layer, widened some rows at a time: a head may be larger than all layers together."""
    block = max(1, (_CPU_BLOCK if input_NTH.device.type == "cpu" else _GPU_BLOCK) // weight.shape[1])
    flat_RH = input_NTH.reshape(-1, weight.shape[1])
    output_RV = flat_RH.new_empty(len(flat_RH), len(weight))
    for first in range(0, len(weight), block):
        part_VH = weight[first : first + block].to(flat_RH.device).float()
        output_RV[:, first : first + block] = flat_RH @ part_VH.T
    if bias is not None:
        output_RV += bias.to(flat_RH.device).float()
    return output_RV.view(*input_NTH.shape[:-1], len(weight))


def _embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """The rows of the tokens alone are widened."""
    return weight[ids.to(weight.device)].to(ids.device).float()


def _experts(module: Any, own: dict[str, Tensor], input_RH: Tensor, chosen_RK: Tensor, share_RK: Tensor) -> Tensor:
    """Routed experts, one at a time: those of one layer of Qwen3-30B-A3B are 2.4 GB in float32.

    The results are those of `grouped_mm_experts_forward` of transformers, added in the same order.
    """
    output_RKH = input_RH.new_zeros(*chosen_RK.shape, input_RH.shape[-1])
    for expert in sorted(set(chosen_RK.flatten().tolist())):
        rows, places = torch.where(chosen_RK == expert)
        inner = module._apply_gate(_linear(own["gate_up_proj"][expert], None, input_RH[rows]))
        output_RKH[rows, places] = _linear(own["down_proj"][expert], None, inner)
    return (output_RKH * share_RK[..., None]).sum(dim=1)


def _fill(own: dict[str, Tensor], device: torch.device, module: nn.Module, _inputs: Any) -> None:
    for leaf, weight in own.items():
        wide = weight.to(device)
        module._parameters[leaf] = nn.Parameter(wide.float() if wide.is_floating_point() else wide, False)


def _empty(empty: dict[str, nn.Parameter], module: nn.Module, _inputs: Any, _output: Any) -> None:
    module._parameters.update(empty)
