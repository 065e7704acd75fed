"""Read demonstrations, prompts with their desired responses, as rows of a batch.

A file (`tba.common.data_files`) has rows of two kinds; other columns are ignored:

    {"prompt": "47+38=", "response": "85"}                      `answer` is an alias of `response`
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Prompts are rendered as a searcher does it (`task.template`), and responses end with the end token that stops its
engine, so the model learns what it will be sampled for. The last message of a conversation is the response, the others
are its prompt. The chat template gets all fields of the messages, and `tools` and `chat_template_kwargs` of the row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tba.common import data_files
from tba.common.errors import TaskError
from tba.common.rendering import Message, PromptRenderer, as_map, message_of, variables_of
from tba.trainer.batch.batch import Row


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str = ""
    messages: Sequence[Message] = ()
    ids: Sequence[int] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


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
    conversation: _Prompt | None = None
    for place, value in (row for path in paths for row in data_files.read(path)):
        try:
            prompt, response = _read(value)
            tokens = _tokens(prompt, response, encoder)
            _check(*tokens, encoder)
        # Raised by the functions below or by a chat template.
        except ValueError as error:
            raise TaskError(f"{place}: {error}") from error
        conversation = conversation or prompt
        rows.append(_row(len(rows), *tokens))
    if conversation is None:
        raise TaskError(f"{', '.join(map(str, paths))}: no rows")
    encoder.renderer.warn_of_date(conversation)
    return rows


def _read(value: Any) -> tuple[_Prompt, Message]:
    """Return prompt and response of a row. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("a row is a JSON object")
    variables = variables_of(value)
    if (said := value.get("messages")) is not None:
        *before, response = _messages(said)
        prompt = _Prompt(messages=before, template_kwargs=variables)
    else:
        texts = value.get("prompt"), value.get("answer") if value.get("response") is None else value["response"]
        if not isinstance(texts[0], str) or not isinstance(texts[1], str):
            raise ValueError(
                "a row has `messages`, or `prompt` and `response` (or `answer`), which are strings; this one has "
                + ", ".join(f"{key} ({type(one).__name__})" for key, one in value.items())
            )
        prompt, response = _Prompt(texts[0], template_kwargs=variables), ("assistant", texts[1])
    data_files.require_unicode([prompt.text, prompt.messages, response, variables])
    if not any(inner for key, inner in as_map(response).items() if key != "role"):
        raise ValueError("the response is empty")
    return prompt, response


def _messages(said: Any) -> list[Message]:
    if not isinstance(said, list) or not all(isinstance(message, dict) for message in said):
        raise ValueError("`messages` is a list of objects with the strings `role` and `content`")
    if len(said) < 2 or said[-1].get("role") != "assistant":
        raise ValueError("`messages` ends with the assistant's, after at least one other")
    # Whether a message is trained on, in the format of OpenAI.
    weights = [message.get("weight") for message in said]
    if any(weights[:-1]) or weights[-1] not in (None, 1):
        raise ValueError(
            f"the weights of its messages are {weights}: the last message alone is trained on, so its weight is 1 and "
            "that of the others 0; write one row for each message to train on"
        )
    return [message_of({key: inner for key, inner in message.items() if key != "weight"}) for message in said]


def _tokens(prompt: _Prompt, response: Message, encoder: Encoder) -> tuple[list[int], list[int]]:
    """Tokenise prompt and response, the response with its end token. Raises ValueError."""
    renderer = encoder.renderer
    prompt_ids, text = renderer.ids(prompt), renderer.text_with(prompt, response)
    if text is None:
        return prompt_ids, _ended(renderer.encode(response[1]), response, encoder)
    renderer.require_complete(prompt, response)
    ids = renderer.encode(text)
    if ids[: len(prompt_ids)] == prompt_ids:
        return prompt_ids, _ended(ids[len(prompt_ids) :], response, encoder)
    # Tokens of the whole may span both: two line breaks are often one token. A run generates after the prompt's ids.
    rest = text.removeprefix(renderer.text(prompt))
    if rest == text:
        raise ValueError(
            "the chat template renders the prompt differently once the response follows it: set the variables of the "
            "template that fit the row, such as task.template_kwargs = { enable_thinking = false }, or write the row "
            'with `prompt` and `response` as the model is to see them, for task.template = "raw"'
        )
    # After an end token, since some tokenizers put a space before the first word of a text.
    own = renderer.encode(renderer.tokenizer.decode([encoder.end_ids[0]], skip_special_tokens=False) + rest)[1:]
    whole, apart = (renderer.tokenizer.decode(one, skip_special_tokens=False) for one in (ids, [*prompt_ids, *own]))
    if whole != apart:
        raise ValueError(f"its response cannot be tokenised apart from the prompt: {whole!r:.80} becomes {apart!r:.80}")
    return prompt_ids, _ended(own, response, encoder)


def _ended(ids: list[int], response: Message, encoder: Encoder) -> list[int]:
    """Cut a response after its first end token: templates add line breaks after it that no engine would sample.

    Raises ValueError if more follows because the response itself spells an end token.
    """
    end = next((n + 1 for n, id_ in enumerate(ids) if id_ in encoder.end_ids), None)
    if not ids or end == 1:
        raise ValueError("the chat template leaves nothing of the response but its end token")
    if end is None:
        return [*ids, encoder.end_ids[0]]
    if encoder.renderer.tokenizer.decode(ids[end:], skip_special_tokens=False).strip():
        spelt = set(encoder.renderer.encode(" ".join(response[1:]))) & set(encoder.end_ids)
        if spelt:
            token = encoder.renderer.tokenizer.decode([*spelt][:1], skip_special_tokens=False)
            raise ValueError(f"the response contains {token!r}, at which the engines stop: remove or respell it")
    return ids[:end]


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
