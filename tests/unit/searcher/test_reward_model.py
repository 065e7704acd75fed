"""A sequence classifier as a reward: its scores, and the files it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama import LlamaForSequenceClassification

from tba.cli.checks import Plan, examine
from tba.common.config import Config, RewardModelSection
from tba.common.errors import ConfigError
from tba.searcher.scoring.classifier import RewardModel
from tba.tests.helpers.classifiers import EXAMPLE_MODEL, make_classifier, without_head
from tba.tests.runner import slow

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


def test_the_score_is_the_logit_of_the_last_token(tmp_path):
    model = load(make_classifier(tmp_path / "model"))
    ids = torch.tensor([model.encode("1+2=", "3")])
    head = load_file(tmp_path / "model/model.safetensors")["score.weight"]
    with torch.inference_mode():
        hidden = model._model.model(ids).last_hidden_state
    assert score(model, [("1+2=", "3")]) == pytest.approx((hidden[0, -1] @ head.T).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "pad",
    [
        0,
        *slow(None, -1, 1),
    ],
)
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


def test_a_padding_token_without_an_embedding_is_refused(tmp_path):
    directory = make_classifier(tmp_path / "model")
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"pad_token_id": 0', '"pad_token_id": 16'))
    with pytest.raises(ConfigError, match="pads with token 16, and has 16 embeddings: set pad_token_id"):
        load(directory)


def test_a_chat_template_renders_the_prompt_and_the_response_as_two_messages(tmp_path):
    directory = make_classifier(tmp_path / "model", chat_template=TEMPLATE)
    chat, plain = load(directory, template="chat"), load(directory)
    assert chat.encode("1", "2") == chat.encode("", "2", [("user", "1")]) == plain.encode("+1", "=2")
    with pytest.raises(ValueError, match="messages and no text: set reward_model.template"):
        plain.encode("", "2", [("user", "1")])


def test_a_pair_that_is_too_long_is_refused_and_not_truncated(tmp_path):
    directory = make_classifier(tmp_path / "model")
    with pytest.raises(ValueError, match=r"129 tokens; the reward model takes 1 to 128"):
        load(directory).encode("1" * 100, "2" * 29)


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


def test_files_that_are_no_reward_model_are_refused_with_a_reason(tmp_path):
    with pytest.raises(ConfigError, match="is not a classifier: it lacks score.weight"):
        load(without_head(tmp_path / "headless"))
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
