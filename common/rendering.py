"""Render prompts to text and token ids: the same in a searcher, in `tba eval` and in `tba sft`.

A prompt is a text, a conversation, or token ids. `task.template` decides how it is rendered:

    "raw"     the text as it is, with the special tokens that the tokenizer adds
    "chat"    by the chat template of the tokenizer; a text is one message of the user
    "auto"    "chat" for a prompt with messages if the tokenizer has a chat template, else "raw"

A chat template writes all special tokens itself, so the tokenizer adds none to its text, as
`apply_chat_template(tokenize=True)` does.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tba.common.config import TaskSection
from tba.common.errors import first_line

# A role, such as "user", and what it says.
Message = tuple[str, str]

_SYSTEM = "system"
# A text that no template writes.
_PROBE = "a7f3"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that renders prompts and reads responses."""

    chat_template: Any

    @property
    def added_tokens_decoder(self) -> dict[int, Any]: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool, **variables: Any
    ) -> Any: ...


class Content(Protocol):
    """What is rendered of a prompt. `ids`, if there are any, are used as they are."""

    @property
    def text(self) -> str: ...

    @property
    def messages(self) -> Sequence[Message]: ...

    @property
    def ids(self) -> Sequence[int]: ...


class PromptRenderer:
    """Renders prompts for one tokenizer by `task.template`, `task.system` and `task.template_kwargs`.

    All methods raise ValueError, with a sentence, for a prompt that these settings cannot render.
    """

    def __init__(self, tokenizer: Tokenizer, config: TaskSection) -> None:
        self.tokenizer = tokenizer
        self._config = config

    def ids(self, prompt: Content) -> list[int]:
        """Return the token ids that the engine gets."""
        if prompt.ids:
            return list(prompt.ids)
        messages = self.conversation(prompt)
        return self.raw_ids(prompt.text) if messages is None else self.conversation_ids(messages)

    def text(self, prompt: Content) -> str:
        """Return the prompt as text, special tokens included: what people read in the database."""
        if prompt.ids:
            return prompt.text or self.tokenizer.decode(list(prompt.ids), skip_special_tokens=False)
        messages = self.conversation(prompt)
        return prompt.text if messages is None else self._rendered(messages, add_generation_prompt=True)

    def conversation_ids(self, messages: Iterable[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the token ids of a conversation, rendered by the chat template."""
        text = self._rendered(messages, add_generation_prompt=add_generation_prompt)
        return [int(id_) for id_ in self.tokenizer.encode(text, add_special_tokens=False)]

    def after_answer(self) -> str:
        """Return what the chat template writes behind an answer, "" if that cannot be told."""
        try:
            messages = [("user", _PROBE), ("assistant", _PROBE)]
            _, _, after = self._rendered(messages, add_generation_prompt=False).rpartition(_PROBE)
        except ValueError:
            return ""
        return after

    def settings(self, prompts: Iterable[Content]) -> str:
        """Return all that the ids depend on besides the prompts and the vocabulary; "" if none is rendered as a chat.

        Searchers with other settings answer other prompts, so this is part of the fingerprint of a task.
        """
        if not any(not prompt.ids and self.conversation(prompt) is not None for prompt in prompts):
            return ""
        variables = self._config.template_kwargs
        return json.dumps([self.tokenizer.chat_template, self._config.system, variables], sort_keys=True, default=str)

    def conversation(self, prompt: Content) -> Sequence[Message] | None:
        """Return the messages that the chat template renders for a prompt, None if it does not."""
        mode = self._config.template
        chat = mode == "chat" or (mode == "auto" and bool(prompt.messages and self.tokenizer.chat_template))
        if chat:
            return prompt.messages or [("user", prompt.text)]
        if not prompt.text and prompt.messages:
            why = 'task.template is "raw"' if mode == "raw" else "the model's tokenizer has no chat template"
            raise ValueError(f"it has messages and no text, and {why}: give it a text, or use a chat model's tokenizer")
        if self._config.system or self._config.template_kwargs:
            raise ValueError(
                "it is rendered without a chat template, so task.system and task.template_kwargs have no effect: "
                'set task.template = "chat", or remove them'
            )
        return None

    def _rendered(self, messages: Iterable[Message], *, add_generation_prompt: bool) -> str:
        if not self.tokenizer.chat_template:
            raise ValueError(
                'the model\'s tokenizer has no chat template: write the prompt as text and set task.template = "raw"'
            )
        conversation = [{"role": role, "content": content} for role, content in messages]
        if self._config.system and not (conversation and conversation[0]["role"] == _SYSTEM):
            conversation.insert(0, {"role": _SYSTEM, "content": self._config.system})
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **self._config.template_kwargs,
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
        ids = [int(id_) for id_ in self.tokenizer.encode(text, add_special_tokens=False)]
        begin, before = self.tokenizer.bos_token_id, self._before
        return [*before, *ids[1:]] if begin is not None and before[-1:] == ids[:1] == [begin] else [*before, *ids]

    @functools.cached_property
    def _before(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text."""
        with_special, plain = (self.tokenizer.encode(_PROBE, add_special_tokens=flag) for flag in (True, False))
        places = range(len(with_special) - len(plain) + 1)
        return next(([*with_special[:n]] for n in places if [*with_special[n : n + len(plain)]] == [*plain]), [])
