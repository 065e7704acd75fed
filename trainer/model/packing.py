"""Packing: the rows of a forward pass in a single row, without padding, and with a shared prompt only once.

    rows        p p p p a a, p p p p b b b, c c c d      prompts p and c with the responses a, b and d
    tokens      p p p p a b b c c c
    positions   0 1 2 3 4 4 5 0 1 2

The last token of a response predicts nothing that is used, and is left out. Operations on single tokens do not see a
difference; attention does (`tba.trainer.model.packed_attention`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.common.errors import ConfigError, first_line
from tba.common.log import get_logger
from tba.common.system.load_errors import out_of_memory
from tba.common.wire.trajectory import Int32
from tba.trainer.batch.batch import Layout, Row
from tba.trainer.model.packed_attention import ATTENTION, Segments, has_kernel, kernel_error

log = get_logger(__name__)

_TOLERANCE = 1e-3
# Of attention to random numbers in bfloat16, whose relative precision is 0.004. A wrong mask changes it by about 1.
_KERNEL_TOLERANCE = 0.1


@dataclass(slots=True)
class _PackedRow:
    """Grows segment by segment. `prompts` are first token and length of the prompt that each segment continues."""

    tokens: list[Int32] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    prompts: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0

    def add(self, ids: Int32, prompt: tuple[int, int] = (0, 0)) -> int:
        """Append a segment, if it has tokens. Returns where it starts."""
        start = self.length
        if len(ids):
            self.tokens.append(ids)
            self.starts.append(start)
            self.prompts.append(prompt)
            self.length += len(ids)
        return start

    def model_kwargs(self, device: torch.device) -> dict[str, Any]:
        """Return keyword arguments of a model's forward, computed once for all of its layers."""
        lengths = [len(ids) for ids in self.tokens]
        pairs = zip(self.prompts, lengths, strict=True)
        positions = np.concatenate([np.arange(before, before + length) for (_, before), length in pairs])
        return {
            "position_ids": torch.from_numpy(positions)[None].to(device),
            "segments": Segments(self.starts, lengths, self.prompts, device),
        }


def pack(rows: Sequence[Row], device: torch.device) -> Layout:
    """Concatenate rows into one, in which rows with the same prompt share its tokens."""
    packed = _PackedRow()
    starts, sources = [0] * len(rows), [np.zeros(0, np.int64)] * len(rows)
    for same in _by_prompt(rows):
        prompt = rows[same[0]].prompt_ids
        if len(same) == 1:
            start = packed.add(np.concatenate([prompt, rows[same[0]].response_ids[:-1]]))
            firsts = [start + len(prompt)]
        else:
            start = packed.add(prompt)
            firsts = [packed.add(rows[n].response_ids[:-1], (start, len(prompt))) for n in same]
        for n, first in zip(same, firsts, strict=True):
            starts[n] = start
            # The last token of the prompt predicts the first one of each response.
            length = len(rows[n].response_ids)
            sources[n] = np.array([start + len(prompt) - 1, *range(first, first + length - 1)])[:length]
    return Layout(
        tokens_NT=torch.from_numpy(np.concatenate(packed.tokens).astype(np.int64))[None].to(device),
        source_R=torch.from_numpy(np.concatenate(sources)).to(device),
        starts=starts,
        prompt_lengths=[len(row.prompt_ids) for row in rows],
        lengths=[len(row.response_ids) for row in rows],
        model_kwargs=packed.model_kwargs(device),
    )


def packed_length(rows: Sequence[Row]) -> int:
    """Return the number of tokens of the packed row."""
    prompts = sum(len(rows[same[0]].prompt_ids) for same in _by_prompt(rows))
    return prompts + sum(max(len(row.response_ids) - 1, 0) for row in rows)


def _by_prompt(rows: Sequence[Row]) -> Iterable[list[int]]:
    """Return the indices of the rows of each prompt, in the order of their first rows."""
    groups: dict[bytes, list[int]] = {}
    for n, row in enumerate(rows):
        groups.setdefault(row.prompt_ids.tobytes(), []).append(n)
    return groups.values()


def packs(packing: Literal["auto", "packed", "padded"], model: PreTrainedModel, device: str, *, half: bool) -> bool:
    """Decide whether forward passes over a model are packed. `packing` is `train.packing`.

    `device` is where the model will compute, `half` whether in 16 bits. The model has float32 weights, since the trial
    tells a wrong result from rounding. Raises ConfigError if packing is required but not possible.
    """
    if packing == "padded":
        return False
    # The trial runs where the model is now; FSDP moves it to the GPU later.
    reason = obstacle(model, half=half and model.device.type == device)
    on_gpu = packing == "auto" and device != "cpu"
    if on_gpu and not reason and not has_kernel(device, _head_sizes(model), half=half):
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


def obstacle(model: PreTrainedModel, *, half: bool = False) -> str:
    """Return why rows of this model cannot be packed, or "" if they can. Tries it out; the model is unchanged after.

    A model that supports flash attention describes its attention by arguments alone, not by masks, which packing does
    not make. Anything else that passes from token to token, for example a recurrent state, shows when two packed
    sequences are compared with each by itself. `half` also tries bfloat16, and the kernel that it may use.
    """
    name = type(model).__name__
    if not (model._supports_flash_attn and model._supports_attention_backend):
        return f"{name} does not support other attention implementations"
    if moving := sorted(kind for kind in _rope_types(model) if "dynamic" in kind or kind == "longrope"):
        return f"in {name} the longest sequence of a pass changes the rotation of all of them (RoPE {moving[0]})"
    heads = _head_sizes(model)
    try:
        independent = _sequences_are_independent(model, half=half)
        if half and has_kernel(model.device.type, heads, half=half):
            error = kernel_error(min(heads), model.device)
            if not error < _KERNEL_TOLERANCE:
                return f"the packed attention kernel of this torch differs from SDPA by {error:.2g}"
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
    """Whether packed rows, two of which share a prompt, give the same results as each by itself, in the model's type.

    `half` also runs bfloat16, without comparing: this shows only whether its kernel runs.
    """
    before = model.config._attn_implementation
    ids = np.arange(20, dtype=np.int32) % model.config.get_text_config().vocab_size
    texts = [(ids[:5], ids[5:9]), (ids[:5], ids[9:12]), (ids[12:17], ids[17:])]
    rows = [_row(prompt, response) for prompt, response in texts]
    alone = [
        _hidden(model, torch.from_numpy(np.concatenate(text))[None].to(model.device))[:, len(text[0]) - 1 : -1]
        for text in texts
    ]
    layout = pack(rows, model.device)
    model.set_attn_implementation(ATTENTION)
    try:
        packed = _hidden(model, layout.tokens_NT, **layout.model_kwargs)[:, layout.source_R]
        if half:
            with torch.autocast(model.device.type, torch.bfloat16):
                _hidden(model, layout.tokens_NT, **layout.model_kwargs)
    finally:
        model.set_attn_implementation(before)
    return torch.allclose(packed, torch.cat(alone, dim=1), atol=_TOLERANCE, rtol=_TOLERANCE)


def _row(prompt_ids: Int32, response_ids: Int32) -> Row:
    size = len(response_ids)
    return Row(0, prompt_ids, response_ids, np.zeros(size, np.float32), np.ones(size, np.uint8), on_policy=False)


def _hidden(model: PreTrainedModel, tokens_NT: Tensor, **kwargs: Any) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=tokens_NT, use_cache=False, **kwargs).last_hidden_state
    return hidden
