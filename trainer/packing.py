"""Rows packed: the sequences of a pass one after another in a single row, with nothing between them.

    tokens      a a a a b b c c c
    positions   0 1 2 3 0 1 0 1 2
    boundaries  0       4   6     9

Whatever a model does token by token does not notice. Attention must not cross a boundary: it goes through the interface
of transformers, under a name of our own, and gets the boundaries as transformers' flash attention does. On a GPU in
half precision that is one kernel for all sequences, elsewhere each sequence by itself through SDPA.

Shape suffixes: P tokens of all sequences, A attention heads, G heads of keys and values, D head size.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from tba.common.errors import ConfigError
from tba.common.log import get_logger
from tba.trainer.batch import Layout, Row

log = get_logger(__name__)

ATTENTION = "tba_packed"
# The first torch whose varlen_attn takes grouped heads and a window.
_KERNEL_TORCH = "2.13"
_KERNEL_CAPABILITY = (8, 0)
_KERNEL_HEAD = 256
_HALF = (torch.bfloat16, torch.float16)
_TOLERANCE = 1e-3


def pack(rows: Sequence[Row], device: torch.device) -> Layout:
    """Rows as one, with what the model's forward has to be told of it."""
    boundaries = np.cumsum([0, *(row.tokens for row in rows)], dtype=np.int32)
    starts = boundaries[:-1].tolist()
    tokens = np.concatenate([ids for row in rows for ids in (row.prompt_ids, row.response_ids)]).astype(np.int64)
    firsts = [start + len(row.prompt_ids) - 1 for start, row in zip(starts, rows, strict=True)]
    sources = [np.arange(first, first + len(row.response_ids)) for first, row in zip(firsts, rows, strict=True)]
    return Layout(
        tokens_NT=torch.from_numpy(tokens)[None].to(device),
        source_R=torch.from_numpy(np.concatenate(sources)).to(device),
        starts=starts,
        prompt_lengths=[len(row.prompt_ids) for row in rows],
        lengths=[len(row.response_ids) for row in rows],
        told=_told(boundaries, device),
    )


def _told(boundaries: np.ndarray[Any, np.dtype[np.int32]], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a model's forward, made once for all of its layers."""
    lengths = np.diff(boundaries)
    positions = np.concatenate([np.arange(length) for length in lengths])
    on_device = torch.from_numpy(boundaries).to(device)
    longest = int(lengths.max())
    return {
        "position_ids": torch.from_numpy(positions)[None].to(device),
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packs(packing: Literal["auto", "packed", "padded"], model: PreTrainedModel, device: str, *, half: bool) -> bool:
    """Whether passes over a model are packed, as `train.packing` says; `device` and `half` are where it will compute,
    and whether in 16 bits. Raises ConfigError if they should be and cannot.
    """
    if packing == "padded" or (packing == "auto" and device == "cpu"):
        return False
    reason = obstacle(model)
    if packing == "auto" and not reason and not _has_kernel(device, _head_size(model), half=half):
        reason = "one kernel for all takes bfloat16, heads of at most 256, torch 2.13 and a GPU since Ampere"
    if reason and packing == "packed":
        raise ConfigError(f'train.packing = "packed", but {reason}: set it to "auto" or "padded"')
    if reason:
        log.info("rows are padded", reason=reason)
    return not reason


def _head_size(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def _has_kernel(device: str, head: int, *, half: bool) -> bool:
    """Whether there is one kernel for all sequences, for heads of this size."""
    return (
        device == "cuda"
        and half
        and head <= _KERNEL_HEAD
        and torch.__version__ >= _KERNEL_TORCH
        and torch.cuda.get_device_capability() >= _KERNEL_CAPABILITY
    )


@torch.no_grad()
def obstacle(model: PreTrainedModel) -> str:
    """Why rows of this model cannot be packed; empty if they can. The model is tried out, and stays as it was.

    A model that flash attention serves says all of its attention by arguments, and nothing by masks that nobody makes
    here. What else passes from token to token, a recurrent state say, shows when two sequences are packed.
    """
    name = type(model).__name__
    if not (model._supports_flash_attn and model._supports_attention_backend):
        return f"{name} does not leave its attention to others"
    before = model.config._attn_implementation
    tokens_1P = torch.arange(12, device=model.device)[None] % model.config.get_text_config().vocab_size
    alone = [_hidden(model, part) for part in torch.split(tokens_1P, [5, 7], dim=1)]
    model.set_attn_implementation(ATTENTION)
    try:
        packed = _hidden(model, tokens_1P, **_told(np.array([0, 5, 12], np.int32), model.device))
    finally:
        model.set_attn_implementation(before)
    same = torch.allclose(packed, torch.cat(alone, dim=1), atol=_TOLERANCE, rtol=_TOLERANCE)
    return "" if same else f"in {name} a sequence notices the ones that are packed before it"


def _hidden(model: PreTrainedModel, tokens_NT: Tensor, **told: Any) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=tokens_NT, use_cache=False, **told).last_hidden_state
    return hidden


def attend(
    module: nn.Module,  # noqa: ARG001 - the interface of transformers
    query_NATD: Tensor,
    key_NGTD: Tensor,
    value_NGTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, [N, T, A, D]. Without boundaries each row is a sequence."""
    assert attention_mask is None, "transformers makes no mask for an attention that has registered none"
    tensors = query_NATD, key_NGTD, value_NGTD
    dtype, device = _compute_dtype(query_NATD), query_NATD.device.type
    if cu_seq_lens_q is not None and _has_kernel(device, query_NATD.shape[-1], half=dtype in _HALF):
        query, key, value = (tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in tensors)
        return _kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window).unsqueeze(0), None
    lengths = [query_NATD.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    sequences = zip(*(torch.split(tensor, lengths, dim=2) for tensor in tensors), strict=True)
    attended = [_causal(query, key, value, scaling, sliding_window) for query, key, value in sequences]
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


def _compute_dtype(query: Tensor) -> torch.dtype:
    """Rotated queries and keys come in float32 under autocast, which does not know the kernel."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _kernel(
    query_PAD: Tensor,
    key_PGD: Tensor,
    value_PGD: Tensor,
    boundaries: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """[P, A, D]: all sequences at once."""
    # Not at the top: it loads torch's compiler, seconds that a CPU has no use for.
    from torch.nn.attention.varlen import varlen_attn

    attended_PAD = varlen_attn(
        query_PAD,
        key_PGD,
        value_PGD,
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_PAD.shape[1] != key_PGD.shape[1],
    )
    assert isinstance(attended_PAD, Tensor)  # nothing else was asked for
    return attended_PAD


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """[N, A, T, D]; a token sees itself and `window` - 1 before it, or all before it."""
    length = query.shape[2]
    mask = None
    if window is not None and window < length:
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = seen.tril_().triu_(1 - window)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


AttentionInterface.register(ATTENTION, attend)
