"""Attention within the segments of a packed row, several of which may continue the same prompt.

    tokens      p p p p a a b b b c c c      a prompt p with its responses a and b, then a sequence c by itself
    segments    |       |   |     |    |
    keys        p p p p|p p p p a a|p p p p b b b|c c c

Each segment attends causally to its keys, the last of which are its own tokens. Only attention sees a shared prompt
once per response: its keys and values are gathered for each, and all else in the model computes it once (Prefix
Grouper, Liu et al. 2025, arXiv 2506.05433).

`attend` is registered with the attention interface of transformers under its own name, and receives the segments as an
argument of the model's forward. On a GPU in half precision one kernel attends within all segments. Elsewhere, and for
head sizes that the kernel does not support, segments of similar lengths go through SDPA together.

Shape suffixes: P tokens, A attention heads, G heads of keys and values, D head size, K keys of all segments; in a
bucket of segments that SDPA computes together: N segments, Q queries and T keys of the longest.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tba.trainer.batch.micro_batches import forward_passes
from tba.trainer.model.chunked_logprobs import compute_dtype

ATTENTION = "tba_packed"
# The first torch whose varlen_attn supports grouped heads and a window.
_KERNEL_TORCH = "2.13"
_KERNEL_CAPABILITY = (8, 0)
_KERNEL_HEAD = 256
_KERNEL_HEAD_STEP = 8
_HALF = (torch.bfloat16, torch.float16)
# What one more call of SDPA costs, in keys.
_CALL_KEYS = 64

# Arguments by which transformers asks for more than causal softmax(q k) v: sinks, capped scores, biases by position,
# selected blocks and tokens.
_UNSUPPORTED = ("s_aux", "softcap", "position_bias", "block_indices", "indices")


class Bucket(NamedTuple):
    """Segments that SDPA computes together, padded.

    `query_NQ` and `key_NT` are positions in the packed tokens. `place_P` are the positions of the bucket's tokens in
    the packed tokens, `filled_P` those in the flattened `query_NQ`. `seen_NQT` is the attention mask, None if attention
    is plainly causal.
    """

    query_NQ: Tensor
    key_NT: Tensor
    place_P: Tensor
    filled_P: Tensor
    seen_NQT: Tensor | None


@dataclass(frozen=True)
class Segments:
    """The segments of a packed row. `starts` and `queries` are first token and length of each, in the order of the
    tokens; `prompts` are first token and length of the prompt that it continues, length 0 if none."""

    starts: Sequence[int]
    queries: Sequence[int]
    prompts: Sequence[tuple[int, int]]
    device: torch.device

    @property
    def shared(self) -> bool:
        """Whether any segment continues a prompt."""
        return any(length for _, length in self.prompts)

    @cached_property
    def keys(self) -> list[int]:
        """The number of keys of each segment."""
        return [length + queries for queries, (_, length) in zip(self.queries, self.prompts, strict=True)]

    @cached_property
    def key_source_K(self) -> Tensor:
        """The positions of all keys in the packed tokens."""
        return torch.from_numpy(np.concatenate([self._key_positions(n) for n in range(len(self.starts))])).to(
            self.device
        )

    @cached_property
    def query_bounds(self) -> Tensor:
        """The boundaries of the segments among the tokens: int32, one more than there are segments."""
        return _bounds(self.queries, self.device)

    @cached_property
    def key_bounds(self) -> Tensor:
        """The boundaries of the segments among all keys."""
        return _bounds(self.keys, self.device)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The segments by similar numbers of keys; those that continue a prompt apart from the others."""
        kinds = [
            [n for n, (_, length) in enumerate(self.prompts) if bool(length) == shared] for shared in (False, True)
        ]
        return [
            self._bucket([kind[n] for n in part])
            for kind in kinds
            for part in forward_passes([self.keys[n] for n in kind], _CALL_KEYS)
        ]

    @cached_property
    def order_P(self) -> Tensor:
        """The position of each packed token among the tokens of all buckets."""
        return torch.argsort(torch.cat([bucket.place_P for bucket in self.buckets]))

    def _key_positions(self, segment: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        (first, length), start = self.prompts[segment], self.starts[segment]
        return np.concatenate([np.arange(first, first + length), np.arange(start, start + self.queries[segment])])

    def _bucket(self, segments: Sequence[int]) -> Bucket:
        """Align queries and keys on the right, so that one causal mask serves all segments that continue a prompt;
        on the left if none does: padding then comes after everything that counts."""
        left = not self.prompts[segments[0]][1]
        keys = [self._key_positions(n) for n in segments]
        queries = [positions[len(positions) - self.queries[n] :] for n, positions in zip(segments, keys, strict=True)]
        (query_NQ, own_NQ), (key_NT, real_NT) = (_aligned(rows, left=left) for rows in (queries, keys))
        seen_NQT = None
        if not left:
            length, width = query_NQ.shape[1], key_NT.shape[1]
            causal_QT = np.tri(length, width, width - length, dtype=bool)
            # A padded query sees all that comes before it: without any key its result would be NaN.
            seen_NQT = causal_QT & (real_NT[:, None, :] | ~own_NQ[:, :, None])
        return Bucket(
            query_NQ=torch.from_numpy(query_NQ).to(self.device),
            key_NT=torch.from_numpy(key_NT).to(self.device),
            place_P=torch.from_numpy(query_NQ[own_NQ]).to(self.device),
            filled_P=torch.from_numpy(np.flatnonzero(own_NQ)).to(self.device),
            seen_NQT=None if seen_NQT is None else torch.from_numpy(seen_NQT).to(self.device),
        )


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)


def _aligned(
    rows: Sequence[np.ndarray[Any, np.dtype[np.int64]]], *, left: bool
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Return rows padded with 0 to the same length, and which entries are not padding."""
    width = max(map(len, rows))
    values, real = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), bool)
    for n, row in enumerate(rows):
        part = slice(0, len(row)) if left else slice(width - len(row), width)
        values[n, part], real[n, part] = row, True
    return values, real


def has_kernel(device: str, heads: Collection[int], *, half: bool) -> bool:
    """Whether one kernel can attend within all segments, for heads of these sizes of queries, keys and values."""
    return (
        device == "cuda"
        and torch.version.hip is None
        and half
        and len(set(heads)) == 1
        and all(head <= _KERNEL_HEAD and head % _KERNEL_HEAD_STEP == 0 for head in heads)
        and torch.__version__ >= _KERNEL_TORCH
        and torch.cuda.get_device_capability() >= _KERNEL_CAPABILITY
    )


def attend(
    module: nn.Module,  # noqa: ARG001 - the interface of transformers
    query_NATD: Tensor,
    key_NGTD: Tensor,
    value_NGTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each segment: [N, T, A, D]. Without segments each row is one sequence.

    Raises NotImplementedError if the model asks for more than that.
    """
    assert attention_mask is None, "transformers makes no mask for an attention that registers no mask function"
    if asked := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise NotImplementedError(f"its attention uses {asked[0]}, which packed attention does not support")
    tensors = query_NATD, key_NGTD, value_NGTD
    if segments is None:
        return _sdpa(*tensors, None, scaling, sliding_window).transpose(1, 2).contiguous(), None
    # Autocast leaves rotated queries and keys in float32, which the kernel rejects.
    dtype, heads = compute_dtype(query_NATD, query_NATD), [tensor.shape[-1] for tensor in tensors]
    if has_kernel(query_NATD.device.type, heads, half=dtype in _HALF):
        query, key, value = (tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in tensors)
        return _kernel(query, key, value, segments, scaling, sliding_window).unsqueeze(0), None
    return _padded(*tensors, segments, scaling, sliding_window), None


@torch.no_grad()
def kernel_error(head: int, device: torch.device) -> float:
    """Return the largest difference of the kernel from SDPA in float32, on random numbers: about 0.01 in bfloat16, and
    about 1 if the kernel aligned its causal mask otherwise. `head` is the size of the heads."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 12, head, generator=generator).to(device) for heads in (4, 2, 2))
    segments = Segments([0, 3, 5, 9], [3, 2, 4, 3], [(0, 0), (0, 3), (0, 3), (0, 0)], device)
    expected = _padded(query, key, value, segments, None, None)
    query, key, value = (tensor.squeeze(0).transpose(0, 1).bfloat16() for tensor in (query, key, value))
    return float((_kernel(query, key, value, segments, None, None) - expected[0]).abs().max())


def _kernel(
    query_PAD: Tensor, key_PGD: Tensor, value_PGD: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    """Attend within all segments with one kernel: [P, A, D].

    Where a segment has more keys than queries, flash attention aligns the causal mask to the lower right, as needed
    (torch.nn.attention.bias.CausalVariant).
    """
    # Imported here because it loads torch's compiler, which takes seconds and is not needed on a CPU.
    from torch.nn.attention.varlen import varlen_attn

    if segments.shared:
        key_PGD, value_PGD = (tensor.index_select(0, segments.key_source_K) for tensor in (key_PGD, value_PGD))
    attended_PAD = varlen_attn(
        query_PAD,
        key_PGD,
        value_PGD,
        segments.query_bounds,
        segments.key_bounds,
        max(segments.queries),
        max(segments.keys),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_PAD.shape[1] != key_PGD.shape[1],
    )
    # For mypy: with other arguments the kernel returns a tuple.
    assert isinstance(attended_PAD, Tensor)
    return attended_PAD


def _padded(
    query_1APD: Tensor,
    key_1GPD: Tensor,
    value_1GPD: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend within the segments, bucket by bucket: [1, P, A, D]."""
    parts = [_attend_bucket(bucket, query_1APD, key_1GPD, value_1GPD, scaling, window) for bucket in segments.buckets]
    return torch.cat(parts).index_select(0, segments.order_P)[None]


def _attend_bucket(
    bucket: Bucket, query_1APD: Tensor, key_1GPD: Tensor, value_1GPD: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Attend within the segments of a bucket: its tokens, [P, A, D]."""
    query_NAQD = _gathered(query_1APD, bucket.query_NQ)
    key_NGTD, value_NGTD = (_gathered(tensor, bucket.key_NT) for tensor in (key_1GPD, value_1GPD))
    seen = None if bucket.seen_NQT is None else bucket.seen_NQT[:, None]
    attended_NAQD = _sdpa(query_NAQD, key_NGTD, value_NGTD, seen, scaling, window)
    return attended_NAQD.transpose(1, 2).flatten(0, 1).index_select(0, bucket.filled_P)


def _gathered(tensor_1HPD: Tensor, source_NT: Tensor) -> Tensor:
    """Return the tokens of some positions: [N, H, T, D]."""
    _, heads, _, width = tensor_1HPD.shape
    # index_select, whose backward pass on a CPU adds in a fixed order.
    gathered_HND = tensor_1HPD[0].index_select(1, source_NT.flatten())
    return gathered_HND.view(heads, *source_NT.shape, width).transpose(0, 1)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float | None, window: int | None
) -> Tensor:
    """Attend: [N, A, Q, D], causally if `seen` is None. A `window` includes the token itself and those before it."""
    length, width = query.shape[2], key.shape[2]
    if window is not None and window < width:
        near = torch.ones(length, width, dtype=torch.bool, device=query.device)
        near = near.triu_(width - length + 1 - window)
        seen = near.tril_(width - length) if seen is None else seen & near
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=seen,
        is_causal=seen is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


AttentionInterface.register(ATTENTION, attend)
