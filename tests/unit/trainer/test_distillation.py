"""Distillation: another model as the reference, and the objective of tokens, on a policy that can be enumerated."""

import itertools
import json
import re
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div

from tba.cli.checks import Plan
from tba.cli.checks import examine as all_checks
from tba.common.config import Config, TrainSection
from tba.common.errors import CheckpointMismatch, ConfigError
from tba.common.weights.pretrained import check_same_tokens
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.trainer import (
    FLAT,
    in_float64,
    learner_of,
    make_batch,
    make_row,
    objective,
    random_batch,
    tiny_model,
)
from tba.tests.runner import size
from tba.trainer import checkpoint
from tba.trainer.batch.batch import TrainBatch
from tba.trainer.distributed import ALONE
from tba.trainer.model.scorer import Scorer, load_model, sequence_logprobs
from tba.trainer.preflight.check import setup_of, state_bytes
from tba.trainer.preflight.shape import shape_of, with_reference
from tba.trainer.step.build import build
from tba.trainer.step.learner import Learner

ARITHMETIC = Path("examples/arithmetic/model")
# All 64 responses of 3 tokens over a vocabulary of 4 are known, so the policy can be compared with its optimum.
VOCABULARY, LENGTH, SAMPLES = 4, 3, 32
PROMPTS = ([0, 1], [2, 3])
RESPONSES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
ROWS = [make_row(i, prompt, y) for i, (prompt, y) in enumerate(itertools.product(PROMPTS, RESPONSES))]


@torch.no_grad()
def distribution(model: Any) -> np.ndarray:
    """Return the probability of every response: [prompt, response]."""
    logprobs = sequence_logprobs(Scorer(model).score(ROWS).logprob_R, ROWS)
    return logprobs.exp().view(len(PROMPTS), len(RESPONSES)).numpy()


def student() -> Any:
    return tiny_model(vocabulary=VOCABULARY, hidden=32, seed=5, layers=2)


def teacher() -> Any:
    """Return a model of another shape, under which all responses are likely enough to be sampled."""
    model = tiny_model(vocabulary=VOCABULARY, hidden=48, seed=6, layers=2)
    model.lm_head.weight.data *= 0.5
    return model


def reverse_kl(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """Return KL(p || q), the largest of the prompts."""
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).max())


def draw(log_p: np.ndarray, rng: np.random.Generator) -> TrainBatch:
    """Sample responses. Rewards are 0."""
    picks = [rng.choice(64, size=SAMPLES, p=p / p.sum()) for p in np.exp(log_p)]
    return make_batch([ROWS[64 * b + n] for b, each in enumerate(picks) for n in each], np.zeros((2, SAMPLES)))


@pytest.mark.slow
def test_by_trajectory_balance_from_data_of_16_steps_before_the_policy_becomes_the_teacher():
    """With rewards of 0 and beta 1."""
    steps = size(150, 600)
    config = TrainSection(
        steps=steps, learning_rate=5e-3, schedule="cosine", warmup_steps=10, weight_decay=0.0, beta=1.0, beta_final=1.0,
        max_grad_norm=10.0,
    )  # fmt: skip
    learner = learner_of(student(), teacher(), config, objective())
    goal, rng = np.log(distribution(teacher())), np.random.default_rng(0)
    past = deque([np.log(distribution(learner.policy))], maxlen=17)
    before = reverse_kl(past[0], goal)
    for _ in range(steps):
        learner.step(draw(past[0], rng))
        past.append(np.log(distribution(learner.policy)))
    reached = reverse_kl(past[-1], goal)
    print(f"KL {before:.3f} before, {reached:.1e} after")
    assert before > 0.3
    assert reached < size(0.04, 0.01)


def test_the_expected_gradient_is_that_of_the_reverse_kl_over_the_whole_vocabulary():
    policy, other = in_float64(student()), in_float64(teacher())
    keys = {"truncation": 1e9}
    config = TrainSection.model_validate(FLAT | {"packing": "padded"})
    learner = learner_of(policy, other, config, objective("distill", **keys))
    # The sampler is uniform, and each response occurs once: so often as it is likely.
    uniform = np.full(LENGTH, -np.log(VOCABULARY), np.float32)
    rows = [make_row(row.id, row.prompt_ids, row.response_ids, sampling_logprobs=uniform) for row in ROWS]
    batch = make_batch(rows, np.random.default_rng(0).random((2, 64)))
    reference_BK, _, of_tokens = learner._complete_reference(batch)
    learner.accumulate(batch, reference_BK, 1.0, of_tokens)
    found = {name: not_none(parameter.grad).clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    tokens = torch.tensor([[*row.prompt_ids, *row.response_ids] for row in ROWS])
    # The logits that predict the tokens of the responses.
    log_pi, log_ref = (model(input_ids=tokens).logits[:, 1:-1].log_softmax(-1) for model in (policy, other))
    (kl_div(log_ref, log_pi, reduction="none", log_target=True).sum() / (len(ROWS) * LENGTH)).backward()
    for name, parameter in policy.named_parameters():
        assert torch.allclose(found[name], not_none(parameter.grad), atol=1e-6, rtol=1e-5), name
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-2


# ---------------------------------------------------------------- the model of reference.path


def save_teacher(directory: Path, **settings: Any) -> Path:
    """Save a model of another shape with the tokenizer of the arithmetic model."""
    shutil.copytree(ARITHMETIC, directory)
    (directory / "model.safetensors").unlink()
    vocabulary = json.loads((ARITHMETIC / "config.json").read_text())["vocab_size"]
    tiny_model(vocabulary=vocabulary, **settings).save_pretrained(directory)
    return directory


def make_config(path: Path, **sections: Any) -> Config:
    plain = {
        "model": {"path": str(ARITHMETIC), "dtype": "float32"},
        "train": FLAT | {"gpu": "cpu"},
        "objective": {"name": "distill"},
        "reference": {"path": str(path)},
    }
    return Config.model_validate(plain | sections)


def built(config: Config) -> Learner:
    return build(config, ARITHMETIC, torch.device("cpu"), ALONE)[0]


@pytest.mark.parametrize("lora", [{}, {"rank": 2}], ids=["whole", "adapters"])
@pytest.mark.parametrize("name", ["distill", "tb"])
def test_the_model_of_reference_path_is_the_reference(tmp_path, lora, name):
    if lora:
        pytest.importorskip("peft")
    path = save_teacher(tmp_path / "teacher")
    learner = built(make_config(path, objective={"name": name}, lora=lora))
    assert learner.reference.name_at(0) == learner.reference.name_at(99)
    assert learner.reference.name_at(0).startswith("teacher-")
    batch = random_batch(0)
    result = learner.step(batch)
    scores = Scorer(load_model(path, torch.device("cpu"))).score(batch.rows).logprob_R
    expected = sequence_logprobs(scores, batch.rows).tolist()
    assert [result.reference[row.id] for row in batch.rows] == pytest.approx(expected, abs=1e-4)


def test_a_run_does_not_resume_with_another_teacher(tmp_path):
    one, other = (save_teacher(tmp_path / str(seed), seed=seed) for seed in range(2))
    checkpoint.save(tmp_path / "saved", built(make_config(one)), run="r", keep=1)
    found = not_none(checkpoint.newest(tmp_path / "saved"))
    checkpoint.restore(found, built(make_config(shutil.copytree(one, tmp_path / "copy"))))
    sentence = r"with the reference frozen teacher-\w{15}, the configuration .* files under reference\.path must stay"
    with pytest.raises(CheckpointMismatch, match=sentence):
        checkpoint.restore(found, built(make_config(other)))


def change_tokenizer(directory: Path, change: Any) -> Path:
    """Write another vocabulary into tokenizer.json."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content["model"]["vocab"])
    file.write_text(json.dumps(content))
    return directory


def swap(vocabulary: dict[str, int]) -> None:
    vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]


def assert_refused(path: Path, sentence: str) -> None:
    """Check that the trainer refuses a teacher, and the checks before it."""
    with pytest.raises(ConfigError, match=sentence):
        built(make_config(path))
    (check,) = all_checks(Plan(make_config(path)), ["reference"])
    assert check.result == "fail"
    assert re.search(sentence, check.detail)


def test_a_teacher_whose_tokens_have_other_ids_is_refused_and_one_with_more_tokens_is_not(tmp_path):
    other = change_tokenizer(save_teacher(tmp_path / "other"), swap)
    words = r"another tokenizer than the model: 2 of \d+ tokens have another id or none, such as '3', which is 6 .* 7"
    assert_refused(other, words)
    more = change_tokenizer(save_teacher(tmp_path / "more"), lambda vocabulary: vocabulary.update({"*": 99}))
    check_same_tokens(ARITHMETIC, more)
    with pytest.raises(ConfigError, match=r"1 of \d+ tokens .* '\*', which is 99 in the model and None there"):
        check_same_tokens(more, ARITHMETIC)


def test_a_teacher_with_fewer_embeddings_than_the_policy_is_refused_and_one_with_more_is_not(tmp_path):
    size = json.loads((ARITHMETIC / "config.json").read_text())["vocab_size"]
    path = save_teacher(tmp_path / "teacher")
    tiny_model(vocabulary=size - 1).save_pretrained(path)
    assert_refused(path, rf"reference\.path {path} has {size - 1} token ids, and the model {size}: .* use a reference")
    # As large models of a family have them.
    tiny_model(vocabulary=size + 1).save_pretrained(path)
    check_same_tokens(ARITHMETIC, path)


def test_the_memory_of_another_reference_is_that_of_its_own_parameters(tmp_path):
    path = save_teacher(tmp_path / "teacher", hidden=64, layers=3)
    own = sum(one.numel() for one in load_model(path, torch.device("cpu")).parameters())
    shape = with_reference(shape_of(load_model(ARITHMETIC, torch.device("cpu"))), path)
    for lora in ({}, {"rank": 2}):
        setup = setup_of(make_config(path, lora=lora), shape, ranks=1, gpu_total=80 << 30)
        assert state_bytes(shape, setup)["reference"] == own * (2 if setup.half else 4)
    plain = make_config(path, objective={"name": "grpo"}, reference={})
    assert state_bytes(shape, setup_of(plain, shape, ranks=1, gpu_total=80 << 30))["reference"] == 0
