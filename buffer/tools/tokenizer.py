"""Text to token ids as a searcher encodes it, and back.

Encoding needs transformers: the ids of tokenizer.json alone differ for families whose class changes how text is split.
Reading rows needs only the library `tokenizers`.
"""

import os
from collections.abc import Callable
from pathlib import Path

from tba.common.config import TaskSection
from tba.common.log import get_logger
from tba.common.rendering import PromptRenderer
from tba.common.weights.model_files import eos_ids, model_directory
from tba.common.weights.pretrained import load_tokenizer

log = get_logger(__name__)

_FILE = "tokenizer.json"


class Tokenizer:
    """The tokenizer of a model. Raises as `load_tokenizer`."""

    def __init__(self, model: str) -> None:
        directory = model_directory(model)
        self._renderer = PromptRenderer(load_tokenizer(directory), TaskSection(template="raw"))
        self._ends = eos_ids(directory, self._renderer.tokenizer.eos_token_id)

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, as a searcher encodes a text that no chat template renders."""
        return self._renderer.raw_ids(text)

    def response(self, text: str, prompt: str, *, finished: bool) -> list[int]:
        """Return the ids of a response, `finished` with the end token. Raises ValueError if it spells an end token."""
        ids = self._renderer.response_ids(prompt, text)
        if spelt := set(ids) & set(self._ends):
            token = self._renderer.tokenizer.decode([min(spelt)], skip_special_tokens=False)
            raise ValueError(f"the response spells the end token {token!r}: remove it")
        return [*ids, *(self._ends[:1] if finished else [])]


def decoder_of(model: str) -> Callable[..., str] | None:
    """Return a function from ids, and whether to skip special ones, to text; None if there is no tokenizer."""
    # Not Path.expanduser, which raises for a user without a home.
    path = Path(os.path.expanduser(model), _FILE)
    if not model or not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer as Loader

        loaded = Loader.from_file(str(path))
    # The library raises bare Exceptions. Rows are then shown as ids.
    except Exception as error:  # noqa: BLE001
        log.warning("rows are shown without text", reason=f"{path}: {error}")
        return None
    return lambda ids, skip=True: str(loaded.decode(ids, skip_special_tokens=skip))
