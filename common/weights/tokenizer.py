"""Load a tokenizer with transformers, and tokenise prompts.

Without transformers, `tba.buffer.tools.tokenizer` reads tokenizer.json.
"""

from pathlib import Path
from typing import Any, Protocol

from tba.common.errors import ConfigError, MissingExtra, first_line


class PromptTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that tokenises prompts."""

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...


def encode_prompt(tokenizer: PromptTokenizer, text: str) -> list[int]:
    """Tokenise a prompt as searchers and `tba sft` do it, with the tokenizer's special tokens.

    The text of a chat template may begin with the token that begins a sequence, which most tokenizers then put before
    it a second time. The model was not trained on two, so one is dropped.
    """
    ids = [int(id_) for id_ in tokenizer.encode(text)]
    begin = tokenizer.bos_token_id
    return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a model directory: a PreTrainedTokenizerBase.

    Raises ConfigError if it cannot be loaded, MissingExtra if transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise MissingExtra("transformers", "train") from None
    try:
        return AutoTokenizer.from_pretrained(directory)
    # transformers raises many kinds of errors here; all mean that the files are not a tokenizer.
    except Exception as error:
        raise ConfigError(f"{directory} has no tokenizer that loads: {first_line(error)}") from error
