"""What ends a response before its length limit, and which of its text is scored.

The end tokens of the model and the token ids of `search.stop` end it at that token, and strings at the token that
completes one of them. All tokens are trained on; the text of the token or string that ended it is not scored.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from tba.common.config import Config
from tba.common.rendering import Content, PromptRenderer, Tokenizer
from tba.common.weights.model_files import model_directory
from tba.common.weights.pretrained import end_tokens, split_stop
from tba.common.wire.trajectory import Int32

# A character has at most four bytes, and a token at least one. The rest is for special tokens, which have no text.
_TOKENS_PER_CHARACTER = 4
_MORE_TOKENS = 8


class Stopping:
    """The end tokens of a model, and `search.stop`. A string that is a special token of the tokenizer means its id.

    Raises ConfigError for a string that contains one among other characters.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Collection[str | int], end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        ids, strings = split_stop(stop, tokenizer)
        self.ids = frozenset([*end_ids, *ids])
        self.strings = tuple(strings)
        self._window = _TOKENS_PER_CHARACTER * max(map(len, strings), default=0) + _MORE_TOKENS

    def also(self, stop: Collection[str | int]) -> "Stopping":
        """Return these, and the strings and ids of one request. Raises ConfigError as above."""
        return Stopping(self._tokenizer, [*self.strings, *stop], self.ids) if stop else self

    def ended_by(self, tokens: Sequence[int]) -> str | int | None:
        """Return the id or the string that ended a response; None for the tokenizer's end token, or its length."""
        if int(tokens[-1]) in self.ids:
            return None if tokens[-1] == self._tokenizer.eos_token_id else int(tokens[-1])
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return min((string for string in self.strings if string in text), key=text.find, default=None)

    def completes_string(self, tokens: Sequence[int]) -> bool:
        """Whether the last of the tokens of a response completes a string, which may begin in any token before it."""
        if not self.strings:
            return False
        text = self._tokenizer.decode(list(tokens[-self._window :]), skip_special_tokens=True)
        return any(string in text for string in self.strings)

    def scored_text(self, tokens: Sequence[int] | Int32) -> str:
        """Return the text of a response without special tokens, up to what ended it."""
        # An array: in a list transformers looks at each number, which takes longer than the decoding.
        ids: Any = np.asarray(tokens[:-1] if len(tokens) and int(tokens[-1]) in self.ids else tokens, np.int32)
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return self.before_string(text)

    def before_string(self, text: str) -> str:
        """Return the part of a text before the first string that ends a response."""
        return text[: min((at for string in self.strings if (at := text.find(string)) >= 0), default=None)]

    def whole_text(self, tokens: Sequence[int]) -> str:
        """Return the text of an episode: replies, observations and special tokens."""
        text: str = self._tokenizer.decode(np.asarray(tokens, np.int32), skip_special_tokens=False)
        return text.encode("utf-8", "replace").decode()


def read_stopping(config: Config, tokenizer: Tokenizer) -> Stopping:
    """Return what ends the responses of a run. Raises ConfigError for end tokens that are malformed."""
    ids, strings = end_tokens(model_directory(config.model.path), config.search.stop, tokenizer)
    return Stopping(tokenizer, strings, ids)


def unstopped_turn(stopping: Stopping, renderer: PromptRenderer, prompts: Iterable[Content]) -> str:
    """Return a warning if no response ends at what the chat template writes behind an answer, else "".

    The model was trained to write that, so that most responses would continue behind it up to their length limit.
    """
    rendered = (prompt for prompt in prompts if not prompt.ids and renderer.conversation(prompt) is not None)
    if (first := next(rendered, None)) is None:
        return ""
    texts, tokenizer = renderer.after_answer(first), renderer.tokenizer
    encoded = [renderer.encode(text) for text in texts]
    # Strings are looked for in text without special tokens.
    plain = [tokenizer.decode(ids, skip_special_tokens=True) for ids in encoded]
    # A model may write more before the token that ends it, if the template does so in every turn, as Command-R's. What
    # stands at the end of a conversation alone, as in Phi-3's, is no part of a turn, and gpt-oss's have another end.
    pairs = zip(encoded, plain, strict=True)
    ends_all = all(stopping.ids & {*ids} or stopping.before_string(text) != text for ids, text in pairs)
    if ends_all or encoded[0][0] in stopping.ids or plain[0].startswith(stopping.strings):
        return ""
    after, ids = texts[0], encoded[0]
    added = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    line, token = after.splitlines()[0], next((added[id_] for id_ in ids if id_ in added), "")
    # The text before the first such token, or the token itself.
    turn = (line.partition(token)[0] if token else line).strip() or token
    return (
        f"the chat template ends an answer with {turn!r}, which ends no response: the end tokens are "
        f"{', '.join(repr(added.get(id_, id_)) for id_ in sorted(stopping.ids)) or 'none'}; set "
        f"search.stop = [{json.dumps(turn, ensure_ascii=False)}]"
    )
