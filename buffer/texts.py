"""Text to token ids and back, with the model's `tokenizer.json`; no torch and no transformers are needed."""

from collections.abc import Callable
from pathlib import Path

from tba.common.errors import ConfigError, MissingExtra
from tba.common.model_files import eos_ids, model_directory

_FILE = "tokenizer.json"


class Tokenizer:
    """The tokenizer of a model.

    Raises ConfigError if the model has none that loads, MissingExtra where the library is not installed.
    """

    def __init__(self, model: str) -> None:
        directory = model_directory(model)
        try:
            from tokenizers import Tokenizer as Loader
        except ModuleNotFoundError:
            raise MissingExtra("tokenizers", "train") from None
        try:
            self._tokenizer = Loader.from_file(str(directory / _FILE))
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(f"{directory} has no {_FILE} that loads: {error}") from error
        self._eos = eos_ids(directory)[:1]

    def prompt(self, text: str) -> list[int]:
        """Ids as a searcher makes them of a prompt."""
        return list(self._tokenizer.encode(text).ids)

    def response(self, text: str, *, finished: bool) -> list[int]:
        """Ids of a response; a finished one ends with the model's end token, as a generated one does."""
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return [*ids, *(self._eos if finished else [])]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def decoder_of(model: str) -> Callable[[list[int]], str] | None:
    """How to read the token ids of a model; None if there is nothing at hand. Fetches nothing."""
    if not model or not (Path(model).expanduser() / _FILE).is_file():
        return None
    try:
        return Tokenizer(model).decode
    except ConfigError:
        return None
