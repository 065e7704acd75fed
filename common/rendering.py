"""Render prompts to text and token ids: the same in a searcher, in `tba eval` and in `tba sft`.

A prompt is a text, a conversation, or token ids. `task.template` decides how it is rendered:

    "raw"     the text as it is, with the special tokens that the tokenizer adds
    "chat"    by the chat template of the tokenizer; a text is one message of the user
    "auto"    "chat" for a prompt with messages if the tokenizer has a chat template, else "raw"

A chat template writes all special tokens itself, so the tokenizer adds none to its text, as
`apply_chat_template(tokenize=True)` does.

An episode is a conversation, so "auto" is "chat" for it wherever the tokenizer has a chat template. The tokens that the
model sampled are kept as they are: `proceed` returns only what the template writes behind them. Without a template, the
contents of the messages follow each other as text.
"""

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from tba.common.config import TaskSection
from tba.common.errors import first_line
from tba.common.log import get_logger

log = get_logger(__name__)

# A role, such as "user", and what it says; of a message with more fields, such as `tool_calls`, also the whole map as
# JSON, which keeps a prompt immutable and the order of the fields, in which templates write them.
Message = tuple[str, str] | tuple[str, str, str]

_SYSTEM = "system"
# Texts that no template writes, of digits, since templates may write letters in another case.
_PROBE, _NEXT = "71093", "40517"
# What a conversation says besides its contents. A template that ignores one would change what the model learns.
_SAID = ("tools", "documents", "tool_calls", "function_call", "tool_plan", "refusal", "name")
# Of a row, what templates would read as a variable, if it were among `chat_template_kwargs`.
_ELSEWHERE = ("chat_template", "enable_thinking", "functions", "reasoning_effort")
# Of the response. Templates leave the thoughts of earlier turns out on purpose.
_THOUGHT = ("reasoning_content", "reasoning", "reasoning_details", "thinking", "thought")
# A tokenizer of transformers, which the core does not import.
Tokenizer = Any
# The function by which templates write the date. As a variable, it is a date.
_CLOCK = "strftime_now"
# How many prompts are searched for unknown tokens.
_FIRST = 8


def message_of(value: Any) -> Message:
    """Return a message from (role, content), or a map of these and others, where null is absent. Raises ValueError.

    Only with `tool_calls` may the content be null or absent.
    """
    if isinstance(value, tuple | list) and len(value) in (2, 3) and all(isinstance(part, str) for part in value):
        message = tuple(value) if len(value) == 2 else _of_json(value[2])
        if message[:2] == tuple(value[:2]):
            return message
        raise ValueError(f"the message {value!r:.200}: write (role, content), two strings, or a map with them")
    fields = {k: v for k, v in value.items() if v is not None or k == "content"} if isinstance(value, Mapping) else {}
    if calls := _unpacked(fields.get("tool_calls")):
        fields["tool_calls"] = [*map(_unpacked, calls if isinstance(calls, list) else [calls])]
        if not all(isinstance(call, dict) for call in fields["tool_calls"]):
            raise ValueError(f"the message {value!r:.200}: write `tool_calls` as a list of objects")
    role, content = fields.get("role"), fields.get("content")
    if content is None and fields.get("tool_calls"):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"the message {value!r:.200}: write (role, content), two strings, or a map with them")
    if fields == {"role": role, "content": content}:
        return role, content
    try:
        return role, content, json.dumps(fields, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"the message {value!r:.200} is not JSON: {error}") from error


def asked_in(value: Any) -> Any:
    """Return a prompt's value, or the list of messages, one of them the user's, that it is as the text of JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("[") else ()
        said = [isinstance(one, dict) and "role" in one and {"content", "tool_calls"} & one.keys() for one in found]
        if all(said) and "user" in [one["role"] for one in found]:
            return found
    return value


def instructed(row: Mapping[str, Any], asked: Any) -> Any:
    """Return a prompt's text or messages, with the `system` of its row as the first message. Raises ValueError."""
    if not (system := row.get("system")):
        return asked
    messages = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    own = [one for one in messages[:1] if isinstance(one, dict) and one.get("role") == _SYSTEM]
    if not isinstance(system, str) or (own and own[0].get("content") != system):
        raise ValueError(f"`system` is {system!r:.60}: write a text, and no other system message")
    return messages if own else [{"role": _SYSTEM, "content": system}, *messages]


def _of_json(text: str) -> Message:
    try:
        return message_of(json.loads(text))
    except json.JSONDecodeError:
        return "", ""


def as_map(message: Message) -> dict[str, Any]:
    """Return a message as chat templates and servers take it."""
    if len(message) == 2:
        return {"role": message[0], "content": message[1]}
    fields: dict[str, Any] = json.loads(message[2])
    return fields


def variables_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template in a row of data, with `tools` and `documents`, as values or JSON.

    A document may be a text. Raises ValueError for other types, and for a variable outside of `chat_template_kwargs`.
    """
    variables = _unpacked(row.get("chat_template_kwargs")) or {}
    if not isinstance(variables, dict):
        raise ValueError(f"`chat_template_kwargs` is {variables!r:.60}: write an object")
    if outside := [name for name in _ELSEWHERE if row.get(name) not in (None, "", [])]:
        raise ValueError(
            f"`{outside[0]}` would be ignored: write it in `chat_template_kwargs`, and functions as `tools`"
        )
    for name in ("tools", "documents"):
        given = _unpacked(row.get(name)) or []
        value = []
        for one in given if isinstance(given, list) else [given]:
            is_text = name == "documents" and isinstance(one, str) and not isinstance(_unpacked(one), dict)
            # As templates read it.
            value.append({"text": one} if is_text else _unpacked(one))
        if not all(isinstance(one, dict) for one in value):
            raise ValueError(f"`{name}` is {given!r:.60}: write a list of objects")
        variables = variables | ({name: value} if value else {})
    return variables


def _unpacked(value: Any) -> Any:
    """Return the value of a text of JSON, and another value as it is."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def _with_arguments(conversation: list[dict[str, Any]], *, as_text: bool) -> list[dict[str, Any]]:
    """Return a conversation with the arguments of calls as objects, or as texts. Raises ValueError for other texts.

    OpenAI's form is the text of JSON, which most templates would encode once more. A text is not rewritten as a text.
    """
    whole = copy.deepcopy(conversation)
    for function in _calls(whole):
        given = function["arguments"]
        if isinstance(given, str) and not isinstance(_unpacked(given or "{}"), dict):
            raise ValueError(f"the arguments of a call are {given!r:.80}: write an object")
        if not as_text:
            function["arguments"] = _unpacked(given or "{}")
        elif not isinstance(given, str):
            function["arguments"] = json.dumps(given, ensure_ascii=False)
    return whole


def _calls(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = [call for one in conversation for call in one.get("tool_calls") or () if isinstance(call, dict)]
    functions = [call.get("function", call) for call in calls]
    return [one for one in functions if isinstance(one, dict) and one.get("arguments") is not None]


class Content(Protocol):
    """What is rendered of a prompt. `ids`, if there are any, are used as they are."""

    @property
    def text(self) -> str: ...

    @property
    def messages(self) -> Sequence[Message]: ...

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def template_kwargs(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the model gets after a reply: `ids` behind the sampled tokens, or, if `broken`, as a whole new context.

    `conversation` is the one so far, with the reply and the new messages.
    """

    ids: list[int]
    broken: bool
    conversation: list[Message]


class PromptRenderer:
    """Renders prompts for one tokenizer by [task]. All methods raise ValueError for one that it cannot render."""

    def __init__(self, tokenizer: Tokenizer, config: TaskSection) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._written_roles: set[tuple[str, bool]] = set()
        # Each response of a prompt asks for its ids.
        self._encode_prompt = functools.lru_cache(128)(self.encode)

    def ids(self, prompt: Content) -> list[int]:
        """Return the token ids that the engine gets."""
        if prompt.ids:
            return list(prompt.ids)
        if self.conversation(prompt) is None:
            return self.raw_ids(prompt.text)
        return self.encode(self.text(prompt))

    def text(self, prompt: Content) -> str:
        """Return the prompt as text, special tokens included: what people read in the database."""
        if prompt.ids:
            return prompt.text or self.tokenizer.decode(list(prompt.ids), skip_special_tokens=False)
        messages = self.conversation(prompt)
        if messages is None:
            return prompt.text
        return self._rendered([as_map(message) for message in messages], self._variables(prompt))

    def text_with(self, prompt: Content, *said: Message) -> str | None:
        """Return a whole conversation as text, None if the prompt is not rendered by a chat template."""
        messages = self.conversation(prompt)
        if messages is None:
            return None
        whole = [as_map(message) for message in (*messages, *said)]
        return self._rendered(whole, self._variables(prompt), asks=False)

    def begin(self, prompt: Content, messages: Sequence[Message] = ()) -> tuple[list[int], list[Message]]:
        """Return the first context of an episode as ids, and its conversation: the prompt's messages, then `messages`.

        Raises ValueError also if there are none, and for a role that the chat template does not write.
        """
        own = list(prompt.messages) or ([("user", prompt.text)] if prompt.text else [])
        new = [message_of(message) for message in messages]
        conversation = [*own, *new]
        if self._is_chat():
            if not conversation:
                raise ValueError("the episode begins without a message: neither the prompt nor `reset` has one")
            before, variables = [*map(as_map, own)], self._variables(prompt)
            return self.encode(self._written(before, new, variables)), conversation
        # Refuses a prompt without a text, and settings without effect.
        self.conversation(prompt)
        return self.raw_ids("".join([prompt.text, *(message[1] for message in new)])), conversation

    def proceed(
        self, conversation: Sequence[Message], reply: str, messages: Sequence[Message], *, variables_of: Content,
        ended_by: int | None = None,
    ) -> Continuation:  # fmt: skip
        """Return what follows a reply: the template's end of the turn, `messages`, and what begins the next reply.

        `conversation` is that before the reply, and `variables_of` the prompt. `reply` is the text of the sampled
        tokens, special tokens included, without the token `ended_by` that ended it; None if none did, as at a length
        limit or a string of `search.stop`. The template's end of the turn is left out if that token is it.

        The context is broken if the template does not continue it: it drops thoughts, changes earlier messages, or ends
        the turn with another token. Whitespace around the reply, which templates trim and add, does not count.
        """
        new = [message_of(message) for message in messages]
        if not self._is_chat():
            said = self._encode_after("".join(message[1] for message in new))
            return Continuation(said, broken=False, conversation=[*conversation, ("assistant", reply), *new])
        # One time for both renderings, in templates that write it.
        variables = {_CLOCK: datetime.now().strftime, **self._variables(variables_of)}
        before = [as_map(message) for message in conversation]
        context = self._rendered(before, variables)

        def render(answer: str) -> str:
            return self._written([*before, {"role": "assistant", "content": answer}], new, variables)

        whole, answer = self._with_reply(context, reply, render)
        rest = _rest(whole, context, reply)
        ids = None if rest is None else self._after_end(self._encode_after(rest), ended_by)
        conversation = [*conversation, ("assistant", answer), *new]
        return Continuation(self.encode(whole) if ids is None else ids, broken=ids is None, conversation=conversation)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that has its special tokens."""
        return [int(id_) for id_ in self.tokenizer.encode(text, add_special_tokens=False)]

    def response_ids(self, text: str, response: str) -> list[int]:
        """Return the token ids of a response that follows a text: some tokenizers put a space before a first word."""
        before, whole = self._encode_prompt(text), self.encode(text + response)
        follows = before and whole[: len(before)] == before
        return whole[len(before) :] if follows else self._encode_after(response)

    def after_answer(self, prompt: Content) -> list[str]:
        """Return what the chat template writes behind an answer: at the end, and before a message of the user.

        Without what cannot be told, and without white space.
        """
        answer, after = ("assistant", _PROBE), []
        for more in ((answer,), (answer, ("user", _NEXT))):
            with contextlib.suppress(ValueError):
                whole = self.text_with(prompt, *more) or ""
                after.append(whole.rpartition(_PROBE)[2].partition(_NEXT)[0].strip() if _PROBE in whole else "")
        return [*filter(None, after)]

    def settings(self, prompts: Iterable[Content]) -> str:
        """Return what ids depend on besides prompts and vocabulary, for a task's fingerprint; "" without a chat."""
        if not any(not prompt.ids and self.conversation(prompt) is not None for prompt in prompts):
            return ""
        variables = self._config.template_kwargs
        return json.dumps([self.tokenizer.chat_template, self._config.system, variables], sort_keys=True, default=str)

    def conversation(self, prompt: Content) -> Sequence[Message] | None:
        """Return the messages that the chat template renders for a prompt, None if it does not."""
        mode = self._config.template
        if mode == "chat" or (prompt.messages and self._is_chat()):
            return prompt.messages or [("user", prompt.text)]
        if not prompt.text and prompt.messages:
            why = 'task.template is "raw"' if mode == "raw" else "the model's tokenizer has no chat template"
            raise ValueError(f"it has messages and no text, and {why}: give it a text, or use a chat model's tokenizer")
        if self._config.system or self._variables(prompt):
            raise ValueError(
                "it is rendered without a chat template, so task.system and task.template_kwargs have no effect, and "
                'neither have its own tools and variables: set task.template = "chat", or remove them'
            )
        return None

    def require_complete(self, prompt: Content, response: Message | None = None) -> None:
        """Raise ValueError if the chat template ignores a role, tools, calls, names or the response's thoughts."""
        if prompt.ids or (messages := self.conversation(prompt)) is None:
            return
        variables = self._variables(prompt)
        instructed = self._config.system and messages[0][0] != _SYSTEM
        said = [*([(_SYSTEM, self._config.system)] if instructed else []), *messages]
        if not {(message[0], True) for message in said} <= self._written_roles:
            self._written([], said, variables)
        messages = [*messages, *([response] if response else [])]
        whole = [as_map(message) for message in messages]
        for name in (*_SAID, *(_THOUGHT if response else ())):
            # Each is left out once, but not from a tool's message, whose name is that of the call.
            kept = len(whole) - 1 if name in _THOUGHT else 0
            less = [one if n < kept or one["role"] == "tool" else _without(one, name) for n, one in enumerate(whole)]
            fewer = _without(variables, name)
            if (less, fewer) == (whole, variables):
                continue
            try:
                texts = {self._rendered(*one, asks=response is None) for one in ((whole, variables), (less, fewer))}
            # A template may refuse a conversation that lacks something.
            except ValueError:
                continue
            if len(texts) == 1:
                raise ValueError(f"the chat template does not write its `{name}`: remove it, or use another template")

    def warn_of_date(self, prompt: Content) -> str:
        """Return a sentence, which is also logged, if the chat template writes today's date into a prompt; else ""."""
        if prompt.ids or self.conversation(prompt) is None or _CLOCK not in str(self.tokenizer.chat_template):
            return ""
        if any("date" in name or name == _CLOCK for name in self._variables(prompt)):
            return ""
        sentence = (
            "the chat template may write today's date, so that prompts change every day: set it, as in "
            f'task.template_kwargs = {{ {_CLOCK} = "{datetime.now():%Y-%m-%d}" }}'
        )
        log.warning(sentence)
        return sentence

    def unknown_tokens(self, prompts: Sequence[Content], model: str) -> str:
        """Return a warning if the tokenizer of `model` does not know a quarter or more of one of the first prompts."""
        told = [(number, flags) for number, one in enumerate(prompts[:_FIRST], 1) if (flags := self._unknown(one))]
        number, flags = max(told, key=lambda one: sum(one[1]) / len(one[1]), default=(0, [False]))
        if 4 * sum(flags) < len(flags):
            return ""
        return (
            f"{sum(flags)} of {len(flags)} tokens of prompt {number} are unknown to the tokenizer of {model}, so the "
            "model does not see its words: use another model, or prompts of characters that it knows"
        )

    def _unknown(self, prompt: Content) -> list[bool]:
        """Return whether each token of a prompt is unknown, without those that a chat template writes around it."""
        unknown = self.tokenizer.unk_token_id
        # Some tokenizers name their end token for both.
        if unknown in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            unknown = None
        if prompt.ids:
            return [id_ == unknown for id_ in prompt.ids]
        messages = prompt.messages if self._is_chat() else ()
        texts = [message[1] for message in messages] or [prompt.text]
        # A tokenizer without an unknown token may drop what it does not know: each word of such a text counts.
        flags = [[id_ == unknown for id_ in self.encode(text)] or [True] * len(text.split()) for text in texts]
        return [flag for of_text in flags for flag in of_text]

    def _is_chat(self) -> bool:
        """Whether episodes are rendered by the chat template."""
        mode = self._config.template
        return mode == "chat" or (mode == "auto" and bool(self.tokenizer.chat_template))

    def _written(self, before: list[dict[str, Any]], new: Sequence[Message], variables: dict[str, Any]) -> str:
        """Render a conversation. Raises ValueError if the template leaves out the contents of a role's new messages."""
        maps = [as_map(message) for message in new]
        text = self._rendered([*before, *maps], variables)
        # A template may write a role at the beginning alone.
        for role, begins in {(message[0], not before) for message in new} - self._written_roles:
            # Some templates write the calls of a message and not its content.
            own = [one["role"] == role and not one.get("tool_calls") for one in maps]
            probed = [
                one | {"content": _PROBE + one["content"] + _PROBE} if is_own else one
                for is_own, one in zip(own, maps, strict=True)
            ]
            try:
                ignored = any(own) and self._rendered([*before, *probed], variables) == text
            # It renders these messages, and refuses another content.
            except ValueError:
                ignored = False
            if ignored:
                raise ValueError(f"the chat template does not write messages of the role {role!r}: use another role")
            self._written_roles.add((role, begins))
        return text

    def _with_reply(self, context: str, reply: str, render: Callable[[str], str]) -> tuple[str, str]:
        """Return the conversation with a reply as text, and the part of the reply that is its content.

        Some templates write what the model samples before its answer, such as the channel of gpt-oss, and get the
        answer alone. Of a reply that is refused because it has no such part, they get the text without special tokens.
        """
        try:
            whole, refused = render(reply), False
        except ValueError:
            whole, refused = "", True
        if _rest(whole, context, reply) is not None:
            return whole, reply
        probed = render(_PROBE)
        head = probed.rpartition(_PROBE)[0].removeprefix(context) if probed.startswith(context) else ""
        if head.strip() and head in reply:
            answer = reply.rpartition(head)[2]
        elif refused:
            answer = self.tokenizer.decode(self.encode(reply), skip_special_tokens=True)
        else:
            return whole, reply
        return render(answer), answer

    def _encode_after(self, text: str) -> list[int]:
        """Return the ids of a text that follows other tokens: some tokenizers put a space before the first word."""
        if (end := self.tokenizer.eos_token_id) is None:
            return self.encode(text)
        ids = self.encode(self.tokenizer.decode([end], skip_special_tokens=False) + text)
        return ids[1:] if ids[0] == end else self.encode(text)

    def _after_end(self, ids: list[int], ended_by: int | None) -> list[int] | None:
        """Leave out the end of the turn if it was sampled. Return None if another special token ended it."""
        if ended_by is None:
            return ids
        at = ids.index(ended_by) if ended_by in ids else 0
        if ids[at : at + 1] == [ended_by] and not self.tokenizer.decode(ids[:at], skip_special_tokens=False).strip():
            return ids[at + 1 :]
        token = self.tokenizer.added_tokens_decoder.get(ended_by)
        return None if token is not None and token.special else ids

    def _variables(self, prompt: Content) -> dict[str, Any]:
        return {**self._config.template_kwargs, **prompt.template_kwargs}

    def _rendered(self, conversation: list[dict[str, Any]], variables: dict[str, Any], *, asks: bool = True) -> str:
        if not self.tokenizer.chat_template:
            raise ValueError(
                'the model\'s tokenizer has no chat template: write the prompt as text and set task.template = "raw"'
            )
        if self._config.system and not (conversation and conversation[0]["role"] == _SYSTEM):
            conversation = [{"role": _SYSTEM, "content": self._config.system}, *conversation]
        if not _calls(conversation):
            return self._apply(conversation, variables, asks=asks)
        return self._apply(_with_arguments(conversation, as_text=self._takes_text), variables, asks=asks)

    @functools.cached_property
    def _takes_text(self) -> bool:
        """Whether the chat template appends the arguments of calls: it refuses an object, or writes Python's."""
        given = {_PROBE: _NEXT}
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": given}}
        probe: list[dict[str, Any]] = [{"role": "user", "content": "f"}]
        probe += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        for as_text in (False, True):
            with contextlib.suppress(ValueError):
                variables = dict(self._config.template_kwargs)
                text = self._apply(_with_arguments(probe, as_text=as_text), variables, asks=False)
                if as_text or str(given) not in text:
                    return as_text
        return False

    def _apply(self, conversation: list[dict[str, Any]], variables: dict[str, Any], *, asks: bool) -> str:
        try:
            if isinstance(date := variables.get(_CLOCK), str):
                variables = {**variables, _CLOCK: datetime.fromisoformat(date).strftime}
            return str(
                self.tokenizer.apply_chat_template(
                    conversation, add_generation_prompt=asks, tokenize=False, **variables
                )
            )
        # A template is a program that comes with the model, and may raise anything.
        except Exception as error:
            raise ValueError(f"the chat template refuses it: {first_line(error)}") from error

    def raw_ids(self, text: str) -> list[int]:
        """Tokenise a text with the special tokens that the tokenizer puts before it.

        A text that was rendered before may begin with the token that begins a sequence, which most tokenizers then put
        before it a second time. The model was not trained on two, so one is dropped. What the tokenizer puts behind a
        text, such as an end token, would end the response before it begins.
        """
        ids = self._encode_prompt(text)
        begin, before = self.tokenizer.bos_token_id, self._before
        return [*before, *ids[1:]] if begin is not None and before[-1:] == ids[:1] == [begin] else [*before, *ids]

    @functools.cached_property
    def _before(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text."""
        with_special, plain = (self.tokenizer.encode(_PROBE, add_special_tokens=flag) for flag in (True, False))
        places = range(len(with_special) - len(plain) + 1)
        return next(([*with_special[:n]] for n in places if [*with_special[n : n + len(plain)]] == [*plain]), [])


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name or not value}


def _rest(whole: str, context: str, reply: str) -> str | None:
    """Return what a conversation has after context and reply, None if it does not begin with them."""
    if not whole.startswith(context):
        return None
    rest = whole[len(context) :]
    pairs = ((rest, reply), (rest.lstrip(), reply.lstrip()), (rest.lstrip(), reply.strip()))
    return next((text[len(said) :] for text, said in pairs if text.startswith(said)), None)
