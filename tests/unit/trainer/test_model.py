"""Loading a model, an optimizer on the host, and the schedules of learning rate and beta."""

import math
from pathlib import Path
from typing import Any

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

from tba.common.config import TrainSection
from tba.common.errors import ConfigError, OutOfMemory
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.ranks import make_learner
from tba.tests.helpers.trainer import make_row, random_batch, save_tiny_model, tiny_model
from tba.tests.runner import slow
from tba.trainer import checkpoint
from tba.trainer.model.adapters import MERGED, gathered
from tba.trainer.model.scorer import Scorer, enable_gradient_checkpointing, load_model, sequence_logprobs
from tba.trainer.step.learner import Learner, beta_at, learning_rate_schedule

CPU = torch.device("cpu")


def drop_a_weight(file: Path) -> None:
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "cannot be loaded"),
        (lambda file: file.write_bytes(b"torn"), "cannot be loaded"),
        # Random ones would be made.
        (drop_a_weight, r"lack 1 weight of the model, model\.norm\.weight"),
    ],
    ids=["missing", "damaged", "incomplete"],
)
def test_a_missing_damaged_or_incomplete_weight_file_is_a_configuration_error(tmp_path, damage, words):
    damage(save_tiny_model(tmp_path) / "model.safetensors")
    with pytest.raises(ConfigError, match=words):
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


# Several micro-batches in a step, and a norm that clips.
KEYS: dict[str, Any] = {"double": False, "micro_batch_tokens": 30, "max_grad_norm": 0.5}
OFFLOAD: dict[str, Any] = {"offload": "optimizer", **KEYS}


def losses(learner: Learner, steps: int) -> list[float]:
    return [
        learner.step(random_batch(learner.steps_done, step=learner.steps_done)).metrics["loss"] for _ in range(steps)
    ]


def masters(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.masters().items()}


def make_plain(**keys: Any) -> Learner:
    """Return a learner without offload whose AdamW is the fused one: the plain loop rounds the last bit differently."""
    learner = make_learner(**KEYS, **keys)
    for group in learner.optimizer.param_groups:
        group["fused"] = True
    return learner


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tb", *slow("tb_learned_z")])
def test_in_float32_five_steps_have_the_same_losses_and_weights_bit_for_bit(name):
    offloaded, plain = make_learner(name=name, **OFFLOAD), make_plain(name=name)
    assert losses(offloaded, 5) == losses(plain, 5)
    for name_, weight in plain.policy.named_parameters():
        assert torch.equal(weight, offloaded.masters()[name_])


@pytest.mark.slow
def test_in_bfloat16_losses_agree_up_to_the_rounding_of_the_weights():
    """Without offload autocast rounds matrices alone; with it embeddings and norms are bfloat16 too."""
    keys: dict[str, Any] = {"autocast": True, "learning_rate": 1e-3}
    offloaded, plain = losses(make_learner(**OFFLOAD, **keys), 10), losses(make_learner(**KEYS, **keys), 10)
    assert offloaded == pytest.approx(plain, rel=0.05, abs=0.01)
    assert offloaded != plain


def test_published_weights_are_the_rounded_masters_in_which_small_updates_add_up_that_bfloat16_would_lose():
    learner = make_learner(autocast=True, **OFFLOAD, learning_rate=1e-6)
    before = masters(learner)
    rounded = {name: tensor.clone() for name, tensor in gathered(learner.policy, MERGED)}
    losses(learner, 3)
    published, exact = dict(gathered(learner.policy, MERGED)), learner.masters()
    assert published.keys() == exact.keys()
    for name, tensor in published.items():
        assert (tensor.dtype, exact[name].dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(tensor, exact[name].bfloat16())
    name = "model.layers.0.mlp.up_proj.weight"
    assert (exact[name] != before[name]).float().mean() > 0.9
    assert (published[name] == rounded[name]).float().mean() > 0.9


@pytest.mark.slow
def test_a_run_without_offload_resumes_with_it_at_the_same_weights_and_losses(tmp_path):
    plain, offloaded = make_plain(), make_learner(**OFFLOAD)
    losses(plain, 3)
    checkpoint.save(tmp_path, plain, run="r", keep=1)
    checkpoint.restore(not_none(checkpoint.newest(tmp_path)), offloaded)
    assert losses(offloaded, 3) == losses(plain, 3)
    assert all(torch.equal(one, offloaded.masters()[name]) for name, one in plain.policy.named_parameters())


@pytest.mark.slow
def test_a_step_whose_loss_is_not_finite_changes_neither_masters_nor_weights():
    learner = make_learner(**OFFLOAD)
    losses(learner, 1)
    before, batch = masters(learner), random_batch(1, step=1)
    batch.reward_BK[0, 0] = float("nan")
    assert learner.step(batch).skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.masters().items())
    plain = make_plain()
    losses(plain, 1)
    plain.step(batch)
    assert losses(learner, 2) == losses(plain, 2), "nothing of the skipped gradient is left"


def test_no_gradient_stays_on_the_device_after_a_backward_pass():
    learner = make_learner(**OFFLOAD)
    batch = random_batch(0)
    learner.accumulate(batch, torch.zeros_like(batch.reward_BK), 0.1)
    assert all(parameter.grad is None for parameter in learner.policy.parameters())
    learner.optimizer.collect()  # type: ignore[attr-defined]
    assert all(parameter.grad is not None for parameter in learner.optimizer.param_groups[0]["params"])


def rates(at: list[int], **keys) -> list[float]:
    schedule = learning_rate_schedule(TrainSection.model_validate({"learning_rate": 1.0, **keys}))
    return [schedule(step) for step in at]


def test_schedules_follow_a_linear_warm_up_and_a_wsd_decay_longer_than_the_run_is_shortened():
    found = rates([0, 25, 50, 300, 500, 750, 1000], steps=1000, warmup_steps=50, decay_steps=500, schedule="wsd")
    assert found == pytest.approx([0, 0.5, 1, 1, 1, 0.5, 0], abs=1e-12)
    found = rates([10, 20, 29], steps=30, warmup_steps=10, decay_steps=500, schedule="wsd")
    assert found == pytest.approx([1, 0.5, 0.5 * (1 + math.cos(math.pi * 19 / 20))], abs=1e-12)
    keys = {"steps": 110, "warmup_steps": 10}
    assert rates([5, 10, 109], schedule="constant", **keys) == pytest.approx([0.5, 1, 1])
    assert rates([5, 10, 60, 110], schedule="linear", **keys) == pytest.approx([0.5, 1, 0.5, 0])
    assert rates([5, 10, 60, 110], schedule="cosine", **keys) == pytest.approx([0.5, 1, 0.5, 0])


@pytest.mark.parametrize(("steps", "warmup", "decay"), [(1000, 50, 500), (200, 20, 100), (5, 0, 2), (2, 0, 1)])
def test_defaults_fit_into_the_run_without_a_warning(caplog, steps, warmup, decay):
    rate = learning_rate_schedule(TrainSection(learning_rate=1.0, steps=steps))
    assert rate(warmup) == 1.0
    assert all(rate(step) < 1 for step in range(warmup))
    assert rate(steps - decay) == 1.0
    assert all(rate(step) < 1 for step in range(steps - decay + 1, steps))
    assert caplog.records == []


def test_a_warm_up_longer_than_the_run_is_kept_with_a_warning(caplog):
    assert rates([9], steps=10, warmup_steps=20, schedule="constant") == [0.45]
    assert "the learning rate never reaches its peak: train.warmup_steps" in caplog.text
    assert "decay_steps" not in caplog.text


def test_beta_changes_linearly_to_its_final_value_and_jumps_there_without_annealing_or_where_it_stops_early():
    config = TrainSection(beta=0.012, beta_final=0.004, beta_anneal_steps=500)
    assert [beta_at(config, step) for step in (0, 250, 500, 900)] == pytest.approx([0.012, 0.008, 0.004, 0.004])
    assert beta_at(TrainSection(beta=0.5, beta_final=0.1, beta_anneal_steps=0), 0) == 0.1
    config = TrainSection(beta=1.0, beta_final=0.05, beta_anneal_steps=128, beta_anneal_stop=32)
    assert [beta_at(config, step) for step in (0, 31, 32)] == pytest.approx([1.0, 1 - 0.95 * 31 / 128, 0.05])
