"""Rows packed: the sequences of a pass one after another in a single row, with nothing between them.

    tokens      a a a a b b c c c
    positions   0 1 2 3 0 1 0 1 2
    boundaries  0       4   6     9

Whatever a model does token by token does not notice. Attention must not cross a boundary: it goes through the interface
of transformers, under a name of our own, and gets the boundaries as transformers' flash attention does. On a GPU in
half precision that is one kernel for all sequences, elsewhere, and for heads that the kernel does not take, each
sequence by itself through SDPA.

Shape suffixes: P tokens of all sequences, A attention heads, G heads of keys and values, D head size.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from tba.common.errors import ConfigError, first_line
from tba.common.log import get_logger
from tba.common.memory import out_of_memory
from tba.trainer.batch import Layout, Row

log = get_logger(__name__)

ATTENTION = "tba_packed"
# The first torch whose varlen_attn takes grouped heads and a window.
_KERNEL_TORCH = "2.13"
_KERNEL_CAPABILITY = (8, 0)
_KERNEL_HEAD = 256
_KERNEL_HEAD_STEP = 8
_HALF = (torch.bfloat16, torch.float16)
_TOLERANCE = 1e-3

# What transformers gives an attention that is more than softmax(q k) v over all tokens before: sinks, capped scores,
# biases by position, chosen blocks and tokens.
_NOT_HERE = ("s_aux", "softcap", "position_bias", "block_indices", "indices")


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
    # FSDP takes a model to the GPU later: it is tried out where it is.
    reason = obstacle(model, half=half and model.device.type == device)
    if packing == "auto" and not reason and not _has_kernel(device, _head_sizes(model), half=half):
        reason = (
            "one kernel for all takes bfloat16, heads of one size, at most 256 and a multiple of 8, torch 2.13 and an "
            "NVIDIA GPU since Ampere"
        )
    if reason and packing == "packed":
        raise ConfigError(f'train.packing = "packed", but {reason}: set it to "auto" or "padded"')
    if reason:
        log.info("rows are padded", reason=reason)
    return not reason


def _head_sizes(model: PreTrainedModel) -> set[int]:
    """Of queries, keys and values, as far as the configuration names them. `attend` goes by what it is given: a name
    that is missed here costs speed alone.
    """
    config = model.config.get_text_config()
    named = {getattr(config, name, None) for name in ("head_dim", "qk_head_dim", "v_head_dim", "global_head_dim")}
    return {int(size) for size in named if size} or {config.hidden_size // config.num_attention_heads}


def _has_kernel(device: str, heads: Collection[int], *, half: bool) -> bool:
    """Whether there is one kernel for all sequences, for queries, keys and values with heads of these sizes."""
    return (
        device == "cuda"
        and torch.version.hip is None
        and half
        and len(set(heads)) == 1
        and all(head <= _KERNEL_HEAD and head % _KERNEL_HEAD_STEP == 0 for head in heads)
        and torch.__version__ >= _KERNEL_TORCH
        and torch.cuda.get_device_capability() >= _KERNEL_CAPABILITY
    )


def obstacle(model: PreTrainedModel, *, half: bool = False) -> str:
    """Why rows of this model cannot be packed; empty if they can. The model is tried out, and stays as it was.

    A model that flash attention serves says all of its attention by arguments, and nothing by masks that nobody makes
    here. What else passes from token to token, a recurrent state say, shows when two sequences are packed. `half` tries
    it in bfloat16 too, where another kernel may serve.
    """
    name = type(model).__name__
    if not (model._supports_flash_attn and model._supports_attention_backend):
        return f"{name} does not leave its attention to others"
    if moving := sorted(kind for kind in _rope_types(model) if "dynamic" in kind or kind == "longrope"):
        return f"the longest sequence of a pass decides how {name} rotates all of them (RoPE {moving[0]})"
    try:
        same = _keeps_apart(model, half=half)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        if out_of_memory(error):
            raise
        return f"{name} does not run on packed rows: {first_line(error)}"
    return "" if same else f"in {name} a sequence notices the ones that are packed before it"


def _rope_types(model: PreTrainedModel) -> Iterator[str]:
    """As transformers' modules have them: one, or one for each kind of layer."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        yield from map(str, kinds.values() if isinstance(kinds, dict) else [kinds])


@torch.no_grad()
def _keeps_apart(model: PreTrainedModel, *, half: bool) -> bool:
    """Whether two packed sequences give what each gives alone. `half` has bfloat16 run too, which proves no more."""
    before = model.config._attn_implementation
    tokens_1P = torch.arange(12, device=model.device)[None] % model.config.get_text_config().vocab_size
    alone = [_hidden(model, part) for part in torch.split(tokens_1P, [5, 7], dim=1)]
    told = _told(np.array([0, 5, 12], np.int32), model.device)
    model.set_attn_implementation(ATTENTION)
    try:
        packed = _hidden(model, tokens_1P, **told)
        if half:
            with torch.autocast(model.device.type, torch.bfloat16):
                _hidden(model, tokens_1P, **told)
    finally:
        model.set_attn_implementation(before)
    return torch.allclose(packed, torch.cat(alone, dim=1), atol=_TOLERANCE, rtol=_TOLERANCE)


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
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, [N, T, A, D]. Without boundaries each row is a sequence.

    Raises NotImplementedError if a model asks for more than that.
    """
    assert attention_mask is None, "transformers makes no mask for an attention that has registered none"
    if asked := [name for name in _NOT_HERE if others.get(name) is not None]:
        raise NotImplementedError(f"its attention takes {asked[0]}, which attention over packed rows does not have")
    tensors = query_NATD, key_NGTD, value_NGTD
    dtype, device = _compute_dtype(query_NATD), query_NATD.device.type
    heads = [tensor.shape[-1] for tensor in tensors]
    if cu_seq_lens_q is not None and _has_kernel(device, heads, half=dtype in _HALF):
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
