"""Read demonstrations, prompts with their desired responses, as rows of a batch.

A file has JSON lines of two kinds; other keys are ignored:

    {"prompt": "47+38=", "response": "85"}                      `answer` is an alias of `response`
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Prompts are rendered as a searcher does it (`task.template`), and responses end with the end token that stops its
engine, so the model learns what it will be sampled for. The last message of a conversation is the response, the others
are its prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tba.common import jsonl
from tba.common.errors import TaskError
from tba.common.rendering import Message, PromptRenderer
from tba.trainer.batch.batch import Row


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str = ""
    messages: Sequence[Message] = ()
    ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Encoder:
    """The renderer of prompts, and the limits of the model: ids below `vocabulary`, `longest` tokens per row.

    Any of `end_ids` ends a response; the first one is appended to a response that has none.
    """

    renderer: PromptRenderer
    end_ids: Sequence[int]
    vocabulary: int
    longest: int


def read_rows(paths: Sequence[Path], encoder: Encoder) -> list[Row]:
    """Read the rows of some files in order, numbered from 0. Raises TaskError, with file and line."""
    rows: list[Row] = []
    for path in paths:
        try:
            for number, value in jsonl.read(path, malformed=TaskError):
                try:
                    prompt, response = _tokens(value, encoder)
                    _check(prompt, response, encoder)
                # Raised by the functions below or by a chat template.
                except ValueError as error:
                    raise TaskError(f"{path}:{number}: {error}") from error
                rows.append(_row(len(rows), prompt, response))
        except OSError as error:
            raise TaskError(f"{path} cannot be read: {error.strerror}") from error
    if not rows:
        raise TaskError(f"{', '.join(map(str, paths))}: no rows")
    return rows


def _tokens(value: Any, encoder: Encoder) -> tuple[list[int], list[int]]:
    """Tokenise prompt and response, the response with its end token. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("a row is a JSON object")
    prompt, response = _of_messages(value["messages"]) if "messages" in value else _of_texts(value)
    if not response:
        raise ValueError("the response is empty")
    renderer = encoder.renderer
    prompt_ids, conversation = renderer.ids(prompt), renderer.conversation(prompt)
    if conversation is None:
        return prompt_ids, _ended(renderer.tokenizer.encode(response, add_special_tokens=False), encoder)
    # The template may end a message with another token than the first end token.
    whole = renderer.conversation_ids([*conversation, ("assistant", response)], add_generation_prompt=False)
    if whole[: len(prompt_ids)] != prompt_ids:
        raise ValueError("the chat template renders the prompt differently once the response follows it")
    return prompt_ids, _ended(whole[len(prompt_ids) :], encoder)


def _of_texts(value: dict[str, Any]) -> tuple[_Prompt, str]:
    prompt, response = value.get("prompt"), value.get("response", value.get("answer"))
    if not isinstance(prompt, str) or not isinstance(response, str):
        raise ValueError("a row has `messages`, or `prompt` and `response` (or `answer`), which are strings")
    return _Prompt(prompt), response


def _of_messages(messages: Any) -> tuple[_Prompt, str]:
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ValueError("`messages` is a list of objects with the strings `role` and `content`")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError("`messages` ends with the assistant's, after at least one other")
    said = [(message["role"], message["content"]) for message in messages]
    return _Prompt(messages=said[:-1]), said[-1][1]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _ended(response: list[int], encoder: Encoder) -> list[int]:
    """Cut a response after its first end token: templates add line breaks after it that no engine would sample."""
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
        raise ValueError(
            f"the tokenizer gives id {largest}, but the model has {encoder.vocabulary}: is it another model's?"
        )


def _row(number: int, prompt: Sequence[int], response: Sequence[int]) -> Row:
    return Row(
        id=number,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        sampling_logprobs=np.zeros(len(response), np.float32),
        loss_mask=np.ones(len(response), np.uint8),
        on_policy=False,
        temperature=0.0,
    )
