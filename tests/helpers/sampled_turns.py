"""Play random episodes with the chat templates of well-known families, with replies as a model would sample them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AddedToken

from tba.common.config import TaskSection
from tba.common.rendering import Message, PromptRenderer
from tba.searcher.tasks.task import Prompt
from tba.tests.helpers.chat_tokenizers import KINDS, chat_tokenizer

TRL = find_spec("trl")
# The package has the chat templates of many families of models.
TEMPLATES = Path(TRL.origin or "").parent / "chat_templates" if TRL else Path()


@dataclass(frozen=True)
class Family:
    """A chat template, the tokens that end a reply, the other special tokens, and what both sides say.

    `frames` are around the words of a reply. Models end a turn with the next role in some families.
    """

    template: str
    ends: dict[str, str]
    special: tuple[str, ...] = ()
    frames: tuple[str, ...] = ("{}",)
    variables: dict[str, Any] = field(default_factory=dict)


_THINK = "<think>\n{}\n</think>\n\n{}"
FAMILIES = {
    "qwen 2.5": Family("qwen2_5", {"user": "<|im_end|>", "tool": "<|im_end|>"}, ("<|im_start|>",)),
    "qwen 3": Family("qwen3", {"user": "<|im_end|>", "tool": "<|im_end|>"}, ("<|im_start|>",), ("{}", _THINK)),
    "qwen 3 without thinking": Family(
        "qwen3", {"user": "<|im_end|>", "tool": "<|im_end|>"}, ("<|im_start|>",), variables={"enable_thinking": False}
    ),
    "llama 3": Family(
        "llama3", {"user": "<|eot_id|>", "tool": "<|eot_id|>"}, ("<|start_header_id|>", "<|end_header_id|>")
    ),
    "llama 3.2": Family(
        "llama3_2", {"user": "<|eot_id|>", "tool": "<|eot_id|>"}, ("<|start_header_id|>", "<|end_header_id|>")
    ),
    "gemma 3": Family("gemma3", {"user": "<end_of_turn>"}, ("<start_of_turn>",)),
    "glm 4.5": Family(
        "glm4moe",
        {"user": "<|user|>", "tool": "<|observation|>"},
        ("<|assistant|>", "<|system|>"),
        ("\n<think></think>\n{}", "\n<think>{}</think>\n{}"),
    ),
    "gpt-oss": Family(
        "gptoss",
        {"user": "<|return|>"},
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
        (
            "<|channel|>final<|message|>{}",
            "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
        ),
    ),
    "mistral": Family("mistral", {"user": "</s>"}),
    "gemma": Family("gemma", {"user": "<end_of_turn>"}),
}
# Words, among them what could be taken for something else: a probe, a call, bytes that are no character.
_WORDS = ["2 + 3?", "5", "a7f3", "<tool_call>\n{}\n</tool_call>", "it is \ufffd", "é", "The answer is 5.\n\nQuestion:"]


def tokenizer_of(family: Family) -> Any:
    """Return a tokenizer with the template and the special tokens of a family."""
    if family.template in KINDS:
        return chat_tokenizer(family.template)
    tokenizer = chat_tokenizer("qwen 3")
    ends = list(dict.fromkeys(family.ends.values()))
    special = [AddedToken(text, special=True) for text in ("<bos>", *ends, *family.special)]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = "<bos>", ends[0]
    tokenizer.chat_template = (TEMPLATES / f"{family.template}.jinja").read_text()
    return tokenizer


@dataclass(frozen=True)
class Played:
    """One turn: context and sampled tokens, the next context by the renderer, and by `apply_chat_template`.

    `spaced` are episodes with whitespace around a reply, which templates trim.
    """

    held: str
    context: str
    broken: bool
    expected: str
    spaced: bool
    conversation: list[Message]


def play(family: Family, tokenizer: Any, rng: np.random.Generator) -> Iterator[Played]:
    """Play an episode of two to six turns."""
    renderer = PromptRenderer(tokenizer, TaskSection(template_kwargs=family.variables))
    prompt = Prompt("p", messages=[("user", _said(rng))])
    context, conversation = renderer.begin(prompt)
    spaced = False

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    for _ in range(rng.integers(2, 7)):
        role = str(rng.choice(list(family.ends)))
        frame = str(rng.choice(list(family.frames)))
        space = rng.choice(["", "", "", " ", "\n"], 2)
        reply = frame.format(*(_said(rng) for _ in range(frame.count("{}"))))
        reply = space[0] + reply + space[1] if frame == "{}" else reply
        end = tokenizer.convert_tokens_to_ids(family.ends[role]) if rng.random() < 0.7 else None
        # Most that no token ended are cut off somewhere, by a length limit.
        reply = reply[: rng.integers(len(reply) + 1)] if end is None and rng.random() < 0.7 else reply
        sampled = _tokens(tokenizer, reply, rng)
        said = text_of([*context, *sampled]).removeprefix(text_of(context))
        spaced = spaced or said != said.strip()
        held = [*context, *sampled, *([end] if end is not None else [])]
        new = [(role, _said(rng))]
        answer = renderer.proceed(conversation, text_of(sampled), new, variables_of=prompt, ended_by=end)
        context, conversation = answer.ids if answer.broken else [*held, *answer.ids], answer.conversation
        maps = [{"role": role, "content": content} for role, content, *_ in conversation]
        expected = tokenizer.apply_chat_template(
            maps, tokenize=True, return_dict=False, add_generation_prompt=True, **family.variables
        )
        yield Played(text_of(held), text_of(context), answer.broken, text_of(expected), spaced, conversation)


def _said(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(_WORDS, rng.integers(1, 4)))


def _tokens(tokenizer: Any, text: str, rng: np.random.Generator) -> list[int]:
    """Return a tokenisation of a text, not always the usual one: a model may sample any."""
    parts = [text]
    if rng.random() < 0.5:
        at = int(rng.integers(len(text) + 1))
        parts = [text[:at], text[at:]]
    return [id_ for part in parts for id_ in tokenizer.encode(part, add_special_tokens=False)]
