"""Packing: the rows of a forward pass in a single row, without padding, and with a shared prompt only once.

    rows        p p p p a a, p p p p b b b, c c c d      prompts p and c with the responses a, b and d
    tokens      p p p p a b b c c c
    positions   0 1 2 3 4 4 5 0 1 2

The last token of a response predicts nothing that is used, and is left out. Operations on single tokens do not see a
difference; attention does (`tba.trainer.model.packed_attention`).
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from tba.common.errors import ConfigError, first_line
from tba.common.log import get_logger
from tba.common.rotation import Rotation
from tba.common.system.load_errors import out_of_memory
from tba.common.wire.trajectory import Int32
from tba.trainer.batch.batch import Layout, Row, plain_row
from tba.trainer.model.packed_attention import Sequences, attend, has_kernel

log = get_logger(__name__)

_TOLERANCE = 1e-3
# The name of the attention that the trial observes.
_TRIAL = "tba_packed_trial"


def pack(rows: Sequence[Row], device: torch.device) -> Layout:
    """Concatenate rows into one, in which rows with the same prompt share its tokens."""
    by_prompt: dict[bytes, list[int]] = {}
    for n, row in enumerate(rows):
        by_prompt.setdefault(row.prompt_ids.tobytes(), []).append(n)
    tokens: list[Int32] = []
    places = [np.zeros(0, np.int64)] * len(rows)
    end = 0
    for same in by_prompt.values():
        prompt = rows[same[0]].prompt_ids
        tokens.append(prompt)
        prompt_places, end = np.arange(end, end + len(prompt)), end + len(prompt)
        for n in same:
            # The last token of a response predicts nothing that is used.
            response = rows[n].response_ids[:-1]
            tokens.append(response)
            places[n] = np.concatenate([prompt_places, np.arange(end, end + len(response))])
            end += len(response)
    # The last token of the prompt predicts the first one of the response.
    sources = [at[len(row.prompt_ids) - 1 :][: len(row.response_ids)] for row, at in zip(rows, places, strict=True)]
    positions = np.zeros(end, np.int64)
    for where in places:
        positions[where] = np.arange(len(where))
    return Layout(
        tokens_NT=torch.from_numpy(np.concatenate(tokens).astype(np.int64))[None].to(device),
        source_R=torch.from_numpy(np.concatenate(sources)).to(device),
        starts=[int(where[0]) for where in places],
        prompt_lengths=[len(row.prompt_ids) for row in rows],
        lengths=[len(row.response_ids) for row in rows],
        # Computed once for all layers of the model.
        model_kwargs={
            "position_ids": torch.from_numpy(positions)[None].to(device),
            "sequences": Sequences(places, device),
        },
    )


def packs(packing: Literal["auto", "packed", "padded"], model: PreTrainedModel, device: str, *, half: bool) -> bool:
    """Decide whether forward passes over a model are packed. `packing` is `train.packing`.

    `device` is where the model will compute, `half` whether in 16 bits. The model has float32 weights, since the trial
    tells a wrong result from rounding. Raises ConfigError if packing is required but not possible.
    """
    if packing == "padded":
        return False
    # The trial runs where the model is now; FSDP moves it to the GPU later.
    reason = obstacle(model, half=half and model.device.type == device)
    if reason and packing == "packed":
        raise ConfigError(f'train.packing = "packed", but {reason}: set it to "auto" or "padded"')
    if not reason and device != "cpu" and not has_kernel(device, _head_sizes(model), half=half):
        needed = (
            "the packed attention kernel needs bfloat16, heads of one size, at most 256 and a multiple of 8, "
            "torch 2.12 and an NVIDIA GPU since Ampere"
        )
        if packing == "packed":
            # The results are right, and prompts are shared.
            log.warning("rows are packed without the kernel: attention pads them, which may be slow", reason=needed)
            return True
        reason = needed
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
    sequences are compared with each by itself. `half` also tries bfloat16, which may use another kernel.
    """
    name = type(model).__name__
    if not (model._supports_flash_attn and model._supports_attention_backend):
        return f"{name} does not support other attention implementations"
    if moving := Rotation.of(model.config).kind:
        return f"in {name} the longest sequence of a pass changes the rotation of all of them (RoPE {moving})"
    try:
        return _trial(model, half=half)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        if out_of_memory(error):
            raise
        return f"{name} does not run on packed rows: {first_line(error)}"


@torch.no_grad()
def _trial(model: PreTrainedModel, *, half: bool) -> str:
    """Return why packed rows, two of which share a prompt, do not give the results of each by itself, or "".

    They are compared in the model's type. `half` also runs bfloat16, without comparing: this shows only whether its
    kernel runs. The rows are shorter than most windows, so each layer's window is compared with the configuration.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    before = model.config._attn_implementation
    ids = np.arange(20, dtype=np.int32) % config.vocab_size
    texts = [(ids[:5], ids[5:9]), (ids[:5], ids[9:12]), (ids[12:17], ids[17:])]
    alone = [
        _hidden(model, torch.from_numpy(np.concatenate(text))[None].to(model.device))[:, len(text[0]) - 1 : -1]
        for text in texts
    ]
    layout = pack([plain_row(0, *text) for text in texts], model.device)
    windows = set()

    def observed(*tensors: Any, sliding_window: int | None = None, **others: Any) -> tuple[Tensor, None]:
        windows.add(sliding_window)
        return attend(*tensors, sliding_window=sliding_window, **others)

    AttentionInterface.register(_TRIAL, observed)
    model.set_attn_implementation(_TRIAL)
    try:
        packed = _hidden(model, layout.tokens_NT, **layout.model_kwargs)[:, layout.source_R]
        if half:
            with torch.autocast(model.device.type, torch.bfloat16):
                _hidden(model, layout.tokens_NT, **layout.model_kwargs)
    finally:
        model.set_attn_implementation(before)
    if (window := getattr(config, "sliding_window", None)) is not None and window not in windows:
        return f"{name} has its sliding window of {window} in a mask, which packed rows do not have"
    equal = torch.allclose(packed, torch.cat(alone, dim=1), atol=_TOLERANCE, rtol=_TOLERANCE)
    return "" if equal else f"in {name} a sequence is affected by those that are packed before it"


def _hidden(model: PreTrainedModel, tokens_NT: Tensor, **kwargs: Any) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=tokens_NT, use_cache=False, **kwargs).last_hidden_state
    return hidden
