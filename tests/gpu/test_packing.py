"""Packed rows on a GPU: one attention kernel for all sequences, in bfloat16."""

from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from tba.common.config import TrainSection
from tba.tests.helpers.gpu_steps import error, flat
from tba.tests.helpers.trainer import learner_of, make_batch, make_row, objective
from tba.trainer.batch.batch import Row
from tba.trainer.model import packed_attention
from tba.trainer.model.packing import packs

VOCABULARY = 512


@pytest.fixture(autouse=True)
def kernel():
    """Skip the tests where the kernel is missing: rows are padded there."""
    if not packed_attention.torch_has_kernel():
        pytest.skip(f"torch {torch.__version__} lacks the packed attention kernel, which came with 2.12")
    if torch.cuda.get_device_capability() < packed_attention._KERNEL_CAPABILITY:
        pytest.skip("the packed attention kernel needs a GPU since Ampere")


def make_model(window: int) -> MistralForCausalLM:
    """Return a model with grouped heads of size 64 and a window that is shorter than some sequences."""
    torch.manual_seed(0)
    shape = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, sliding_window=window, max_position_embeddings=1024,
    )  # fmt: skip
    return MistralForCausalLM(shape)


def gpu_batch():
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for _ in range(4):
        prompt = torch.randint(VOCABULARY, (30,), generator=generator).numpy()
        for length in (1, 40, 150, 500):
            response = torch.randint(VOCABULARY, (length,), generator=generator).numpy()
            rows.append(make_row(len(rows), prompt, response))
    return make_batch(rows, [[0.0, 1.0, 0.5, 0.2]] * 4, reference=[[-6.0, -240.0, -930.0, -3100.0]] * 4)


def gradient(packing: Any, device: str, *, window: int, **keys) -> torch.Tensor:
    """Return the flattened gradient of a batch's loss: in bfloat16 on the GPU, in float64 on the CPU."""
    model = make_model(window).to(device)
    model = model if device == "cuda" else model.double()
    half = device == "cuda"
    packed = packs(packing, model, device, half=half)
    learner = learner_of(model, None, TrainSection(**keys), objective("rloo"), autocast=half, packed=packed)
    batch = gpu_batch()
    learner.accumulate(batch, batch.reference_BK, 0.01)
    return flat(parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize("window", [100, 1024])
@pytest.mark.parametrize("keys", [{}, {"micro_batch_tokens": 1}, {"gradient_checkpointing": True}])
def test_the_gradient_of_packed_rows_is_as_accurate_as_that_of_padded_ones(monkeypatch, window, keys):
    from torch.nn.attention import varlen

    calls, kernel = [], varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs))
    exact = gradient("padded", "cpu", window=window)
    padded = gradient("padded", "cuda", window=window, **keys)
    assert not calls
    packed = gradient("packed", "cuda", window=window, **keys)
    assert calls
    assert error(packed, exact) < 1.5 * error(padded, exact) < 0.1


def test_rows_are_packed_by_default_in_bfloat16():
    model = make_model(100).cuda()
    assert packs("auto", model, "cuda", half=True)
    assert not packs("auto", model, "cuda", half=False)
