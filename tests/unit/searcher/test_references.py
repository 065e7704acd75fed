"""Reference log-probabilities, which equal the trainer's, and a classifier as a reward model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama import LlamaForSequenceClassification

from tba.cli.checks import Plan, examine
from tba.common.config import Config, RewardModelSection
from tba.common.errors import ConfigError
from tba.common.wire.trajectory import STOP_ERROR
from tba.searcher.evaluation import models as reference_model
from tba.searcher.evaluation.models import ReferenceModel
from tba.searcher.scoring.classifier import RewardModel
from tba.tests.helpers.classifiers import EXAMPLE_MODEL, make_classifier, without_head
from tba.tests.helpers.engines import cpu_engine
from tba.tests.helpers.puts import make_episode
from tba.tests.runner import slow
from tba.trainer.batch.batch import Row
from tba.trainer.model.scorer import Scorer, load_model, sequence_logprobs, to_bfloat16
from tba.trainer.publishing.canary import make_canary, skeleton


@pytest.fixture
def rows(trajectory):
    """Prompts and responses of many lengths, one response with a mask."""
    random = np.random.default_rng(0)
    lengths = enumerate((1, 40, 3, 7, 7, 60, 2, 15))
    rows = [
        trajectory(tokens=random.integers(0, 16, length), prompt_ids=random.integers(0, 16, 1 + n % 4).astype(np.int32))
        for n, length in lengths
    ]
    return [*rows, trajectory(tokens=[3, 4, 5], loss_mask=np.array([1, 0, 1], np.uint8))]


def mask_of(row):
    return row.loss_mask if len(row.loss_mask) else np.ones(len(row.response_ids), np.uint8)


def by_trainer(model, rows, *, autocast=False):
    scorer = Scorer(model, autocast=autocast)
    batch = [
        Row(n, row.prompt_ids, row.response_ids, row.logprobs, loss_mask=mask_of(row), on_policy=False)
        for n, row in enumerate(rows)
    ]
    with torch.no_grad():
        return sequence_logprobs(scorer.score(batch).logprob_R, batch).tolist()


def summed(rows, logprobs):
    """Sum what is known of each token of prompt and response over the response tokens that count."""
    return [
        float(np.asarray(one)[len(row.prompt_ids) - 1 :] @ mask_of(row))
        for row, one in zip(rows, logprobs, strict=True)
    ]


@pytest.mark.slow
def test_matrices_in_bfloat16_change_nothing_under_autocast_for_weights_that_bfloat16_represents(example_model, rows):
    exact, trainers, searchers = (load_model(example_model, torch.device("cpu")) for _ in range(3))
    for model in (exact, trainers, searchers):
        for parameter in model.requires_grad_(False).parameters():
            parameter.data = parameter.data.bfloat16().float()
    to_bfloat16(trainers)
    reference_model.to_bfloat16(searchers)
    dtypes = {name: tensor.dtype for name, tensor in searchers.state_dict().items()}
    assert dtypes == {name: tensor.dtype for name, tensor in trainers.state_dict().items()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    expected = by_trainer(exact, rows, autocast=True)
    assert by_trainer(trainers, rows, autocast=True) == by_trainer(searchers, rows, autocast=True) == expected


def test_all_implementations_of_teacher_forcing_agree(example_model, rows, monkeypatch):
    model = load_model(example_model, torch.device("cpu"))
    expected = by_trainer(model, rows)
    assert len(set(expected)) == len(expected)
    sequences = [[*row.prompt_ids.tolist(), *row.response_ids.tolist()] for row in rows]
    canary = make_canary(skeleton(model), model.state_dict(), sequences)
    assert summed(rows, canary.logprobs) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert summed(rows, cpu_engine(example_model).score(sequences)) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    reference = ReferenceModel(str(example_model), device="cpu", dtype="float32")
    for tokens in (reference_model._BATCH_TOKENS, 100, 1):
        monkeypatch.setattr(reference_model, "_BATCH_TOKENS", tokens)
        assert reference.logprobs(rows) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_an_episode_is_the_sum_over_its_sequences_in_searcher_and_trainer(example_model, rows):
    model = load_model(example_model, torch.device("cpu"))
    episode = make_episode()
    batch = [Row(0, episode.prompt_ids, episode.response_ids, episode.logprobs, episode.loss_mask, False,
                 segments=episode.segments)]  # fmt: skip
    with torch.no_grad():
        (expected,) = sequence_logprobs(Scorer(model).score(batch).logprob_R, batch).tolist()
    found = ReferenceModel(str(example_model), device="cpu", dtype="float32").logprobs([rows[1], episode, rows[0]])
    assert found == pytest.approx(
        [by_trainer(model, rows)[1], expected, by_trainer(model, rows)[0]], rel=1e-5, abs=1e-5
    )


def test_a_row_that_cannot_be_scored_gets_none_and_the_others_are_scored(example_model, rows, trajectory):
    failed = trajectory(tokens=[], stop_reason=STOP_ERROR, error="not generated")
    foreign = trajectory(tokens=[5, 99_999])
    reference = ReferenceModel(str(example_model), device="cpu", dtype="float32")
    found = reference.logprobs([failed, rows[0], foreign])
    assert (found[0], found[2]) == (None, None)
    assert found[1] == pytest.approx(reference.logprobs(rows[:1])[0])


PAIRS = [("1+2=", "3"), ("12+34=", "46"), ("1+1=", "2" * 90), ("9+8=", ""), ("7+70=", "77+1")]
# Uses only characters in the vocabulary of the example's tokenizer.
TEMPLATE = "{% for message in messages %}{{ '+' if message.role == 'user' else '=' }}{{ message.content }}{% endfor %}"


def load(directory: Path, **keys) -> RewardModel:
    return RewardModel(directory, RewardModelSection(path=str(directory), **keys), "cpu")


def score(model: RewardModel, pairs) -> list[float]:
    encoded = [model.encode(*pair) for pair in pairs]
    found: dict[int, Any] = {}
    for part in model.batches(encoded):
        scores = model.score([encoded[n] for n in part], lambda start, stop: None)
        found |= dict(zip(part, scores, strict=True))
    return [found[n] for n in range(len(pairs))]


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("llama", {"pad_token_id": None}), ("bert", {})])
def test_the_score_of_a_pair_does_not_depend_on_its_batch(tmp_path, kind, changes):
    model = load(make_classifier(tmp_path / "model", kind, **changes))
    together, alone = score(model, PAIRS), [score(model, [pair])[0] for pair in PAIRS]
    assert len({round(value, 3) for value in alone}) == len(PAIRS)
    assert together == pytest.approx(alone, abs=1e-5)
    assert score(model, PAIRS[::-1])[::-1] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("pad", [0, *slow(None, -1, 1)])
def test_a_pair_that_ends_with_eos_is_read_at_the_same_position_as_by_transformers_alone(tmp_path, pad):
    """1 is EOS. A model is read at EOS, or at the token before it if EOS is its padding token."""
    directory = make_classifier(tmp_path / "model", pad_token_id=pad, chat_template=TEMPLATE + "<eos>")
    chat = load(directory, template="chat")
    plain = LlamaForSequenceClassification.from_pretrained(directory).eval()
    with torch.inference_mode():
        ids = [torch.tensor([chat.encode(*pair)]) for pair in PAIRS]
        alone = [plain(one).logits.item() for one in ids]
        position = -2 if pad == 1 else -1
        there = [plain.score(plain.model(one).last_hidden_state[0, position]).item() for one in ids]
    assert score(chat, PAIRS) == pytest.approx(alone, abs=1e-5)
    assert alone == pytest.approx(there, abs=1e-5)


def test_a_batch_always_leaves_a_token_to_pad_with(tmp_path):
    model = load(make_classifier(tmp_path / "model", pad_token_id=None))
    pairs = [[3] * n + [token] for n, token in enumerate(range(16), 1)]
    assert [len(part) for part in model.batches(pairs)] == [15, 1]
    found = [model.score([pair], lambda *_: None)[0] for pair in pairs]
    for part in model.batches(pairs):
        assert model.score([pairs[n] for n in part], lambda *_: None) == pytest.approx(
            [found[n] for n in part], abs=1e-5
        )


def test_a_chat_template_renders_the_prompt_and_the_response_as_two_messages(tmp_path):
    directory = make_classifier(tmp_path / "model", chat_template=TEMPLATE)
    chat, plain = load(directory, template="chat"), load(directory)
    assert chat.encode("1", "2") == chat.encode("", "2", [("user", "1")]) == plain.encode("+1", "=2")
    with pytest.raises(ValueError, match="messages and no text: set reward_model.template"):
        plain.encode("", "2", [("user", "1")])


def test_a_lack_of_memory_halves_the_batch_and_only_a_pair_that_does_not_fit_alone_fails(tmp_path, monkeypatch):
    model = load(make_classifier(tmp_path / "model"))
    whole, passes, forward = score(model, PAIRS), [], model._forward

    def short_of_memory(pairs):
        if sum(map(len, pairs)) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(pairs)

    monkeypatch.setattr(model, "_forward", short_of_memory)
    scores = model.score([model.encode(*pair) for pair in PAIRS], lambda *bounds: passes.append(bounds))
    assert scores[2] == "out of memory on cpu with 94 tokens"
    assert [*scores[:2], *scores[3:]] == pytest.approx([*whole[:2], *whole[3:]], abs=1e-5)
    assert passes[0] == (0, 5)


def test_files_that_are_no_reward_model_and_a_pair_that_is_too_long_are_refused_with_a_reason(tmp_path):
    with pytest.raises(ConfigError, match="is not a classifier: it lacks score.weight"):
        load(without_head(tmp_path / "headless"))
    directory = make_classifier(tmp_path / "padded")
    with pytest.raises(ValueError, match=r"129 tokens; the reward model takes 1 to 128"):
        load(directory).encode("1" * 100, "2" * 29)
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"pad_token_id": 0', '"pad_token_id": 16'))
    with pytest.raises(ConfigError, match="pads with token 16, and has 16 embeddings: set pad_token_id"):
        load(directory)
    directory = make_classifier(tmp_path / "pickled")
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(directory)


def diagnosis(path: object, template: str) -> tuple[str, str]:
    """(result, detail) of `tba doctor`."""
    config = Config.model_validate({"reward_model": {"path": str(path), "template": template}})
    (finding,) = examine(Plan(config), ["reward model"])
    return finding.result, finding.detail


@pytest.mark.slow
def test_the_doctor_checks_the_files_of_a_reward_model(tmp_path, hub_offline):
    good = make_classifier(tmp_path / "good", chat_template=TEMPLATE)
    plain = make_classifier(tmp_path / "plain", "bert")
    damaged, empty = make_classifier(tmp_path / "damaged"), make_classifier(tmp_path / "empty")
    (damaged / "config.json").write_text((damaged / "config.json").read_text().replace('"llama"', '"lama"'))
    (empty / "model.safetensors").unlink()
    for path, template, result, words in (
        (good, "chat", "ok", "good: LlamaForSequenceClassification, pads with token 0, chat"),
        (plain, "concatenation", "ok", "plain: BertForSequenceClassification, pads with token 0, concatenation"),
        (plain, "chat", "fail", "has no chat template"),
        (damaged, "concatenation", "fail", "model type `lama`"),
        (empty, "concatenation", "fail", "has no safetensors files"),
        (EXAMPLE_MODEL, "concatenation", "fail", "has 2 labels: a reward needs a classifier with one"),
        (tmp_path / "missing", "concatenation", "fail", "missing does not exist"),
        ("org/model", "concatenation", "warn", "reward_model.path 'org/model' is not a local directory, and"),
        ("", "concatenation", "ok", "none is configured"),
    ):
        found, detail = diagnosis(path, template)
        assert (found, words in detail) == (result, True), (found, detail)
