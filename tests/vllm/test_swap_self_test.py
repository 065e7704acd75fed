"""An engine tests at its start how it loads weights: by what zeroed weights are afterwards, not by names of layers."""

import pytest
import torch

from tba.common.errors import ConfigError, EngineFaulty
from tba.tests.vllm.conftest import addresses, cpu_backend, worker_of

pytest.importorskip("vllm", reason="vLLM is not installed")


def dense_mla(seed):
    """Multi-head latent attention in dense layers, of the one size that vLLM's CPU kernel has: 512 + 64.

    Without rotary positions in the queries, for which vLLM 0.32.0 on a CPU and transformers differ.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(seed)
    special = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 512}
    dimensions = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 2}
    config = DeepseekV2Config(
        **shape, **heads, **dimensions, **special, max_position_embeddings=512, initializer_range=0.1
    )
    model = DeepseekV2ForCausalLM(config).float().eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.view(2, 32 + 64, 64)[:, 32:] = 0
    return model


# vLLM registers parts of kv_b_proj as parameters: they are views of it, and follow it. Packed, they are copies.
@cpu_backend
@pytest.mark.parametrize(("packed", "way"), [(False, "in place"), (True, "reload")])
def test_the_way_follows_from_the_self_test_and_serves_the_new_weights_at_the_same_addresses(lab, packed, way):
    old, new = (dense_mla(seed) for seed in (1, 2))
    # Where the CPU has AMX, vLLM would choose its kernels for MLA, which need bfloat16.
    engine = lab.engine(old, pack_weights=packed, vllm={"attention_backend": "CPU_MLA"})
    before = addresses(engine)
    lab.assert_serves(engine, old)
    for model in (new, old, new):
        assert engine.load_weights(lab.snapshot(model)).way == way
        assert addresses(engine) == before
        lab.assert_serves(engine, model)
    engine.close()


def keep_copies(monkeypatch, keep, find, *, once=False):
    """Make vLLM's linear layers compute with a copy of their weight, made after loading, as packing layers do.

    `keep` stores it in the layer, `find` gets it. With `once` it is not made again.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def process(self, layer):
        if not once or find(layer) is None:
            keep(layer, layer.weight.detach().clone())

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, find(layer), bias)

    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", process)
    monkeypatch.setattr(UnquantizedLinearMethod, "apply", apply)


def test_a_layer_that_computes_with_a_copy_of_its_weight_is_not_swapped_in_place(lab, monkeypatch):
    keep_copies(monkeypatch, lambda layer, one: setattr(layer, "call", lambda: one), lambda layer: layer.call())
    old, new = (lab.model(seed, tied=True) for seed in (1, 2))
    engine = lab.engine(old)
    for model in (new, old):
        assert engine.load_weights(lab.snapshot(model)).way == "reload"
        lab.assert_serves(engine, model)
    engine.close()


@pytest.mark.parametrize(
    ("keep", "once"),
    [
        (lambda layer, one: setattr(layer, "copy", one), True),
        (lambda layer, one: layer.register_buffer("copy", one, persistent=False), False),
    ],
    ids=["an attribute, made once", "a buffer"],
)
def test_an_engine_refuses_to_start_if_no_way_restores_the_weights(lab, monkeypatch, keep, once):
    """vLLM's reload makes a buffer again that is in no checkpoint, but then puts the old one back."""
    keep_copies(monkeypatch, keep, lambda layer: getattr(layer, "copy", None), once=once)
    with pytest.raises(
        ConfigError, match=r"not in place: .* tensors are not restored, .* model\..*; not reload: .* are not restored"
    ):
        lab.engine(lab.model(1))


def test_a_reload_that_does_nothing_is_caught_though_no_sample_can_be_read_back(lab, monkeypatch):
    """In bfloat16 the canary would accept the weights of one step before."""
    model = lab.rounded(lab.model(1))
    near = lab.rounded(lab.step(model, 1, changed=0.1))
    engine = lab.engine(model, dtype="bfloat16", canary_tolerance=0.5, pack_weights=True)
    assert engine.hot_reload.way == "reload"
    monkeypatch.setattr(type(worker_of(engine)), "reload_weights", lambda self, weights_iterator: None)
    with pytest.raises(EngineFaulty, match="left out by vLLM's reload"):
        engine.load_weights(lab.snapshot(near, saved=lab.as_bfloat16(near)))
    engine.close()
