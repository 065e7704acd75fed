"""Packed rows on a GPU: one kernel for all sequences, in bfloat16."""

import pytest
import torch
from torch.nn.attention import varlen
from transformers import MistralConfig, MistralForCausalLM

from tba.common.config import TrainSection
from tba.common.devices import list_gpus
from tba.tests.unit.tb_lab import make_batch, make_row, objective
from tba.trainer.packing import packs
from tba.trainer.step import Learner

pytestmark = pytest.mark.skipif(not list_gpus(), reason="this machine has no GPU")

VOCABULARY = 512


def make_model(window: int) -> MistralForCausalLM:
    """Grouped heads of 64, as models in use have them, and a window that is shorter than some sequences."""
    torch.manual_seed(0)
    shape = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, sliding_window=window, max_position_embeddings=1024,
    )  # fmt: skip
    return MistralForCausalLM(shape)


def gpu_batch():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(4):
        prompt = torch.randint(VOCABULARY, (30,), generator=generator).numpy()
        for length in (1, 40, 150, 500):
            response = torch.randint(VOCABULARY, (length,), generator=generator).numpy()
            rows.append(make_row(len(rows), prompt, response))
    return make_batch(rows, [[0.0, 1.0, 0.5, 0.2]] * 4, reference=[[-6.0, -240.0, -930.0, -3100.0]] * 4)


def gradient(packing: str, device: str, *, window: int, **keys) -> torch.Tensor:
    """Of the loss of a batch, all parameters in a row: in bfloat16 on the GPU, in float64 on the CPU."""
    model = make_model(window).to(device)
    model = model if device == "cuda" else model.double()
    config = TrainSection(packing=packing, **keys)
    learner = Learner(model, None, config, objective("rloo"), autocast=device == "cuda")
    batch = gpu_batch()
    learner.accumulate(batch, batch.reference_BK, 0.01)
    return torch.cat([parameter.grad.flatten().cpu().double() for parameter in model.parameters()])


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of a gradient, in parts of its norm."""
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("window", [100, 1024])
@pytest.mark.parametrize("keys", [{}, {"micro_batch_tokens": 1}, {"gradient_checkpointing": True}])
def test_the_gradient_of_packed_rows_is_as_exact_as_that_of_padded_ones(monkeypatch, window, keys):
    calls, kernel = [], varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs))
    exact = gradient("padded", "cpu", window=window)
    padded = gradient("padded", "cuda", window=window, **keys)
    assert not calls
    packed = gradient("packed", "cuda", window=window, **keys)
    assert calls
    assert error(packed, exact) < 1.5 * error(padded, exact) < 0.1


def test_in_bfloat16_rows_are_packed_unless_told_otherwise():
    model = make_model(100).cuda()
    assert packs("auto", model, "cuda", half=True)
    assert not packs("auto", model, "cuda", half=False)
