"""A mixture of experts, which vLLM packs on a CPU and keeps as it is on a GPU.

In a file of its own: it needs separate process groups.
"""

import numpy as np
import pytest
import torch

from tba.common.errors import CanaryMismatch, ConfigError
from tba.tests.helpers.architectures import random_model
from tba.tests.runner import size
from tba.tests.vllm.conftest import addresses, cpu_backend

pytest.importorskip("vllm", reason="vLLM is not installed")


def mixture(seed, family="qwen3_moe"):
    return random_model(family, seed).float().eval()


@cpu_backend
@pytest.mark.parametrize("family", size(["mixtral", "qwen2_moe"], ["mixtral", "qwen2_moe", "qwen3_moe"]))
def test_packed_experts_are_reloaded_and_packed_again(lab, family):
    old, new = (mixture(seed, family) for seed in (1, 2))
    engine = lab.engine(old)
    before = addresses(engine)
    for model in (new, old, new):
        assert engine.load_weights(lab.snapshot(model)).way == "reload"
        assert addresses(engine) == before
        lab.assert_serves(engine, model)
    with pytest.raises(CanaryMismatch):
        engine.load_weights(lab.snapshot(old, canary_error=3.0))
    lab.assert_serves(engine, new)
    engine.close()


@cpu_backend
def test_without_packing_again_vllms_reload_corrupts_experts_and_the_engine_refuses_to_start(lab, monkeypatch):
    """vLLM's own fault (0.32.0). When this test fails, `_forget_packed_experts` can go."""
    from tba.searcher.engines.vllm import worker

    monkeypatch.setattr(worker, "_forget_packed_experts", lambda _: None)
    with pytest.raises(ConfigError, match=r"not reload: .*experts.*w13_weight"):
        lab.engine(mixture(1))


@cpu_backend
def test_experts_that_keep_the_layout_they_are_loaded_in_are_swapped_in_place(lab, monkeypatch):
    """As vLLM's Triton kernel keeps them on a GPU; here a kernel written in torch stands for it."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, **_):
        output.zero_()
        for expert in range(len(w1)):
            token, place = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = (hidden_states[token] @ w1[expert].T).chunk(2, dim=-1)
            values = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
            output.index_add_(0, token, values * topk_weights[token, place, None].to(values.dtype))

    experts = cpu_moe.CPUUnquantizedExperts
    monkeypatch.setattr(experts, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(experts, "apply", apply)
    old, new = (mixture(seed) for seed in (1, 2))
    engine = lab.engine(old)
    before = addresses(engine)
    for model in (new, old):
        assert engine.load_weights(lab.snapshot(model)).way == "in place"
        assert addresses(engine) == before
        lab.assert_serves(engine, model)
    ids = lab.tokens(3, 40)
    assert np.abs(engine.score([ids])[0] - lab.logprobs(new, ids)).max() > 0.1
    engine.close()
