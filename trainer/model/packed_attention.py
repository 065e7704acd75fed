"""Attention within the sequences of a packed row, several of which may begin with the same prompt.

    tokens      p p p p a a b b b c c c                  a prompt p with its responses a and b, then a sequence c
    sequences   p p p p a a|p p p p b b b|c c c

Only attention needs the whole sequences: it gathers their queries, keys and values, attends causally within each, and
keeps one result for each token. All else in the model computes the tokens of a shared prompt once, as in Prefix Grouper
(Liu et al. 2025, arXiv 2506.05433).

`attend` is registered with the attention interface of transformers under its own name, and receives the sequences as an
argument of the model's forward. On a GPU in half precision one kernel attends within all sequences. Elsewhere, and for
head sizes that the kernel does not support, sequences of similar lengths are padded and go through SDPA together.

Shape suffixes: P tokens of the packed row, S tokens of all sequences, A attention heads, G heads of keys and values, D
head size; of sequences that are padded together: N sequences, T tokens of the longest.
"""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tba.trainer.batch.micro_batches import forward_passes
from tba.trainer.model.chunked_logprobs import compute_dtype

ATTENTION = "tba_packed"
# What torch's varlen_attn has to accept. The first release that does is 2.12.
_KERNEL_ARGUMENTS = frozenset({"scale", "window_size", "enable_gqa"})
_KERNEL_CAPABILITY = (8, 0)
_KERNEL_HEAD = 256
_KERNEL_HEAD_STEP = 8
_HALF = (torch.bfloat16, torch.float16)
# What one more call of SDPA costs, in tokens.
_CALL_TOKENS = 64

# Arguments by which transformers asks for more than causal softmax(q k) v: sinks, capped scores, biases by position,
# selected blocks and tokens.
_UNSUPPORTED = ("s_aux", "softcap", "position_bias", "block_indices", "indices")


@dataclass(frozen=True)
class Sequences:
    """The sequences of a packed row: where the tokens of each are in it. Every token is part of at least one."""

    places: Sequence[NDArray[np.int64]]
    device: torch.device

    @cached_property
    def lengths(self) -> list[int]:
        return list(map(len, self.places))

    @cached_property
    def bounds(self) -> Tensor:
        """The boundaries of the sequences among the tokens of all: int32, one more than there are sequences."""
        return torch.from_numpy(np.cumsum([0, *self.lengths], dtype=np.int32)).to(self.device)

    @cached_property
    def place_S(self) -> Tensor:
        """The place of each token of the sequences in the packed row."""
        return torch.from_numpy(np.concatenate(self.places)).to(self.device)

    @cached_property
    def first_P(self) -> Tensor:
        """The first of the sequences' tokens that is each token of the packed row."""
        return self._first(np.concatenate(self.places), np.arange(sum(self.lengths)))

    @cached_property
    def padded(self) -> tuple[list[Tensor], Tensor]:
        """Sequences of similar lengths: their `place_S`, [N, T], padded on the right with 0; and their `first_P`, in
        the flattened [N, T] of all of them."""
        parts, places, numbers, end = [], [], [], 0
        for part in forward_passes(self.lengths, _CALL_TOKENS):
            width = max(self.lengths[n] for n in part)
            place_NT = np.zeros((len(part), width), np.int64)
            for row, n in enumerate(part):
                place_NT[row, : self.lengths[n]] = self.places[n]
                places.append(self.places[n])
                numbers.append(end + np.arange(self.lengths[n]))
                end += width
            parts.append(torch.from_numpy(place_NT).to(self.device))
        return parts, self._first(np.concatenate(places), np.concatenate(numbers))

    def _first(self, places: NDArray[np.int64], numbers: NDArray[np.int64]) -> Tensor:
        _, first = np.unique(places, return_index=True)
        return torch.from_numpy(numbers[first]).to(self.device)


def has_kernel(device: str, heads: Collection[int], *, half: bool) -> bool:
    """Whether one kernel can attend within all sequences, for heads of these sizes of queries, keys and values."""
    return (
        device == "cuda"
        and torch.version.hip is None
        and half
        and len(set(heads)) == 1
        and all(head <= _KERNEL_HEAD and head % _KERNEL_HEAD_STEP == 0 for head in heads)
        and torch.cuda.get_device_capability() >= _KERNEL_CAPABILITY
        and torch_has_kernel()
    )


@cache
def torch_has_kernel() -> bool:
    """Whether this torch has the kernel, by the arguments that it accepts: builds of vendors have other versions."""
    try:
        # Imported here because it loads torch's compiler, which takes seconds and is not needed on a CPU.
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return inspect.signature(varlen_attn).parameters.keys() >= _KERNEL_ARGUMENTS


def attend(
    module: nn.Module,  # noqa: ARG001 - the interface of transformers
    query_NATD: Tensor,
    key_NGTD: Tensor,
    value_NGTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequences: Sequences | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence: [N, T, A, D]. Without `sequences` each row is one.

    Raises NotImplementedError if the model asks for more than that.
    """
    assert attention_mask is None, "transformers makes no mask for an attention that registers no mask function"
    assert query_NATD.shape[2] == key_NGTD.shape[2], "packed attention is for training, without a KV cache"
    if asked := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise NotImplementedError(f"its attention uses {asked[0]}, which packed attention does not support")
    tensors = query_NATD, key_NGTD, value_NGTD
    if sequences is None:
        return _causal(*tensors, scaling, sliding_window).transpose(1, 2).contiguous(), None
    # Autocast leaves rotated queries and keys in float32, which the kernel rejects.
    dtype, heads = compute_dtype(query_NATD, query_NATD), [tensor.shape[-1] for tensor in tensors]
    if has_kernel(query_NATD.device.type, heads, half=dtype in _HALF):
        query, key, value = (tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in tensors)
        return _kernel(query, key, value, sequences, scaling, sliding_window)[None], None
    parts, first_P = sequences.padded
    attended = []
    for place_NT in parts:
        query, key, value = (_gathered(tensor, place_NT) for tensor in tensors)
        attended.append(_causal(query, key, value, scaling, sliding_window).transpose(1, 2).flatten(0, 1))
    return torch.cat(attended).index_select(0, first_P)[None], None


def _kernel(
    query_PAD: Tensor,
    key_PGD: Tensor,
    value_PGD: Tensor,
    sequences: Sequences,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend within all sequences with one kernel: [P, A, D]."""
    from torch.nn.attention.varlen import varlen_attn

    query_SAD, key_SGD, value_SGD = (one.index_select(0, sequences.place_S) for one in (query_PAD, key_PGD, value_PGD))
    longest = max(sequences.lengths)
    attended_SAD = varlen_attn(
        query_SAD,
        key_SGD,
        value_SGD,
        sequences.bounds,
        sequences.bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_PAD.shape[1] != key_PGD.shape[1],
    )
    # For mypy: with other arguments the kernel returns a tuple.
    assert isinstance(attended_SAD, Tensor)
    return attended_SAD.index_select(0, sequences.first_P)


def _gathered(tensor_1HPD: Tensor, place_NT: Tensor) -> Tensor:
    """Return the tokens at some places: [N, H, T, D]."""
    _, heads, _, width = tensor_1HPD.shape
    # index_select, whose backward pass on a CPU adds in a fixed order.
    gathered_HSD = tensor_1HPD[0].index_select(1, place_NT.flatten())
    return gathered_HSD.view(heads, *place_NT.shape, width).transpose(0, 1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Attend causally: [N, A, T, D]. A `window` includes the token itself and the `window` - 1 tokens before it."""
    length = query.shape[2]
    mask = None
    if window is not None and window < length:
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = seen.tril_().triu_(1 - window)
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


AttentionInterface.register(ATTENTION, attend)
