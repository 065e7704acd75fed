"""Prompts have the same token ids in search, eval, import and `tba sft`: those of `apply_chat_template`."""

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tba.buffer.tools.tokenizer import Tokenizer as ImportTokenizer
from tba.common.config import Config, TaskSection
from tba.common.errors import ConfigError, TaskError
from tba.common.rendering import PromptRenderer
from tba.common.weights.pretrained import load_tokenizer
from tba.common.wire.messages import Visit
from tba.searcher.build import LoadedTask, check_task_and_prompts
from tba.searcher.engines.stopping import Stopping
from tba.searcher.pipeline import Exploration, GenerationStage
from tba.searcher.tasks.task import Prompt, check_rendering, fingerprint
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.chat_tokenizers import KINDS, chat_tokenizer
from tba.trainer.batch.batch import Row
from tba.trainer.sft import Encoder, read_rows

QUESTION = "What is 2 + 3?"


class RecordingEngine:
    """Keeps the token ids of its prompts."""

    weights_version = 0

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def submit(self, request) -> None:
        self.prompts.append(request.prompt_ids.tolist())


def task_of(*prompts: Prompt) -> Any:
    return SimpleNamespace(name="one", prompts=lambda: prompts)


def ids_of_search(prompt: Prompt, renderer: PromptRenderer) -> list[int]:
    engine: Any = RecordingEngine()
    exploration = Exploration(Config().search, run_seed=0, searcher="s")
    loaded = LoadedTask(task_of(prompt), renderer, Stopping(renderer.tokenizer, (), ()))
    stage = GenerationStage(engine, loaded, [prompt], exploration.settings, 1)
    stage.submit(Visit(lease=1, epoch=0, prompt_key="p"))
    return engine.prompts[0]


def row_of_sft(prompt: Prompt, renderer: PromptRenderer, folder, *end_ids: int) -> Row:
    messages = [{"role": role, "content": content} for role, content, *_ in (*prompt.messages, ("assistant", "5"))]
    row = {"messages": messages} if prompt.messages else {"prompt": prompt.text, "response": "5"}
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row))
    return read_rows([file], Encoder(renderer, end_ids or [0], vocabulary=1000, longest=1000))[0]


@pytest.mark.parametrize(
    ("kind", "settings", "variables"),
    [
        *[(kind, {}, {}) for kind in KINDS],
        ("qwen 2.5", {"system": "Answer with a number."}, {}),
        ("qwen 3", {"template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ],
)
def test_a_chat_has_the_ids_of_the_template_in_search_and_sft(tmp_path, kind, settings, variables):
    tokenizer = chat_tokenizer(kind)
    messages = [{"role": "user", "content": QUESTION}]
    if "system" in settings:
        messages.insert(0, {"role": "system", "content": settings["system"]})
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **variables
    )
    renderer = PromptRenderer(tokenizer, TaskSection(**settings))
    prompt = Prompt("p", messages=[("user", QUESTION)])
    assert ids_of_search(prompt, renderer) == expected
    assert row_of_sft(prompt, renderer, tmp_path).prompt_ids.tolist() == expected
    assert tokenizer.decode(expected) == renderer.text(prompt)
    assert expected.count(tokenizer.bos_token_id) <= 1


@pytest.mark.parametrize("kind", ["llama 3", "qwen 2.5", "mistral"])
def test_a_text_gets_what_the_tokenizer_adds_or_is_a_message_of_the_user(tmp_path, kind):
    tokenizer, prompt = chat_tokenizer(kind), Prompt("p", QUESTION)
    raw = PromptRenderer(tokenizer, TaskSection())
    for ids in (ids_of_search(prompt, raw), row_of_sft(prompt, raw, tmp_path).prompt_ids.tolist()):
        assert ids == tokenizer.encode(QUESTION)
    chat = PromptRenderer(tokenizer, TaskSection(template="chat"))
    of_chat = ids_of_search(Prompt("p", messages=[("user", QUESTION)]), chat)
    assert ids_of_search(prompt, chat) == row_of_sft(prompt, chat, tmp_path).prompt_ids.tolist() == of_chat
    # A text that someone has rendered with a begin token, in a run and as a line of an import.
    rendered = chat.text(prompt)
    assert ids_of_search(Prompt("p", rendered), raw) == of_chat
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert ImportTokenizer(str(tmp_path)).prompt(rendered) == of_chat
    assert ImportTokenizer(str(tmp_path)).prompt(QUESTION) == tokenizer.encode(QUESTION)


def test_a_demonstration_of_a_chat_ends_with_the_end_token_of_its_template(tmp_path):
    tokenizer = chat_tokenizer("llama 3")
    other_end = tokenizer.bos_token_id
    renderer = PromptRenderer(tokenizer, TaskSection(template="chat"))
    for prompt in (Prompt("p", QUESTION), Prompt("p", messages=[("user", QUESTION)])):
        row = row_of_sft(prompt, renderer, tmp_path, other_end, tokenizer.eos_token_id)
        assert tokenizer.decode(row.response_ids) == "5<|eot_id|>"


def test_an_import_tokenises_the_prompt_of_several_responses_once(tmp_path, monkeypatch):
    tokenizer = chat_tokenizer("qwen 3")
    renderer, encoded = PromptRenderer(tokenizer, TaskSection(template="raw")), []
    monkeypatch.setattr(
        renderer.tokenizer,
        "encode",
        lambda text, encode=tokenizer.encode, **k: (encoded.append(text), encode(text, **k))[1],
    )
    for answer in ("5", " 6"):
        whole = [*renderer.raw_ids(QUESTION), *renderer.response_ids(QUESTION, answer)]
        assert whole == tokenizer.encode(QUESTION + answer, add_special_tokens=False)
    assert encoded.count(QUESTION) == 1


def test_a_prompt_with_text_and_messages_or_with_ids_is_rendered_by_the_mode():
    tokenizer = chat_tokenizer("qwen 3")
    both, ids = Prompt("p", "5 is", messages=[("user", QUESTION)]), Prompt("p", ids=[7, 8])
    renderers = {mode: PromptRenderer(tokenizer, TaskSection(template=mode)) for mode in ("auto", "chat", "raw")}
    assert {mode: renderer.ids(both) == tokenizer.encode("5 is") for mode, renderer in renderers.items()} == {
        "auto": False, "chat": False, "raw": True,
    }  # fmt: skip
    assert [renderer.ids(ids) for renderer in renderers.values()] == [[7, 8]] * 3
    tokenizer.chat_template = None
    assert renderers["auto"].ids(both) == tokenizer.encode("5 is")


@pytest.mark.parametrize(
    ("prompt", "settings", "template", "words"),
    [
        (Prompt("p", messages=[("user", "2")]), {}, None, "messages and no text, and the model's tokenizer has no"),
        (Prompt("p", messages=[("user", "2")]), {"template": "raw"}, "x", 'task.template is "raw"'),
        (Prompt("p", "2"), {"template": "chat"}, None, "the model's tokenizer has no chat template"),
        (Prompt("p", "2"), {"system": "Be brief."}, "x", "task.system and task.template_kwargs have no effect"),
        (Prompt("p", "2"), {"template": "chat", "system": "s"}, KINDS["gemma"][1], "refuses it: System role not"),
        (Prompt("p", "2 " * 50), {}, None, "has [0-9]+ tokens, and the context of the model has room for 32"),
        (Prompt("p", ids=[1] * 32), {}, None, "has 32 tokens"),
    ],
)
def test_a_prompt_that_cannot_be_rendered_or_is_too_long_is_refused_with_its_key(prompt, settings, template, words):
    tokenizer = chat_tokenizer("qwen 3")
    tokenizer.chat_template = template
    task, renderer = task_of(Prompt("fine", "2", messages=()) if not settings else prompt, prompt), None
    renderer = PromptRenderer(tokenizer, TaskSection(**settings))
    with pytest.raises(TaskError, match=f"task one: the prompt 'p' .*{words}"):
        check_rendering(task, task.prompts(), renderer, 32)
    # The longest prompt that leaves room for a token.
    check_rendering(task, [Prompt("p", ids=[1] * 31)], renderer, 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"search": {"max_model_len": 6}}, "has 6 tokens, and the context"),
        ({"train": {"prompts_per_step": 10}}, "has 9 prompts and a batch needs 10 different ones: lower"),
    ],
)
def test_the_doctor_finds_prompts_that_the_context_has_no_room_for_or_that_are_fewer_than_a_batch(changes, words):
    config = Config.model_validate({"model": {"path": str(EXAMPLE_MODEL)}, "task": {"limit": 9}} | changes)
    with pytest.raises(TaskError, match=words) if words else contextlib.nullcontext():
        check_task_and_prompts(config)


def test_messages_may_be_maps_as_in_data_sets_and_another_form_is_refused_with_the_key_of_its_prompt():
    maps: Any = [{"role": "user", "content": QUESTION}]
    assert Prompt("p", messages=maps) == Prompt("p", messages=[("user", QUESTION)])
    for message in ("user", ("user",), ("user", 3), {"role": "user"}):
        with pytest.raises(ValueError, match="prompt 'p' has the message"):
            Prompt("p", messages=[message])  # type: ignore[list-item]


def test_the_fingerprint_covers_a_prompt_and_the_settings_that_render_chats_only():
    tokenizer = chat_tokenizer("qwen 3")
    chat, other = Prompt("p", messages=[("user", "2")]), Prompt("p", messages=[("user", "3")])

    def name(prompt: Prompt, **settings: Any) -> str:
        return fingerprint([prompt], PromptRenderer(tokenizer, TaskSection(**settings)).settings([prompt]))

    told_apart = [
        name(chat), name(other), name(chat, system="s"), name(chat, template_kwargs={"enable_thinking": False}),
        name(Prompt("p", "2")), name(Prompt("p", ids=[2])), name(Prompt("p", "2"), template="chat"),
        name(replace(chat, template_kwargs={"tools": []})), name(Prompt("p", "2", accepted=["b"])),
    ]  # fmt: skip
    assert len(set(told_apart)) == len(told_apart)
    assert name(Prompt("p", "2")) == name(Prompt("p", "2"), template="raw") == fingerprint([Prompt("p", "2")])
    # That of runs which were started before prompts had more fields.
    assert fingerprint([Prompt("k", "t", "a")]) == hashlib.sha256(b"k\0t\0a\0").hexdigest()
    tokenizer.chat_template += " "
    assert name(chat) != told_apart[0]


@pytest.mark.parametrize("kind", ["llama 3", "mistral"])
def test_a_stop_string_is_found_over_token_boundaries_and_cut_from_what_is_scored(kind):
    tokenizer = chat_tokenizer(kind)
    tokens = tokenizer.encode("The answer is 5.\n\nQuestion: W", add_special_tokens=False)
    stopping = Stopping(tokenizer, ("\n\nQuestion", "¿é"), [tokenizer.eos_token_id])
    (end,) = [n for n in range(1, len(tokens) + 1) if stopping.completes_string(tokens[:n])][:1]
    assert "Question" in tokenizer.decode(tokens[:end])
    assert "Question" not in tokenizer.decode(tokens[: end - 1])
    assert stopping.scored_text(tokens[:end]) == "The answer is 5."
    assert stopping.scored_text(tokens[: end - 1]) == tokenizer.decode(tokens[: end - 1])


def test_stop_strings_that_are_special_tokens_mean_their_ids_and_end_tokens_have_no_text():
    tokenizer: Any = chat_tokenizer("llama 3")
    begin, a = tokenizer.encode("a")
    stopping = Stopping(tokenizer, ("<|start_header_id|>", a), [tokenizer.eos_token_id])
    assert stopping.ids == {tokenizer.eos_token_id, a, tokenizer.convert_tokens_to_ids("<|start_header_id|>")}
    assert stopping.strings == ()
    assert stopping.scored_text([*tokenizer.encode("5", add_special_tokens=False), a]) == "5"
    assert stopping.scored_text([]) == ""
    # It would never end a response: the text has no special tokens.
    with pytest.raises(ConfigError, match="contains the special token"):
        Stopping(tokenizer, ("<|start_header_id|>\n",), ())
    assert Stopping(SimpleNamespace(decode=tokenizer.decode), (), ()).scored_text([begin]) == ""


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("LlamaTokenizer", "tokenizer.model"), ("GemmaTokenizer", "tokenizer.model"), ("T5Tokenizer", "spiece.model"),
        ("XLNetTokenizer", "spiece.model"), ("XLMRobertaTokenizer", "sentencepiece.bpe.model"),
        ("DebertaV2Tokenizer", "spm.model"),
    ],
)  # fmt: skip
def test_a_sentencepiece_model_that_cannot_be_read_names_the_extra(kind, file, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    # Without the extra, transformers takes it for a file of tiktoken; this one is neither.
    (tmp_path / file).write_bytes(b"\x0e")
    extra = rf"to read {file} alone, pip install '.\[sentencepiece\]'"
    with pytest.raises(ConfigError, match="has no tokenizer that loads") as with_it:
        load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match=extra):
        load_tokenizer(tmp_path)
    assert "pip install" not in str(with_it.value) or find_spec("sentencepiece") is None


@pytest.mark.parametrize(
    "kind", ["T5Tokenizer", "XLNetTokenizer", "AlbertTokenizer", "PegasusTokenizer", "CamembertTokenizer"]
)
def test_a_class_that_does_not_read_its_tokenizer_json_is_named_as_the_cause(kind, tmp_path):
    chat_tokenizer("qwen 2.5").save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"tokenizer_class": kind}))
    with pytest.raises(ConfigError, match="its class in transformers does not read its tokenizer.json .* set ") as told:
        load_tokenizer(tmp_path)
    assert 'set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json' in str(told.value)
    # What it says to set helps.
    path.write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("2 + 3")) == "2 + 3"


TEXTS = ["What is 2 + 3? The answer is 5.", "  two spaces, and\n\na line"]
BEGIN, END = "<s>", "</s>"


def trained(kind: str) -> Tokenizer:
    """Return a tokenizer without special tokens around a text."""
    trainer: Any
    special = ["<unk>", BEGIN, END, "[CLS]", "[SEP]"]
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    elif kind == "pieces":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def around(kind: str, template: str) -> Tokenizer:
    """Return a tokenizer that puts special tokens around a text."""
    tokenizer = trained(kind)
    names = [(name, tokenizer.token_to_id(name)) for name in (BEGIN, END, "[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=names)
    return tokenizer


# How it is made, and the special tokens that belong before a prompt. What is put behind a text does not.
FAMILIES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    **{kind: (partial(chat_tokenizer, kind), [begin] if begin else []) for kind, (_, _, begin, *_) in KINDS.items()},
    "gpt 2": (lambda: trained("bytes"), []),
    "zephyr, end token appended": (lambda: around("bytes", f"{BEGIN} $A {END}"), [BEGIN]),
    "t5, end token appended": (lambda: around("unigram", f"$A {END}"), []),
    "bert": (lambda: around("pieces", "[CLS] $A [SEP]"), ["[CLS]"]),
    "xlm-roberta": (lambda: around("unigram", f"{BEGIN} $A {END}"), [BEGIN]),
    "arithmetic": (lambda: AutoTokenizer.from_pretrained(EXAMPLE_MODEL), []),
}


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """A saved tokenizer whose file also has the truncation and padding of the last call before it was saved."""
    make, before = FAMILIES[request.param]
    made = make()
    if isinstance(made, Tokenizer):
        made = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, bos_token=BEGIN)
    made.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    stored["padding"] = {
        "strategy": {"Fixed": 24}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": made.convert_ids_to_tokens(0),
    }  # fmt: skip
    path.write_text(json.dumps(stored))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": made.eos_token_id}))
    return tmp_path, made, made.convert_tokens_to_ids(before)


@pytest.mark.parametrize("text", TEXTS)
def test_all_readers_encode_a_text_to_the_same_ids(family, text, tmp_path):
    directory, original, before = family
    alone = original.encode(text, add_special_tokens=False)
    prompt = [*before, *alone]
    # What follows the prompt, where no token spans both: some tokenizers put a space before the first word of a text.
    both = original.encode(text + text, add_special_tokens=False)
    renderer = PromptRenderer(load_tokenizer(directory), TaskSection(template="raw"))
    assert renderer.ids(Prompt("p", text)) == prompt
    imported = ImportTokenizer(str(directory))
    response = imported.response(text, text, finished=True)
    assert imported.prompt(text) == prompt
    assert both[: len(alone)] != alone or response == [*both[len(alone) :], original.eos_token_id]
    if original.decode(alone) == text:
        assert original.decode([*alone, *response], skip_special_tokens=True) == text + text
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": text, "response": text}))
    (row,) = read_rows([file], Encoder(renderer, [original.eos_token_id], vocabulary=10_000, longest=1000))
    assert (row.prompt_ids.tolist(), row.response_ids.tolist()) == (prompt, response)


@pytest.mark.parametrize("role", ["system", "developer", "tool", ""])
def test_a_message_that_the_chat_template_leaves_out_is_refused(role):
    """As the system message in the first template of Phi 3; with role "" it is that of the configuration."""
    tokenizer = chat_tokenizer("phi 3")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    told = [("user", "2+2?"), ("assistant", "4"), ("user", "3+3?")]
    PromptRenderer(tokenizer, TaskSection()).require_complete(Prompt("p", messages=told))
    renderer = PromptRenderer(tokenizer, TaskSection(system="" if role else "Be brief."))
    with pytest.raises(ValueError, match=f"does not write messages of the role '{role or 'system'}'"):
        renderer.require_complete(Prompt("p", messages=[(role, "Be brief."), *told] if role else told))


@pytest.mark.parametrize("class_", ["LlamaTokenizerFast", "LlamaTokenizer"])
def test_a_class_that_loses_the_spaces_of_tokenizer_json_is_refused_with_the_remedy(tmp_path, class_):
    PreTrainedTokenizerFast(tokenizer_object=trained("bytes"), eos_token=END).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": class_}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    # transformers 5.24 keeps them.
    kept = AutoTokenizer.from_pretrained(tmp_path)
    if kept.decode(kept.encode(TEXTS[0])) != TEXTS[0]:
        with pytest.raises(ConfigError, match='set "tokenizer_class": "PreTrainedTokenizerFast"'):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode(TEXTS[0])) == TEXTS[0]


def test_unknown_tokens_are_counted_over_what_the_first_prompts_say():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "ask": 1, "answer": 2, "two": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    known = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    known.chat_template = "{% for m in messages %}ask ask ask ask {{ m.content }} answer answer answer {% endfor %}"
    chats = [Prompt(key=str(n), messages=(("user", text),)) for n, text in enumerate(("two two", "two zwei", "zwei"))]
    renderer = PromptRenderer(known, TaskSection())
    assert renderer.unknown_tokens(chats, "m").startswith("1 of 1 tokens of prompt 3 are unknown to the tokenizer of m")
    assert renderer.unknown_tokens(chats[:2], "m").startswith("1 of 2 tokens of prompt 2 ")
    assert renderer.unknown_tokens([*chats[:1] * 8, chats[2]], "m") == ""
    # Without an unknown token, this one drops characters.
    letters = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1}, [])))
    renderer = PromptRenderer(letters, TaskSection())
    assert renderer.unknown_tokens([Prompt(key="1", text="ab"), Prompt(key="2", text="x yz")], "m").startswith(
        "2 of 2 "
    )
    assert renderer.unknown_tokens([Prompt(key="1", text="ab")], "m") == ""
