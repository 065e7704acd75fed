"""Text to token ids and back, with the model's `tokenizer.json`. Needs neither torch nor transformers."""

import os
from collections.abc import Callable
from pathlib import Path

from tba.common.errors import ConfigError, MissingExtra
from tba.common.weights.model_files import eos_ids, model_directory

_FILE = "tokenizer.json"


class Tokenizer:
    """The tokenizer of a model.

    Raises ConfigError if the model has none that loads, MissingExtra if the library is not installed.
    """

    def __init__(self, model: str) -> None:
        directory = model_directory(model)
        try:
            from tokenizers import Tokenizer as Loader
        except ModuleNotFoundError:
            raise MissingExtra("tokenizers", "train") from None
        try:
            self._tokenizer = Loader.from_file(str(directory / _FILE))
        # The library raises bare Exceptions.
        except Exception as error:
            raise ConfigError(f"{directory} has no {_FILE} that loads: {error}") from error
        self._eos = eos_ids(directory)[:1]

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, as a searcher encodes a text that no chat template renders.

        The begin token is not added to a text that begins with it.
        """
        ids = list(self._tokenizer.encode(text).ids)
        plain = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        twice = len(ids) > len(plain) > 0 and ids[0] == plain[0] and ids[1 : 1 + len(plain)] == plain
        return ids[1:] if twice else ids

    def response(self, text: str, *, finished: bool) -> list[int]:
        """Return the ids of a response. A finished one ends with the model's end token, like a generated one."""
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return [*ids, *(self._eos if finished else [])]

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def decoder_of(model: str) -> Callable[[list[int]], str] | None:
    """Return a function from token ids to text; None if the model is not a local directory with a tokenizer."""
    if not model or not Path(os.path.expanduser(model), _FILE).is_file():
        return None
    try:
        return Tokenizer(model).decode
    except ConfigError:
        return None
