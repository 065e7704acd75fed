"""LoRA: merged weights are the policy, the reference is the base, and a resumed run is exact."""

import shutil

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from tba.common.config import Config, LoraSection, TrainSection
from tba.common.errors import CheckpointError, ConfigError
from tba.tests.helpers import trainer
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.trainer import (
    VOCABULARY,
    in_float64,
    learner_of,
    objective,
    random_batch,
    save_tiny_model,
    tiny_model,
)
from tba.trainer import checkpoint
from tba.trainer.distributed import ALONE
from tba.trainer.model.adapters import MERGED, add_adapters, gathered, without_adapters
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.model.scorer import Scorer, structure_of, weights_of
from tba.trainer.publishing.canary import make_canary, skeleton
from tba.trainer.step.build import build
from tba.trainer.step.learner import Learner

pytestmark = pytest.mark.slow

KEYS = {"learning_rate": 0.05, "steps": 10}


def make_learner(*, tie: bool = False, **settings) -> Learner:
    return trainer.make_learner(model={"tie": tie, "layers": 2}, lora=LoraSection(rank=2, alpha=3.0), **KEYS | settings)


def run_steps(learner: Learner, count: int) -> list[dict[str, float]]:
    return [learner.step(random_batch(learner.steps_done)).metrics for _ in range(count)]


def logprobs(model) -> torch.Tensor:
    with torch.no_grad():
        return Scorer(model).score(random_batch(7).rows).logprob_R


@pytest.mark.parametrize("tie", [True, False])
def test_merged_weights_give_the_log_probabilities_of_base_and_adapters(tie):
    learner = make_learner(double=True, tie=tie)
    run_steps(learner, 3)
    plain = in_float64(tiny_model(tie=tie, layers=2, seed=9))
    assert weights_of(plain).keys() == dict(gathered(learner.policy, MERGED)).keys()
    plain.load_state_dict(dict(gathered(learner.policy, MERGED)), strict=False)
    assert torch.allclose(logprobs(plain), logprobs(learner.policy), atol=1e-12, rtol=0)
    assert not torch.allclose(logprobs(learner.policy), logprobs(in_float64(tiny_model(tie=tie, layers=2))), atol=1e-3)


def test_the_reference_is_the_base_bit_for_bit_before_and_after_training():
    learner, base = make_learner(), logprobs(tiny_model(layers=2))
    # B starts at zero.
    assert torch.equal(logprobs(learner.policy), base)
    run_steps(learner, 3)
    assert not torch.equal(logprobs(learner.policy), base)
    with without_adapters(learner.policy):
        assert torch.equal(logprobs(learner.policy), base)
    batch = random_batch(5)
    found = learner.step(batch).reference
    other = learner_of(tiny_model(seed=1), tiny_model(layers=2), TrainSection(), objective())
    assert found == other.step(batch).reference


def test_only_adapters_change_and_only_they_have_optimiser_states():
    learner = make_learner()
    before = {name: tensor.clone() for name, tensor in weights_of(learner.policy).items()}
    run_steps(learner, 2)
    changed = {name for name, tensor in weights_of(learner.policy).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(learner.optimizer.state_dict()["state"]) == len(changed)


def test_recomputed_activations_give_the_same_steps():
    plain, recomputed = make_learner(double=True), make_learner(double=True, gradient_checkpointing=True)
    torch.manual_seed(0)
    for mine, theirs in zip(run_steps(recomputed, 3), run_steps(plain, 3), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_a_resume_is_exact_and_its_file_holds_the_adapters_alone(tmp_path):
    straight, first = make_learner(), make_learner()
    first.policy.load_state_dict(straight.policy.state_dict())
    expected = run_steps(straight, 6)[3:]
    run_steps(first, 3)
    path = checkpoint.save(tmp_path, first, run="r", keep=1)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert all(".lora_" in name for name in file.keys())  # noqa: SIM118
    second = make_learner()
    checkpoint.restore(not_none(checkpoint.newest(tmp_path)), second)
    assert run_steps(second, 3) == expected
    ours, theirs = weights_of(second.policy), weights_of(straight.policy)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def make_config(root, **lora) -> Config:
    return Config.model_validate({"model": {"path": str(root)}, "lora": {"rank": 2} | lora, "train": {"gpu": "cpu"}})


def built(root, **lora) -> Learner:
    return build(make_config(root, **lora), root, torch.device("cpu"), ALONE)[0]


def test_adapters_of_another_base_or_with_other_settings_are_refused(tmp_path):
    files = save_tiny_model(tmp_path / "model")
    learner = built(files)
    run_steps(learner, 1)
    checkpoint.save(tmp_path / "checkpoints", learner, run="r", keep=1)
    found = not_none(checkpoint.newest(tmp_path / "checkpoints"))
    checkpoint.restore(found, built(files))
    with pytest.raises(CheckpointError, match="'alpha': 32.0.*'alpha': 8.0"):
        checkpoint.restore(found, built(files, alpha=8.0))
    with pytest.raises(CheckpointError, match="must stay what they were"):
        checkpoint.restore(found, built(files, rank=0))
    shutil.rmtree(files)
    with pytest.raises(CheckpointError, match="the files under model.path must stay what they were"):
        checkpoint.restore(found, built(save_tiny_model(files, seed=5)))


def test_a_snapshot_and_its_canary_are_of_the_merged_model():
    model = tiny_model(layers=2, tie=True)
    plain = structure_of(model)
    assert all(parameter.is_meta for parameter in plain.parameters())
    learner = make_learner(tie=True)
    run_steps(learner, 2)
    copies = HostBuffers(torch.device("cpu"))
    weights = copies.copy(gathered(learner.policy, MERGED), torch.bfloat16).wait()
    served = tiny_model(layers=2, tie=True, seed=3)
    served.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    sequence = torch.arange(VOCABULARY).tolist()
    expected = make_canary(skeleton(served), weights_of(served), [sequence])
    assert make_canary(skeleton(plain), weights, [sequence]) == expected


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["nothing"], "does not fit"),
        (["lm_head"], 'lm_head, which cannot have.*q_proj.*or set lora.targets = "all"'),
    ],
)
def test_targets_that_cannot_have_adapters_are_refused(tmp_path, targets, message):
    with pytest.raises(ConfigError, match=message):
        built(save_tiny_model(tmp_path / "model"), targets=targets)


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    "config", [MixtralConfig(**SIZES, **TOKENS), OlmoeConfig(**SIZES, **TOKENS), Qwen3MoeConfig(**SIZES, **TOKENS)]
)
def test_all_targets_of_a_mixture_are_its_plain_linear_layers(config):
    model = AutoModelForCausalLM.from_config(config)
    add_adapters(model, LoraSection(rank=2))
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    attention = [f"self_attn.{kind}_proj" for kind in "qkvo"]
    assert adapted == {f"model.layers.{layer}.{name}" for layer in range(2) for name in attention}


def test_a_model_without_plain_linear_layers_is_refused_with_the_remedy():
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, **TOKENS))
    with pytest.raises(ConfigError, match=r"no plain linear ones; set lora.rank = 0"):
        add_adapters(model, LoraSection(rank=2))
