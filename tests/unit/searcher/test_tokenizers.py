"""One way from text to token ids for search, `tba sft` and `tba buffer import`, tried on twelve families."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tba.buffer.tools.tokenizer import Tokenizer as ImportTokenizer
from tba.common.config import TaskSection
from tba.common.errors import ConfigError
from tba.common.rendering import PromptRenderer
from tba.common.weights.pretrained import load_tokenizer
from tba.searcher.tasks.task import Prompt
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.chat_tokenizers import KINDS, chat_tokenizer
from tba.trainer.sft import Encoder, read_rows

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
    prompt = [*before, *original.encode(text, add_special_tokens=False)]
    response = [*original.encode(text, add_special_tokens=False), original.eos_token_id]
    renderer = PromptRenderer(load_tokenizer(directory), TaskSection(template="raw"))
    assert renderer.ids(Prompt("p", text)) == prompt
    imported = ImportTokenizer(str(directory))
    assert (imported.prompt(text), imported.response(text, finished=True)) == (prompt, response)
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": text, "response": text}))
    (row,) = read_rows([file], Encoder(renderer, [original.eos_token_id], vocabulary=10_000, longest=1000))
    assert (row.prompt_ids.tolist(), row.response_ids.tolist()) == (prompt, response)


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
