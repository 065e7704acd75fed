"""Loading a model: what is accepted, and the errors for what is not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BioGptConfig,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    OPTConfig,
    XGLMConfig,
)

from tba.common.errors import ConfigError, OutOfMemory
from tba.tests.helpers.trainer import make_row, save_tiny_model, tiny_model
from tba.trainer.model.scorer import Scorer, enable_gradient_checkpointing, load_model, sequence_logprobs

CPU = torch.device("cpu")


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"torn")], ids=["missing", "damaged"])
def test_a_missing_or_damaged_weight_file_is_a_configuration_error(tmp_path, damage):
    damage(save_tiny_model(tmp_path) / "model.safetensors")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path, CPU)


def gpu_runs_out(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@pytest.mark.parametrize(
    "run_out",
    [lambda *_, **__: torch.empty(2**60, dtype=torch.uint8), gpu_runs_out, lambda *_, **__: bytearray(2**62)],
    ids=["torch on a CPU", "torch on a GPU", "Python"],
)
def test_running_out_of_memory_is_not_a_configuration_error(monkeypatch, tmp_path, run_out):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", run_out)
    with pytest.raises(OutOfMemory, match="out of memory while the model in .* was loaded") as raised:
        load_model(tmp_path, CPU)
    assert raised.value.exit_code == 1


def test_missing_weights_are_a_configuration_error_and_not_random(tmp_path):
    save_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 weight of the model, model\.norm\.weight"):
        load_model(tmp_path, CPU)


def test_weights_are_float32_whatever_type_the_file_has(tmp_path):
    save_tiny_model(tmp_path / "m")
    model = load_model(tmp_path / "m", CPU)
    model.bfloat16().save_pretrained(tmp_path / "half")
    assert load_model(tmp_path / "half", CPU).dtype == torch.float32


def test_dropout_is_removed_even_in_training_mode(tmp_path):
    shape = GPT2Config(vocab_size=8, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    model = load_model(tmp_path, CPU).train()
    rows = [make_row(1, [1, 2], [3, 4, 5])]
    first, second = (sequence_logprobs(Scorer(model, autocast=False).score(rows).logprob_R, rows) for _ in range(2))
    assert torch.equal(first, second)


SCALED = {
    "gemma2": {"final_logit_softcapping": 0.5, "head_dim": 8},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
}


@pytest.mark.parametrize("width", [1.0, 1e-4], ids=["large logits", "small logits"])
@pytest.mark.parametrize("kind", SCALED)
def test_a_model_that_scales_or_caps_its_logits_is_rejected_whatever_its_weights_are(kind, width, tmp_path):
    shape = AutoConfig.for_model(
        kind, vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=width, bos_token_id=1, eos_token_id=2, pad_token_id=0, **SCALED[kind],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="scales or caps its logits"):
        load_model(tmp_path, CPU)


def test_autocast_computes_in_bfloat16_and_sums_in_float64(tmp_path):
    model = load_model(save_tiny_model(tmp_path), CPU)
    rows = [make_row(1, [1, 2], [3, 4, 5])]
    exact, rounded = (Scorer(model, autocast=flag).score(rows).logprob_R for flag in (False, True))
    assert exact.dtype == rounded.dtype == torch.float32
    assert 0 < float((exact - rounded).detach().abs().max()) < 0.1
    assert sequence_logprobs(rounded, rows).dtype == torch.float64


SHAPE = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "bos_token_id": 1}
RANDOM_LAYERS = [
    OPTConfig(**SHAPE, ffn_dim=32, word_embed_proj_dim=16, dropout=0.3, layerdrop=0.5),
    FalconConfig(**SHAPE, hidden_dropout=0.3),
    BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.3),
    BioGptConfig(**SHAPE, intermediate_size=32, hidden_dropout_prob=0.3, layerdrop=0.5),
    XGLMConfig(vocab_size=32, d_model=16, num_layers=2, attention_heads=2, ffn_dim=32, dropout=0.3, layerdrop=0.5),
    MixtralConfig(**SHAPE, intermediate_size=32, num_key_value_heads=1, num_local_experts=4, router_jitter_noise=0.3),
]


@pytest.mark.parametrize("config", RANDOM_LAYERS, ids=lambda config: config.model_type)
def test_gradient_checkpointing_turns_no_dropout_and_no_router_noise_on(tmp_path, config):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, CPU)
    rows = [make_row(1, [1, 2, 3], list(range(4, 20)))]
    expected = Scorer(model, autocast=False).score(rows).logprob_R
    enable_gradient_checkpointing(model, autocast=False)
    assert model.training
    assert torch.allclose(Scorer(model, autocast=False).score(rows).logprob_R, expected, atol=1e-5)


def test_a_model_that_is_random_in_training_mode_is_refused_for_gradient_checkpointing():
    model = tiny_model()
    model.model.norm.register_forward_hook(
        lambda module, _, output: output + torch.randn_like(output) if module.training else output
    )
    with pytest.raises(ConfigError, match=r"training mode.*set train\.gradient_checkpointing = false"):
        enable_gradient_checkpointing(model, autocast=False)
