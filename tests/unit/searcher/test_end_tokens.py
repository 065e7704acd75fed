"""Which tokens end a response, from every file of a model that names one, and the warning if a chat ends otherwise."""

import json

import pytest

pytest.importorskip("transformers")

from tba.common.config import Config, TaskSection
from tba.common.errors import ConfigError
from tba.common.rendering import PromptRenderer
from tba.common.weights.model_files import eos_ids
from tba.searcher.build import check_task_and_prompts
from tba.searcher.engines.stopping import Stopping, unstopped_turn
from tba.searcher.tasks.task import Prompt
from tba.tests.helpers.chat_tokenizers import KINDS, chat_tokenizer

CHAT, RAW = Prompt("p", messages=[("user", "What is 2 + 3?")]), Prompt("p", "What is 2 + 3?")


@pytest.fixture
def write(tmp_path):
    """Write the files of a model of 100 token ids; `tokenizer` is the content of tokenizer_config.json."""

    def files(generation, config, tokenizer):
        contents = {
            "generation_config": generation,
            "config": {"vocab_size": 100, **config},
            "tokenizer_config": tokenizer,
        }
        for name, content in contents.items():
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 8, "content": "<|im_end|>"}]}))
        return tmp_path

    return files


NAMED = {"eos_token": "<|im_end|>"}
DECODER = {"added_tokens_decoder": {"9": {"content": "<|im_end|>"}}}


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (None, {}, None, []),
        (None, {"eos_token_id": 3}, None, [3]),
        ({"eos_token_id": [1, 7]}, {}, None, [1, 7]),
        ({"eos_token_id": [1, 7]}, {"eos_token_id": 3}, None, [1, 7, 3]),
        ({"eos_token_id": []}, {"eos_token_id": None}, {}, []),
        (None, {}, NAMED, [8]),
        (None, {}, {**NAMED, **DECODER}, [9]),
        (None, {}, {"eos_token": {"content": "<|im_end|>", "special": True}}, [8]),
        ({"eos_token_id": 3}, {"eos_token_id": 3}, NAMED, [3, 8]),
        ({"eos_token_id": 8}, {}, NAMED, [8]),
        ({"eos_token_id": None}, {"eos_token_id": 3}, None, [3]),
        (None, {"text_config": {"eos_token_id": [4, 5]}}, None, [4, 5]),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 4}}, NAMED, [4, 8]),
        ({"eos_token_id": 1}, {"eos_token_id": 4, "text_config": {"eos_token_id": [4, 5]}}, None, [1, 4, 5]),
        ({"eos_token_id": 3}, {}, {"eos_token": None}, [3]),
        ({"eos_token_id": 3}, {}, {"eos_token": "<of another model>"}, [3]),
    ],
)
def test_the_end_tokens_are_those_of_both_configurations_and_of_the_tokenizer(
    write, generation, config, tokenizer, expected
):
    assert eos_ids(write(generation, config, tokenizer)) == expected


@pytest.mark.parametrize("vocabulary", [{"a": 0, "</s>": 2}, [["<unk>", 0.0], ["a", -1.0], ["</s>", -2.0]]])
def test_the_end_token_may_be_named_in_the_special_tokens_and_defined_in_the_vocabulary(write, vocabulary):
    directory = write(None, {"eos_token_id": 1}, {})
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert eos_ids(directory) == [1, 2]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("generation_config.json", "{"),
        ("generation_config.json", "[1]"),
        ("tokenizer_config.json", '{"eos_token": {"a": 1}}'),
        ("tokenizer.json", '{"added_tokens": [{"id": 1}]}'),
    ],
)
def test_malformed_files_of_a_model_are_refused_with_its_directory(write, file, text):
    directory = write(None, {"eos_token_id": 1}, {"eos_token": "</s>"})
    (directory / file).write_text(text)
    with pytest.raises(ConfigError, match="malformed"):
        eos_ids(directory)


def test_the_end_token_of_the_loaded_tokenizer_counts_where_no_file_names_it(write):
    assert eos_ids(write(None, {"eos_token_id": 3}, None), 5) == [3, 5]
    # One that was added to the tokenizer and not to the model is never sampled.
    assert eos_ids(write(None, {"eos_token_id": 3, "vocab_size": 100}, None), 100) == [3]
    with pytest.raises(ConfigError, match="end token of the tokenizer has the id 100, and the model has ids below 100"):
        eos_ids(write(None, {"vocab_size": 100}, None), 100)


@pytest.mark.parametrize("file", ["generation_config", "config"])
@pytest.mark.parametrize("value", [True, -1, 100, "<|im_end|>", 12.0, ["12"], [1, None], {"a": 1}])
def test_a_malformed_end_token_is_refused_with_its_file(write, file, value):
    broken = {"eos_token_id": value}
    files = (broken, {}, None) if file == "generation_config" else (None, broken, None)
    with pytest.raises(
        ConfigError, match=f"{file}.json: eos_token_id is .* needs a token id below 100 or a list of them"
    ):
        eos_ids(write(*files))


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_that_ends_with_a_token_that_ends_no_response_is_named_with_the_setting(kind):
    tokenizer, end = chat_tokenizer(kind), KINDS[kind][3]
    renderer, other = PromptRenderer(tokenizer, TaskSection()), tokenizer.encode("7", add_special_tokens=False)[-1]
    warning = unstopped_turn(Stopping(tokenizer, (), [other]), renderer, [RAW, CHAT])
    assert f"the chat template ends an answer with {end!r}" in warning
    assert f'set search.stop = ["{end}"]' in warning
    for right in (Stopping(tokenizer, (), [other, tokenizer.eos_token_id]), Stopping(tokenizer, (end,), [other])):
        assert unstopped_turn(right, renderer, [RAW, CHAT]) == ""
    # A string is looked for in the text, which has no special tokens.
    assert unstopped_turn(Stopping(tokenizer, (end[:-1],), [other]), renderer, [CHAT])
    # A prompt that no template renders needs no end of a turn.
    assert unstopped_turn(Stopping(tokenizer, (), [other]), renderer, [RAW]) == ""


# What a template writes behind each message, and what `search.stop` needs to name; "" where the model ends a response.
TURNS = [
    # An added token that is not special, and plain text.
    ("{c}<|turn|>", "<|turn|>"),
    ("{c}\n### End\n", "### End"),
    # Between two messages only.
    ("{c}{% if not loop.last %}<|turn|>{% endif %}", "<|turn|>"),
    ("{% if m['role'] == 'user' %}\n### Human: {% else %} ### Bot: {% endif %}{c}", "### Human:"),
    ("{% if m['role'] == 'user' %}<|im_start|>{% else %}<|turn|>{% endif %}{c}", "<|im_start|>"),
    # Of a content that the template changes.
    ("{{ m['content'] | upper }}<|turn|>", "<|turn|>"),
    ("{{ m['content'] | trim | title | tojson }}END<|turn|>", '"END'),
    ("{c}<|im_end|>\n", ""),
    ("{{ m['content'] | upper }}{% if not loop.last %}<|im_end|>{% endif %}", ""),
    # Phi-3's: the end of a turn, and at the end of a conversation an end token behind it.
    ("{c}<|turn|>\n{% if loop.last %}<|im_end|>{% endif %}", "<|turn|>"),
    ("{c}\n### End\n{% if loop.last %}<|im_end|>{% endif %}", "### End"),
    ("{c}<|turn|>\n{% if loop.last and not add_generation_prompt %}<|im_end|>{% endif %}", "<|turn|>"),
    # Command-R's: the end token ends every turn, behind another token.
    ("{c}<|turn|><|im_end|>", ""),
    ("{c}<|turn|>\n<|im_end|>\n", ""),
    # gpt-oss's: an answer ends with one token at the end of a conversation, and with another one before.
    ("{c}{% if loop.last %}<|im_end|>{% else %}<|turn|>{% endif %}", ""),
    # OLMo's, and one that ends the whole conversation.
    ("{c}<|im_end|>{% if not loop.last %}\n{% endif %}", ""),
    ("{c}\n{% if loop.last %}<|im_end|>{% endif %}", ""),
    # Nothing that could end it.
    ("{c}\n", ""),
]


@pytest.mark.parametrize(("turn", "named"), TURNS)
def test_what_the_template_itself_writes_behind_an_answer_is_compared_with_what_ends_one(turn, named):
    tokenizer = chat_tokenizer("qwen 2.5")
    tokenizer.add_tokens(["<|turn|>"], special_tokens=False)
    tokenizer.chat_template = "{% for m in messages %}" + turn.replace("{c}", "{{ m['content'] }}") + "{% endfor %}"
    renderer, ends = PromptRenderer(tokenizer, TaskSection()), [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    warning = unstopped_turn(Stopping(tokenizer, (), ends), renderer, [CHAT])
    assert (f"set search.stop = [{json.dumps(named)}]" in warning) if named else warning == ""
    # What the warning says to set helps.
    assert unstopped_turn(Stopping(tokenizer, (named,), ends), renderer, [CHAT]) == "" or not named


@pytest.mark.slow
def test_doctor_and_check_say_that_a_chat_does_not_end(tmp_path, monkeypatch):
    tokenizer = chat_tokenizer("qwen 2.5")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer), "eos_token_id": 5}))
    config = Config.model_validate({"model": {"path": str(tmp_path)}, "task": {"template": "chat"}})
    assert "set search.stop" in check_task_and_prompts(config)
    stopped = config.model_copy(update={"search": config.search.model_copy(update={"stop": ("<|im_end|>",)})})
    assert check_task_and_prompts(stopped) == ""
