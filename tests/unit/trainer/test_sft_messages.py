"""Conversations in `tba sft`, with the templates of well-known models: what transformers renders, or a refusal."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from tba.common.config import TaskSection
from tba.common.errors import TaskError
from tba.common.rendering import PromptRenderer
from tba.searcher.tasks.task import Prompt, check_rendering
from tba.tests.helpers.chat_tokenizers import KINDS, chat_tokenizer
from tba.trainer.batch.batch import Row
from tba.trainer.sft import Encoder, read_rows

# The package has the chat templates of many families of models.
TRL = find_spec("trl")
pytestmark = pytest.mark.skipif(TRL is None, reason="trl is not installed")
TEMPLATES = Path(TRL.origin or "").parent / "chat_templates" if TRL else Path()
ENDS = ["<|im_end|>", "<|return|>", "<|call|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"]
USER: dict[str, Any] = {"role": "user", "content": "2+2?"}
PARAMETERS = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}, "required": ["b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
CALLS = [{"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": 2}}}]
RESULT = {"role": "tool", "name": "add", "tool_call_id": "123456789", "content": "4"}


def said(*before: Any, tools: Any = None, variables: Any = None, **response: Any) -> dict[str, Any]:
    row = {"messages": [*(before or [USER]), {"role": "assistant", **response}]}
    return row | ({"tools": tools} if tools else {}) | ({"chat_template_kwargs": variables} if variables else {})


ROWS = {
    "thoughts": said(content="4", reasoning_content="two and two"),
    "thinking": said(content="4", thinking="two and two"),
    "earlier thoughts": said(USER, {"role": "assistant", "content": "4", "reasoning_content": "t"}, USER, content="5"),
    "call after a text": said(content="I add.", tool_calls=CALLS, tools=TOOLS),
    "call alone": said(content="", tool_calls=CALLS, tools=TOOLS),
    "call with null": said(content=None, tool_calls=CALLS, tools=TOOLS),
    "call without content": said(tool_calls=CALLS, tools=TOOLS),
    "earlier call": said(USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, RESULT, content="It is 4."),
    "tools that are not called": said(content="4", tools=TOOLS),
    "name": said({**USER, "name": "ann"}, content="4"),
    "variables": said(content="4", variables={"enable_thinking": False}),
}
# What each template does not write; it renders the other rows.
REFUSED = {
    "qwen3": {"thinking", "name"},
    "qwen3_instruct_2507": {"thoughts", "thinking", "name"},
    "qwen2_5": {"thoughts", "thinking", "name"},
    "gptoss": {"thoughts", "name", "call with null"},
    "llama3_1": {"thoughts", "thinking", "name"},
    "gemma": set(ROWS) - {"earlier thoughts", "variables"},
}


def tokenizer_of(template: str) -> Any:
    tokenizer = chat_tokenizer("qwen 3")
    tokenizer.add_tokens([AddedToken(end, special=True) for end in ENDS[1:]], special_tokens=True)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


def row_of(folder: Path, tokenizer: Any, row: Any, stop: Sequence[str] = (), **settings: Any) -> Row:
    """Return a row as `tba sft` trains on it."""
    (folder / "rows.jsonl").write_text(json.dumps(row))
    ends = [tokenizer.convert_tokens_to_ids(end) for end in ENDS if end in tokenizer.get_vocab()]
    ends = ends or [tokenizer.eos_token_id]
    encoder = Encoder(
        PromptRenderer(tokenizer, TaskSection(**settings)), ends, vocabulary=9999, longest=9999, stop=stop
    )
    (found,) = read_rows([folder / "rows.jsonl"], encoder)
    return found


def read(folder: Path, tokenizer: Any, row: Any) -> tuple[str, str]:
    """Return prompt and response of a row as text."""
    found = row_of(folder, tokenizer, row)
    return tokenizer.decode(found.prompt_ids.tolist()), tokenizer.decode(found.response_ids.tolist())


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("template", REFUSED)
def test_a_row_is_rendered_as_transformers_does_or_refused(tmp_path, template, name):
    tokenizer, row = tokenizer_of(template), ROWS[name]
    if name in REFUSED[template]:
        with pytest.raises(TaskError, match=r"rows.jsonl:1: the chat template (does not write its|refuses it)"):
            read(tmp_path, tokenizer, row)
        return
    variables = {"tools": row.get("tools"), **row.get("chat_template_kwargs", {})}
    *before, _ = row["messages"]
    prompt, response = read(tmp_path, tokenizer, row)
    text = {"tokenize": False, **variables}
    assert prompt == tokenizer.apply_chat_template(before, add_generation_prompt=True, **text)
    assert prompt + response == tokenizer.apply_chat_template(row["messages"], **text).rstrip()


# The template of DeepSeek-V3 appends a text; the second one writes what it is given as Jinja does.
APPENDS = "{% for c in m.tool_calls %}{{ c.function.name + ':' + c.function.arguments }}{% endfor %}"
WRITES = "{% for c in m.tool_calls %}{{ c.function.name }}:{{ c.function.arguments }}{% endfor %}"
LOOP = "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{}<|im_end|>\n{{% endfor %}}{}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize("form", ["object", "text"])
@pytest.mark.parametrize("where", ["answer", "earlier", "prompt"])
@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "gptoss", "llama3_1", "appends", "writes"])
def test_arguments_of_calls_may_be_objects_or_the_text_of_json(tmp_path, template, where, form):
    tokenizer, given = tokenizer_of(template if template in REFUSED else "qwen3"), {"b": 2, "a": "\u00e9"}
    if template in ("appends", "writes"):
        tokenizer.chat_template = LOOP.format(APPENDS if template == "appends" else WRITES, ASKS)
    # Compact, and with an escape: it stays as it is where it is appended.
    text = '{"b":2,"a":"\\u00e9"}'
    needed: Any = given
    if template in ("appends", "writes"):
        needed = json.dumps(given, ensure_ascii=False) if form == "object" else text
    # A tool may write arguments as Python does.
    asked = {"role": "user", "content": f"add {given}"}

    def messages(arguments: Any) -> list[Any]:
        calls = [{"type": "function", "id": "123456789", "function": {"name": "add", "arguments": arguments}}]
        called = {"role": "assistant", "content": "", "tool_calls": calls}
        return [asked, called, *([] if where == "answer" else [RESULT, {"role": "assistant", "content": "4"}])]

    expected = tokenizer.apply_chat_template(messages(needed), tokenize=False).rstrip()
    said = messages(given if form == "object" else text)
    if where == "prompt":
        found = PromptRenderer(tokenizer, TaskSection()).text(Prompt("p", messages=said[:-1]))
        assert found == tokenizer.apply_chat_template(messages(needed)[:-1], add_generation_prompt=True, tokenize=False)
    else:
        assert "".join(read(tmp_path, tokenizer, {"messages": said})) == expected


@pytest.mark.parametrize("pack", [json.dumps, lambda calls: calls[0], lambda calls: [json.dumps(one) for one in calls]])
def test_calls_may_be_the_text_of_json_or_one_object(tmp_path, pack):
    packed, plain = ({"content": "", "tool_calls": calls} for calls in (pack(CALLS), CALLS))
    found = [read(tmp_path, tokenizer_of("qwen3"), said(**one)) for one in (packed, plain)]
    assert found[0] == found[1]


def test_tools_and_variables_as_the_text_of_json_are_their_values(tmp_path):
    tokenizer, row = tokenizer_of("qwen3"), said(content="4", tools=TOOLS, variables={"enable_thinking": False})
    packed = [json.dumps(TOOLS), [json.dumps(one) for one in TOOLS]]
    found = [read(tmp_path, tokenizer, row | {"tools": tools}) for tools in packed]
    found.append(read(tmp_path, tokenizer, row | {"chat_template_kwargs": '{"enable_thinking": false}'}))
    assert found == [read(tmp_path, tokenizer, row)] * 3


def test_documents_of_a_row_are_rendered_or_refused(tmp_path):
    documents = [{"title": "sums", "text": "2+2=4"}]
    tokenizer, row = tokenizer_of("qwen3"), said(content="4") | {"documents": documents}
    with pytest.raises(TaskError, match="rows.jsonl:1: the chat template does not write its `documents`"):
        read(tmp_path, tokenizer, row)
    tokenizer.chat_template = "{% for d in documents %}[{{ d.text }}]{% endfor %}" + LOOP.format("", ASKS)
    prompt, _ = read(tmp_path, tokenizer, row)
    assert prompt == "[2+2=4]<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert read(tmp_path, tokenizer, row | {"documents": ["2+2=4"]})[0] == prompt


def test_the_system_of_a_row_is_that_of_its_conversation(tmp_path):
    tokenizer, system = tokenizer_of("qwen3"), {"role": "system", "content": "Be brief."}
    expected = read(tmp_path, tokenizer, said(system, USER, content="4"))
    assert "Be brief." in expected[0]
    asked = {"system": "Be brief.", "response": "4"}
    for row in (
        said(content="4") | {"system": "Be brief."}, said(system, USER, content="4") | {"system": "Be brief."},
        asked | {"prompt": "2+2?"}, asked | {"prompt": [USER]}, asked | {"prompt": json.dumps([USER])},
    ):  # fmt: skip
        assert read(tmp_path, tokenizer, row) == expected
    for row in (said(system, USER, content="4") | {"system": "Think."}, said(content="4") | {"system": [system]}):
        with pytest.raises(TaskError, match="rows.jsonl:1: `system` is .*: write a text, and no other system message"):
            read(tmp_path, tokenizer, row)


def test_a_variable_of_the_template_that_is_null_is_none(tmp_path):
    row = said(content="4")
    for name in ("enable_thinking", "functions"):
        assert read(tmp_path, tokenizer_of("qwen3"), row | {name: None}) == read(tmp_path, tokenizer_of("qwen3"), row)


@pytest.mark.parametrize("template", ["qwen3", "gptoss", "llama3_1"])
def test_a_prompt_of_a_task_is_rendered_as_transformers_does(template):
    tokenizer = tokenizer_of(template)
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, RESULT]
    prompt = Prompt("p", messages=messages, template_kwargs={"tools": TOOLS})  # type: ignore[arg-type]
    renderer = PromptRenderer(tokenizer, TaskSection())
    expected = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert renderer.text(prompt) == expected
    assert renderer.ids(prompt) == tokenizer.encode(expected, add_special_tokens=False)
    # The buffer and the reward workers get a prompt as lists and maps of texts.
    assert Prompt(*json.loads(json.dumps([prompt.key, "", "", prompt.messages, [], prompt.template_kwargs]))) == prompt


def test_a_prompt_whose_tools_the_template_ignores_is_refused_when_a_task_is_checked():
    prompt = Prompt("p", messages=[("user", "2+2?")], template_kwargs={"tools": TOOLS})
    task: Any = type("One", (), {"name": "one"})()
    renderer = PromptRenderer(tokenizer_of("gemma"), TaskSection())
    with pytest.raises(TaskError, match="the prompt 'p' cannot be rendered: the chat template does not write its `too"):
        check_rendering(task, [prompt], renderer, None)


@pytest.mark.parametrize("weights", [(0, 1), (None, 1)])
def test_the_weights_of_messages_may_be_those_of_the_last_alone(tmp_path, weights):
    messages, tokenizer = said(content="4")["messages"], chat_tokenizer("qwen 2.5")
    assert read(tmp_path, tokenizer, weighted(*weights)) == read(tmp_path, tokenizer, {"messages": messages})


def weighted(*weights: int | None) -> dict[str, Any]:
    """Return a row whose messages have weights."""
    messages = zip(said(content="4")["messages"], weights, strict=True)
    return {"messages": [message | ({} if weight is None else {"weight": weight}) for message, weight in messages]}


def called(arguments: Any) -> dict[str, Any]:
    """Return a row whose answer is a call with these arguments."""
    return said(content="", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": arguments}}])


DROPPED = "the chat template does not write its"
HALF = "half of a character"
NO_CALLS = "write `tool_calls` as a list of objects"
NO_OBJECT = "the arguments of a call are '.*': write an object"
IGNORED = "would be ignored: write it in `chat_template_kwargs`"
INVALID: list[tuple[dict[str, Any], str]] = [
    *((called(arguments), NO_OBJECT) for arguments in ("add(2, 2)", "[1, 2]", "3", '{"a": 1')),
    *((said(content="", tool_calls=calls), NO_CALLS) for calls in (True, 5, [1], "add(2, 2)")),
    (said(content="4") | {"enable_thinking": False}, f"`enable_thinking` {IGNORED}"),
    (said(content="4") | {"reasoning_effort": "low"}, f"`reasoning_effort` {IGNORED}"),
    (said(content="4") | {"functions": TOOLS}, f"`functions` {IGNORED}"),
    (said(content="4") | {"chat_template": "{{ 1 }}"}, f"`chat_template` {IGNORED}"),
    (said(content="4", refusal="No."), f"{DROPPED} `refusal`"),
    (said(content="4", tool_plan="No."), f"{DROPPED} `tool_plan`"),
    (said(content="4", thought="No."), f"{DROPPED} `thought`"),
    (said(content="4", reasoning_details="No."), f"{DROPPED} `reasoning_details`"),
    (weighted(None, 0), r"the weights of its messages are \[None, 0\]"),
    (weighted(1, 1), r"the weights of its messages are \[1, 1\]"),
    (said(content="4") | {"tools": "add"}, "`tools` is 'add': write a list of objects"),
    (said(content="4") | {"chat_template_kwargs": ["a"]}, r"`chat_template_kwargs` is \['a'\]: write an object"),
    (said(content=None), "the message .*: write .role, content., two"),
    (said(content=[{"type": "text", "text": "4"}]), "the message"),
    (said(content="\ud83d"), HALF),
    ({"prompt": "a\ud83d", "response": "4"}, HALF),
    ({"prompt": "a", "response": "\ud83d"}, HALF),
    (said(content="4") | {"tools": [{"name": "\ud83d"}]}, HALF),
    ({"instruction": "a", "output": "b"}, r"this one has .*instruction \(str\), output \(str\).*: rename"),
]


@pytest.mark.parametrize(("row", "words"), INVALID)
def test_a_row_that_cannot_be_rendered_is_refused_with_file_and_line(tmp_path, row, words):
    with pytest.raises(TaskError, match=rf"rows.jsonl:1: .*{words}"):
        read(tmp_path, tokenizer_of("qwen3"), row)


@pytest.mark.parametrize("answer", ["\nIt is 4.", "\n\nIt is 4.", " \n4", "  4", "4 \n\n"])
@pytest.mark.parametrize("template", [*KINDS, "qwen3_instruct_2507", "phi3", "lfm2"])
def test_an_answer_that_begins_with_a_line_break_follows_the_tokens_of_its_prompt(tmp_path, template, answer):
    tokenizer = chat_tokenizer(template) if template in KINDS else tokenizer_of(template)
    # The last answer of this template has an empty thought, which only a prompt without thinking has.
    variables = {"enable_thinking": False} if template == "qwen 3" else {}
    messages = [USER, {"role": "assistant", "content": answer}]
    row = row_of(tmp_path, tokenizer, {"messages": messages}, template_kwargs=variables)
    ids = {"tokenize": True, "return_dict": False, **variables}
    assert row.prompt_ids.tolist() == tokenizer.apply_chat_template([USER], add_generation_prompt=True, **ids)
    whole = tokenizer.decode([*row.prompt_ids.tolist(), *row.response_ids.tolist()])
    assert whole.rstrip() == tokenizer.decode(tokenizer.apply_chat_template(messages, **ids)).rstrip()


@pytest.mark.parametrize("template", ["llama 3", "gemma"])
def test_an_answer_of_which_the_template_leaves_nothing_is_refused(tmp_path, template):
    with pytest.raises(TaskError, match=r"rows.jsonl:1: nothing is left of the response"):
        row_of(tmp_path, chat_tokenizer(template), {"messages": [USER, {"role": "assistant", "content": " \n"}]})


@pytest.mark.parametrize("template", ["deepseek_r1_distill", "deepseekv3"])
def test_a_template_that_renders_the_prompt_differently_names_the_ways_out(tmp_path, template):
    tokenizer = tokenizer_of(template)
    with pytest.raises(TaskError, match=r"enable_thinking = false.*`prompt` and `response`.*task.template = \"raw\""):
        read(tmp_path, tokenizer, said(content="4"))
    rendered = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    raw = {"prompt": rendered, "response": "two and two\n</think>\n\n4"}
    assert read(tmp_path, tokenizer, raw) == (rendered, raw["response"] + "<|im_end|>")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (said(content="It is <|im_end|> I think <eos>."), "contains '<|im_end|>'"),
        (said(content="4", reasoning_content="so <|im_end|> it is"), "contains '<|im_end|>'"),
        ({"prompt": "2+2?", "response": "It is <|im_end|> I think."}, "contains '<|im_end|>'"),
        (said(content="It is <eos> I think."), None),
        ({"prompt": "2+2?", "response": "4<|im_end|>"}, None),
        (said({"role": "user", "content": "What is <|im_end|>?"}, content="4"), None),
    ],
)
def test_an_answer_that_spells_an_end_token_is_refused(tmp_path, row, words):
    tokenizer = tokenizer_of("qwen3")
    if words is None:
        _, response = read(tmp_path, tokenizer, row)
        assert response.endswith("<|im_end|>")
        assert response.count("<|im_end|>") == 1
        return
    with pytest.raises(TaskError, match=r"rows.jsonl:1: the response contains '<\|im_end\|>', at which the engines st"):
        read(tmp_path, tokenizer, row)


@pytest.mark.parametrize("template", ["gptoss", "llama3_2"])
def test_a_template_that_writes_the_date_warns_until_the_date_is_set(template):
    tokenizer, prompt = tokenizer_of(template), Prompt("p", messages=[("user", "2+2?")])
    assert "prompts change every day" in PromptRenderer(tokenizer, TaskSection()).warn_of_date(prompt)
    fixed = PromptRenderer(tokenizer, TaskSection(template_kwargs={"strftime_now": "2024-07-26"}))
    assert fixed.warn_of_date(prompt) == ""
    assert ("2024-07-26" if template == "gptoss" else "26 Jul 2024") in fixed.text(prompt)
    if template == "llama3_2":
        dated = PromptRenderer(tokenizer, TaskSection(template_kwargs={"date_string": "26 Jul 2024"}))
        assert dated.warn_of_date(prompt) == ""
    assert PromptRenderer(tokenizer_of("qwen3"), TaskSection()).warn_of_date(prompt) == ""


def test_a_date_that_is_none_is_refused():
    renderer = PromptRenderer(tokenizer_of("gptoss"), TaskSection(template_kwargs={"strftime_now": "today"}))
    with pytest.raises(ValueError, match="Invalid isoformat string: 'today'"):
        renderer.text(Prompt("p", messages=[("user", "2+2?")]))


@pytest.mark.parametrize("stop", ["\n\n", "</think>"])
def test_a_row_in_which_the_template_writes_what_ends_a_response_is_refused(tmp_path, stop):
    with pytest.raises(TaskError, match="which the chat template writes before the response: correct search.stop"):
        row_of(tmp_path, tokenizer_of("qwen3"), said(content="It is 4."), stop=[stop])
