"""Packing: the sequences of a forward pass concatenated into a single row, without padding.

    tokens      a a a a b b c c c
    positions   0 1 2 3 0 1 0 1 2
    boundaries  0       4   6     9

Operations on single tokens are not affected. Attention must not cross a boundary. It is registered with the attention
interface of transformers under its own name, and receives the boundaries as transformers' flash attention does. On a
GPU in half precision one kernel attends within all sequences. Elsewhere, and for head sizes that the kernel does not
support, each sequence goes through SDPA by itself.

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
from tba.common.system.load_errors import out_of_memory
from tba.trainer.batch.batch import Layout, Row
from tba.trainer.model.chunked_logprobs import compute_dtype

log = get_logger(__name__)

ATTENTION = "tba_packed"
# The first torch whose varlen_attn supports grouped heads and a window.
_KERNEL_TORCH = "2.13"
_KERNEL_CAPABILITY = (8, 0)
_KERNEL_HEAD = 256
_KERNEL_HEAD_STEP = 8
_HALF = (torch.bfloat16, torch.float16)
_TOLERANCE = 1e-3

# Arguments by which transformers asks for more than causal softmax(q k) v: sinks, capped scores, biases by position,
# selected blocks and tokens.
_UNSUPPORTED = ("s_aux", "softcap", "position_bias", "block_indices", "indices")


def pack(rows: Sequence[Row], device: torch.device) -> Layout:
    """Concatenate rows into one."""
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
        model_kwargs=_model_kwargs(boundaries, device),
    )


def _model_kwargs(boundaries: np.ndarray[Any, np.dtype[np.int32]], device: torch.device) -> dict[str, Any]:
    """Return keyword arguments of a model's forward, computed once for all of its layers."""
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
    """Decide whether forward passes over a model are packed. `packing` is `train.packing`.

    `device` is where the model will compute, `half` whether in 16 bits. The model has float32 weights, since the trial
    tells a wrong result from rounding. Raises ConfigError if packing is required but not possible.
    """
    if packing == "padded" or (packing == "auto" and device == "cpu"):
        return False
    # The trial runs where the model is now; FSDP moves it to the GPU later.
    reason = obstacle(model, half=half and model.device.type == device)
    if packing == "auto" and not reason and not _has_kernel(device, _head_sizes(model), half=half):
        reason = (
            "the packed attention kernel needs bfloat16, heads of one size, at most 256 and a multiple of 8, "
            "torch 2.13 and an NVIDIA GPU since Ampere"
        )
    if reason and packing == "packed":
        raise ConfigError(f'train.packing = "packed", but {reason}: set it to "auto" or "padded"')
    if reason:
        log.info("rows are padded", reason=reason)
    return not reason


def _head_sizes(model: PreTrainedModel) -> set[int]:
    """Return the head sizes of queries, keys and values that the model's configuration names.

    `attend` decides by the actual sizes, so a size that is missed here costs only speed.
    """
    config = model.config.get_text_config()
    named = {getattr(config, name, None) for name in ("head_dim", "qk_head_dim", "v_head_dim", "global_head_dim")}
    return {int(size) for size in named if size} or {config.hidden_size // config.num_attention_heads}


def _has_kernel(device: str, heads: Collection[int], *, half: bool) -> bool:
    """Whether one kernel can attend within all sequences, for heads of these sizes of queries, keys and values."""
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
    """Return why rows of this model cannot be packed, or "" if they can. Tries it out; the model is unchanged after.

    A model that supports flash attention describes its attention by arguments alone, not by masks, which packing does
    not make. Anything else that passes from token to token, for example a recurrent state, shows when two packed
    sequences are compared with each by itself. `half` also tries bfloat16, which may use another kernel.
    """
    name = type(model).__name__
    if not (model._supports_flash_attn and model._supports_attention_backend):
        return f"{name} does not support other attention implementations"
    if moving := sorted(kind for kind in _rope_types(model) if "dynamic" in kind or kind == "longrope"):
        return f"in {name} the longest sequence of a pass changes the rotation of all of them (RoPE {moving[0]})"
    try:
        independent = _sequences_are_independent(model, half=half)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        if out_of_memory(error):
            raise
        return f"{name} does not run on packed rows: {first_line(error)}"
    return "" if independent else f"in {name} a sequence is affected by those that are packed before it"


def _rope_types(model: PreTrainedModel) -> Iterator[str]:
    """Yield the RoPE types of a model's modules, each of which has one, or one per kind of layer."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        yield from map(str, kinds.values() if isinstance(kinds, dict) else [kinds])


@torch.no_grad()
def _sequences_are_independent(model: PreTrainedModel, *, half: bool) -> bool:
    """Whether two packed sequences give the same results as each by itself, in the model's type.

    `half` also runs bfloat16, without comparing: this shows only whether its kernel runs.
    """
    before = model.config._attn_implementation
    tokens_1P = torch.arange(12, device=model.device)[None] % model.config.get_text_config().vocab_size
    alone = [_hidden(model, part) for part in torch.split(tokens_1P, [5, 7], dim=1)]
    kwargs = _model_kwargs(np.array([0, 5, 12], np.int32), model.device)
    model.set_attn_implementation(ATTENTION)
    try:
        packed = _hidden(model, tokens_1P, **kwargs)
        if half:
            with torch.autocast(model.device.type, torch.bfloat16):
                _hidden(model, tokens_1P, **kwargs)
    finally:
        model.set_attn_implementation(before)
    return torch.allclose(packed, torch.cat(alone, dim=1), atol=_TOLERANCE, rtol=_TOLERANCE)


def _hidden(model: PreTrainedModel, tokens_NT: Tensor, **kwargs: Any) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=tokens_NT, use_cache=False, **kwargs).last_hidden_state
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
    """Compute causal attention within each sequence: [N, T, A, D]. Without boundaries each row is one sequence.

    Raises NotImplementedError if the model asks for more than that.
    """
    assert attention_mask is None, "transformers makes no mask for an attention that registers no mask function"
    if asked := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise NotImplementedError(f"its attention uses {asked[0]}, which packed attention does not support")
    tensors = query_NATD, key_NGTD, value_NGTD
    # Autocast leaves rotated queries and keys in float32, which the kernel rejects.
    dtype, device = compute_dtype(query_NATD, query_NATD), query_NATD.device.type
    heads = [tensor.shape[-1] for tensor in tensors]
    if cu_seq_lens_q is not None and _has_kernel(device, heads, half=dtype in _HALF):
        query, key, value = (tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in tensors)
        return _kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window).unsqueeze(0), None
    lengths = [query_NATD.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    sequences = zip(*(torch.split(tensor, lengths, dim=2) for tensor in tensors), strict=True)
    attended = [_causal(query, key, value, scaling, sliding_window) for query, key, value in sequences]
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


def _kernel(
    query_PAD: Tensor,
    key_PGD: Tensor,
    value_PGD: Tensor,
    boundaries: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend within all sequences with one kernel: [P, A, D]."""
    # Imported here because it loads torch's compiler, which takes seconds and is not needed on a CPU.
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
    # For mypy: with other arguments the kernel returns a tuple.
    assert isinstance(attended_PAD, Tensor)
    return attended_PAD


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Attend causally: [N, A, T, D]. A `window` includes the token itself and the `window` - 1 tokens before it."""
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
