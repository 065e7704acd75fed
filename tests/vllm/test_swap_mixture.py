"""A mixture of experts, which vLLM processes after loading. An engine of its own process groups, hence a file."""

import numpy as np
import pytest
import torch

from tba.common.errors import EngineFaulty

pytest.importorskip("vllm", reason="vLLM is not installed")


def test_vllm_swaps_a_mixture_of_experts_wrongly_on_a_cpu_and_that_does_not_go_unnoticed(lab):
    """With vLLM 0.32.0 its own reload makes garbage of these experts, with new weights and with the old ones."""
    old, new = (mixture(seed) for seed in (1, 2))
    engine = lab.engine(old)
    assert "UnquantizedFusedMoEMethod" in engine.call("tba_start")[0]["reason"]
    ids = lab.tokens(3, 40)
    np.testing.assert_allclose(engine.score([ids])[0], lab.logprobs(old, ids), atol=1e-3)
    with pytest.raises(EngineFaulty, match=r"v0 could not be loaded back: .* differ by"):
        engine.load_weights(lab.snapshot(new))


def mixture(seed):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    special = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    shape = {"vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**shape, **heads, **special, max_position_embeddings=512, initializer_range=0.2)
    return Qwen3MoeForCausalLM(config).float().eval()
