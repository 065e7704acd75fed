"""Supervised fine-tuning of a tiny real model with the tokenizer of the arithmetic example."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.common.config import Config, TaskSection
from tba.common.errors import OutOfMemory, TaskError, UsageError
from tba.common.rendering import PromptRenderer
from tba.common.system.durable import sha256_of
from tba.common.weights.model_files import eos_ids
from tba.searcher.tasks.task import Prompt
from tba.tests.helpers.trainer import tiny_model
from tba.tests.runner import slow
from tba.trainer.sft import Encoder, Job, Plan, _encoder, read_rows, sft
from tba.trainer.step.learner import Learner

CHAT = "{% for m in messages %}{{ m.content }}={% endfor %}{% if not add_generation_prompt %}<eos>{% endif %}"
SETTINGS = {"schedule": "constant", "warmup_steps": 0, "checkpoint_every": 2}


@pytest.fixture
def base(tmp_path, example_model) -> Path:
    """A random model directory whose tokenizer has a chat template."""
    directory = tmp_path / "base"
    model = tiny_model(vocabulary=16)
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(example_model)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def encoder(base) -> Encoder:
    return Encoder(
        PromptRenderer(AutoTokenizer.from_pretrained(base), TaskSection()), eos_ids(base), vocabulary=16, longest=12
    )


@pytest.mark.parametrize(
    ("stop", "response", "expected"),
    [
        ((), "7", [*"7", "<eos>"]),
        # Ids, and special tokens by their text, end it as those of the model do.
        (("=",), "7=", "7="),
        (("1=",), "21=", "21="),
        ((7,), "5", [*"5", "<eos>"]),
        (("<eos>",), "7", [*"7", "<eos>"]),
        # An engine would have stopped before the response was over.
        (("=",), "7=7", "the response contains '=', at which the engines stop"),
        (("7=",), "7=7", "the response contains '7=', at which the engines stop"),
    ],
)
def test_what_ends_a_response_in_a_search_ends_one_here(base, tmp_path, stop, response, expected):
    tokenizer = AutoTokenizer.from_pretrained(base)
    encoder = _encoder(base, PromptRenderer(tokenizer, TaskSection()), tiny_model(vocabulary=16), stop)
    file = write(tmp_path / "rows.jsonl", json.dumps({"prompt": "1+1=", "response": response}))
    if "engines" in expected:
        with pytest.raises(TaskError, match=expected):
            read_rows([file], encoder)
    else:
        (row,) = read_rows([file], encoder)
        assert tokenizer.convert_ids_to_tokens(row.response_ids.tolist()) == [*expected]


@pytest.fixture
def pairs(tmp_path) -> Path:
    """Ten sums of one-digit numbers."""
    rows = [{"prompt": f"{a}+1=", "response": str(a + 1)} for a in range(10)]
    return write(tmp_path / "pairs.jsonl", *map(json.dumps, rows))


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make(base, plan, *, resume=False, stop_after=None, **train) -> list[dict[str, float]]:
    """Run the training. Returns the metrics of each step."""
    config = Config.model_validate(
        {
            "model": {"path": str(base), "dtype": "float32"},
            "train": {"gpu": "cpu", **SETTINGS, **train},
            "sft": {"learning_rate": 0.02},
        }
    )
    steps: list[dict[str, float]] = []
    finished = sft(
        config, plan, resume=resume, device="cpu", stop=lambda: len(steps) == stop_after, on_step=steps.append
    )
    assert finished == plan.out.exists()
    return steps


@pytest.mark.slow
def test_the_model_learns_its_pairs_and_is_saved_as_a_model_directory(base, pairs, tmp_path):
    plan = Plan([pairs], tmp_path / "out", held_out=pairs, epochs=60, batch_size=5)
    steps = make(base, plan)
    assert len(steps) == 120
    assert steps[0]["held_out_loss_before"] > 2.0
    assert steps[-1]["held_out_loss"] < 0.05
    model, tokenizer = AutoModelForCausalLM.from_pretrained(plan.out), AutoTokenizer.from_pretrained(plan.out)
    prompt = tokenizer("7+1=", return_tensors="pt").input_ids
    assert model.generate(prompt, max_new_tokens=4, do_sample=False)[0, 4:].tolist() == [*tokenizer.encode("8"), 1]
    assert not plan.work.exists()


def test_the_loss_is_the_mean_cross_entropy_of_all_response_tokens(base, pairs, tmp_path):
    (step,) = make(base, Plan([pairs], tmp_path / "out", steps=1, batch_size=10), micro_batch_tokens=16)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    losses = []
    for row in map(json.loads, pairs.read_text().splitlines()):
        prompt, answer = tokenizer.encode(row["prompt"]), [*tokenizer.encode(row["response"]), 1]
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="none").tolist()
    assert step["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_a_model_whose_generation_settings_transformers_would_not_save_is_saved(base, pairs, tmp_path):
    settings = base / "generation_config.json"
    settings.write_text('{"temperature": 0.6, "top_p": 0.9, "eos_token_id": 1}')
    plan = Plan([pairs], tmp_path / "out", steps=1)
    make(base, plan)
    assert (plan.out / "generation_config.json").read_bytes() == settings.read_bytes()
    AutoModelForCausalLM.from_pretrained(plan.out)


def test_a_model_that_cannot_be_written_leaves_its_checkpoint_and_nothing_else(base, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr("tba.trainer.sft.write_model", lambda *_: json.loads("{"))
    with pytest.raises(json.JSONDecodeError):
        make(base, Plan([pairs], tmp_path / "out", steps=1))
    assert {path.name for path in tmp_path.glob("*out*")} == {"out.work"}


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(2, 3), *slow((1,), (3,))])
def test_a_resumed_training_writes_the_same_weights_bit_for_bit(base, pairs, tmp_path, stops):
    whole = Plan([pairs], tmp_path / "whole", held_out=pairs, epochs=2, batch_size=3)
    broken = Plan([pairs], tmp_path / "broken", held_out=pairs, epochs=2, batch_size=3)
    steps = make(base, whole)
    parts = [make(base, broken, stop_after=stop, resume=index > 0) for index, stop in enumerate(stops)]
    parts.append(make(base, broken, resume=True))
    assert [row["loss"] for row in itertools.chain(*parts)] == [row["loss"] for row in steps]
    assert sha256_of(broken.out / "model.safetensors") == sha256_of(whole.out / "model.safetensors")


def test_every_epoch_has_every_row_once_in_its_own_order(base, pairs, tmp_path):
    config = Config.model_validate({"model": {"path": str(base)}, "train": {"gpu": "cpu", **SETTINGS}})
    plan = Plan([pairs], tmp_path / "out", epochs=2, batch_size=4)
    job = Job(config, plan, resume=False, device=torch.device("cpu"))
    order = [row.id for step in range(job.steps) for row in job.rows_of(step)]
    job.close()
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]


def test_a_step_that_runs_out_of_memory_gives_advice(base, pairs, tmp_path, monkeypatch):
    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Learner, "accumulate", run_out)
    with pytest.raises(OutOfMemory, match=r"lower train\.micro_batch_tokens.*--resume"):
        make(base, Plan([pairs], tmp_path / "sft", steps=1, batch_size=4))


@pytest.mark.parametrize("line", ['{"prompt": "1+1="}', ""])
def test_a_training_that_is_refused_leaves_nothing_behind(base, tmp_path, line):
    data = write(tmp_path / "bad.jsonl", line)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(TaskError):
        make(base, Plan([data], tmp_path / "models/new/out"))
    assert set(tmp_path.rglob("*")) == before


def test_resuming_with_other_data_is_rejected(base, pairs, tmp_path):
    plan = Plan([pairs], tmp_path / "out", epochs=2, batch_size=3)
    make(base, plan, stop_after=2)
    with pytest.raises(UsageError, match="pass --resume"):
        make(base, plan)
    write(pairs, '{"prompt": "1+1=", "response": "2"}')
    with pytest.raises(UsageError, match="other data"):
        make(base, plan, resume=True)


def test_a_pair_and_the_last_message_of_a_conversation_end_with_the_end_token(encoder, tmp_path):
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    pair = '{"prompt": "1+1=", "answer": 2, "source": "me"}'
    file = write(tmp_path / "rows.jsonl", pair, "", json.dumps({"messages": messages}))
    tokenizer = encoder.renderer.tokenizer
    tokenizer.chat_template = CHAT + "{% if not add_generation_prompt %}=={% endif %}"
    first, second = read_rows([file], encoder)
    assert first.prompt_ids.tolist() == tokenizer.encode("1+1=")
    assert first.response_ids.tolist() == [*tokenizer.encode("2"), 1]
    assert tokenizer.decode(second.prompt_ids) == "1+1="
    assert tokenizer.decode(second.response_ids) == "2=<eos>"


def test_a_rendered_prompt_begins_with_one_begin_token_in_a_demonstration_and_in_a_searcher(encoder, tmp_path):
    tokenizer = encoder.renderer.tokenizer
    begin = tokenizer.bos_token = "<eos>"
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 1)])
    tokenizer.chat_template = "{{ bos_token }}" + CHAT
    messages = [USER, {"role": "assistant", "content": "2"}]
    (row,) = read_rows([write(tmp_path / "rows.jsonl", json.dumps({"messages": messages}))], encoder)
    assert row.prompt_ids.tolist() == [1, *tokenizer.encode("1=", add_special_tokens=False)]
    rendered = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    for text in (rendered, "1="):
        assert encoder.renderer.ids(Prompt("", text)) == row.prompt_ids.tolist()


USER = {"role": "user", "content": "1"}
ASSISTANT = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps([USER, ASSISTANT])},
        {"prompt": [USER], "response": "2"},
        {"prompt": json.dumps([USER]), "answer": 2},
    ],
)
def test_messages_as_the_text_of_json_and_a_prompt_of_messages_are_rendered_as_messages(encoder, tmp_path, row):
    encoder.renderer.tokenizer.chat_template = CHAT
    rows = read_rows(
        [write(tmp_path / "rows.jsonl", json.dumps({"messages": [USER, ASSISTANT]}), json.dumps(row))], encoder
    )
    same = [(one.prompt_ids.tolist(), one.response_ids.tolist()) for one in rows]
    assert same[0] == same[1]


def test_a_pair_whose_prompt_is_another_json_is_trained_on_as_text(encoder, tmp_path):
    encoder.renderer.tokenizer.chat_template = CHAT
    (row,) = read_rows([write(tmp_path / "rows.jsonl", '{"prompt": "[1]", "response": "2"}')], encoder)
    assert row.prompt_ids.tolist() == encoder.renderer.tokenizer.encode("[1]")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Expecting"),
        ("[1]", "JSON object"),
        ('{"prompt": "1"}', "`response`"),
        ('{"prompt": "1", "response": true}', "text or messages"),
        ('{"prompt": "1", "response": NaN}', "the column response has nan, which is neither"),
        ('{"prompt": "1", "response": ""}', "empty"),
        ('{"prompt": "", "response": "2"}', "no tokens"),
        ('{"prompt": "1111111111", "response": "22"}', "13 tokens, of at most 12"),
        ('{"messages": "hello"}', "list of objects"),
        (json.dumps({"messages": [USER]}), "assistant"),
        (json.dumps({"messages": [USER, {"role": "assistant", "content": ""}]}), "empty"),
        ('{"prompt_ids": [3], "response_ids": [4], "stop_reason": "length"}', "not finished \\(length\\)"),
        ('{"prompt_ids": [3], "response_ids": 5}', "lists of token ids"),
        ('{"prompt_ids": [3], "response_ids": [4, 1], "text": 5}', "no `text`"),
        ('{"prompt_ids": [3], "response_ids": [4, 3, 4], "loss_mask": [1, 0, 1]}', "is an episode"),
        ('{"prompt_ids": [3], "response_ids": [4, 1], "error": "boom"}', "has an error"),
        ('{"prompt_ids": [3], "response_ids": [4, 1], "text": "2"}', "no `prompt`"),
        ('{"prompt_ids": [3], "response_ids": [16]}', "ids below 16"),
        ('{"prompt_ids": null, "response_ids": [1], "text": "", "prompt": ""}', "nothing is left of the response"),
    ],
)
def test_an_invalid_row_is_reported_with_file_and_line(encoder, tmp_path, line, words):
    file = write(tmp_path / "rows.jsonl", '{"prompt": "1+1=", "response": "2"}', line)
    with pytest.raises(TaskError, match=words) as raised:
        read_rows([file], encoder)
    assert str(raised.value).startswith(f"{file}:2: ")


def test_a_chat_template_that_changes_or_rejects_the_prompt_is_reported(encoder, tmp_path):
    messages = [USER, {"role": "assistant", "content": "2"}]
    file = write(tmp_path / "rows.jsonl", json.dumps({"messages": messages}))
    for template, words in (
        ("{{ messages | length }}{{ messages[0].content }}", "differently"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        (None, "no chat template"),
    ):
        encoder.renderer.tokenizer.chat_template = template
        with pytest.raises(TaskError, match=words):
            read_rows([file], encoder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        # What a string of search.stop leaves out of the text.
        ({"text": "1", "response_ids": "1=="}, ""),
        ({"text": "1"}, "do not spell its text, '1'"),
        ({"text": ""}, "do not spell its text, ''"),
        ({"text": "1", "response_ids": "1=2"}, "do not spell its text"),
        ({"prompt": "1+1"}, "do not spell its prompt, '1\\+1'"),
        ({"prompt_ids": "1+1=="}, "do not spell its prompt"),
    ],
)
def test_an_exported_row_is_used_if_its_ids_spell_all_of_its_prompt_and_text(encoder, tmp_path, change, words):
    encode = encoder.renderer.tokenizer.encode
    row = {"prompt": "1+1=", "prompt_ids": "1+1=", "text": "12", "response_ids": "12<eos>"} | change
    ids = {key: encode(text) for key, text in row.items() if key.endswith("_ids")}
    file = write(tmp_path / "rows.jsonl", json.dumps(row | ids))
    encoder = replace(encoder, stop=["=="])
    if words:
        with pytest.raises(TaskError, match=words):
            read_rows([file], encoder)
    else:
        # As they were sampled, without an end token behind a string that ended them.
        assert [row.response_ids.tolist() for row in read_rows([file], encoder)] == [ids["response_ids"]]


def test_a_tokenizer_of_another_model_is_reported(encoder, tmp_path):
    file = write(tmp_path / "rows.jsonl", '{"prompt": "1+1=", "response": "2"}')
    smaller = Encoder(encoder.renderer, encoder.end_ids, vocabulary=4, longest=12)
    with pytest.raises(TaskError, match="but the model has 4"):
        read_rows([file], smaller)
