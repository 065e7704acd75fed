"""Prompts with the responses that they should have, as rows of a batch.

A file is jsonl; other keys than these are not read:

    {"prompt": "47+38=", "response": "85"}                      `answer` is taken for `response`
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Prompts become tokens as a searcher makes them, and responses end with the end token that stops its engine, so what is
learned is what will be sampled. Of a conversation the last message is the response; the rest is its prompt.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.common.errors import TaskError
from tba.trainer.batch import Row


@dataclass(frozen=True, slots=True)
class Encoder:
    """How text becomes tokens, and what the model can take: ids below `vocabulary`, `longest` tokens in all."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: Sequence[int]  # any of them ends a response; the first is appended where there is none
    vocabulary: int
    longest: int


def read_rows(paths: Sequence[Path], encoder: Encoder) -> list[Row]:
    """The rows of some files in their order, numbered from 0. Raises TaskError, with file and line."""
    rows: list[Row] = []
    for path in paths:
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                continue
            try:
                prompt, response = _tokens(json.loads(line), encoder)
                _check(prompt, response, encoder)
            except ValueError as error:  # of JSON, of a chat template, or one of those below
                raise TaskError(f"{path}:{number}: {error}") from error
            rows.append(_row(len(rows), prompt, response))
    if not rows:
        raise TaskError(f"{', '.join(map(str, paths))}: no rows")
    return rows


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")  # splitlines would also split inside strings
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8: byte {error.start}") from error


def _tokens(value: Any, encoder: Encoder) -> tuple[list[int], list[int]]:
    """Prompt and response, the response with its end token. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("a row is a JSON object")
    if "messages" in value:
        return _chat_tokens(value["messages"], encoder)
    prompt, response = value.get("prompt"), value.get("response", value.get("answer"))
    if not isinstance(prompt, str) or not isinstance(response, str):
        raise ValueError("a row has `messages`, or `prompt` and `response` (or `answer`), which are strings")
    if not response:
        raise ValueError("the response is empty")
    tokenizer = encoder.tokenizer
    return tokenizer.encode(prompt), _ended(tokenizer.encode(response, add_special_tokens=False), encoder)


def _chat_tokens(messages: Any, encoder: Encoder) -> tuple[list[int], list[int]]:
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ValueError("`messages` is a list of objects with the strings `role` and `content`")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError("`messages` ends with the assistant's, after at least one other")
    if not messages[-1]["content"]:
        raise ValueError("the response is empty")
    prompt = _rendered(messages[:-1], encoder, add_generation_prompt=True)
    whole = _rendered(messages, encoder, add_generation_prompt=False)
    if whole[: len(prompt)] != prompt:
        raise ValueError("the chat template renders the prompt differently once the response follows it")
    return prompt, _ended(whole[len(prompt) :], encoder)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _rendered(messages: list[dict[str, str]], encoder: Encoder, *, add_generation_prompt: bool) -> list[int]:
    from jinja2 import TemplateError

    if encoder.tokenizer.chat_template is None:
        raise ValueError("the model's tokenizer has no chat template: write `prompt` and `response`")
    try:
        ids = encoder.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    return [int(id_) for id_ in ids]


def _ended(response: list[int], encoder: Encoder) -> list[int]:
    """Up to the first end token; templates put line breaks behind it, which no engine would sample."""
    for position, id_ in enumerate(response):
        if id_ in encoder.end_ids:
            return response[: position + 1]
    return [*response, encoder.end_ids[0]]


def _check(prompt: Sequence[int], response: Sequence[int], encoder: Encoder) -> None:
    if not prompt:
        raise ValueError("the prompt has no tokens: nothing predicts the first token of the response")
    if (length := len(prompt) + len(response)) > encoder.longest:
        raise ValueError(f"{length} tokens, of at most {encoder.longest} that the model takes")
    if (largest := max(*prompt, *response)) >= encoder.vocabulary:
        raise ValueError(f"the tokenizer gives id {largest}, but the model has {encoder.vocabulary}: another model's?")


def _row(number: int, prompt: Sequence[int], response: Sequence[int]) -> Row:
    return Row(
        id=number,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        sampling_logprobs=np.zeros(len(response), np.float32),
        loss_mask=np.ones(len(response), np.uint8),
        on_policy=False,
    )
