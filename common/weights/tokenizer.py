"""Load a tokenizer with transformers. Without transformers, `tba.buffer.tools.tokenizer` reads tokenizer.json."""

import os
from pathlib import Path
from typing import Any

from tba.common.errors import ConfigError, MissingExtra, first_line
from tba.common.weights.model_files import need_tokenizer
from tba.common.weights.pretrained import from_directory

# What texts of every kind have: spaces, digits, line breaks.
_ROUND_TRIP = "How are you, 12 friends?\n\n  Two spaces."


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a model directory: a PreTrainedTokenizerBase.

    Raises ConfigError if it cannot be loaded or loses spaces, MissingExtra if transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise MissingExtra("transformers", "train") from None
    try:
        tokenizer = from_directory(AutoTokenizer, directory)
    except ConfigError:
        raise
    # transformers raises many kinds of errors here; all mean that the files are not a tokenizer.
    except Exception as error:
        if directory.is_dir():
            need_tokenizer(os.listdir(directory), str(directory), "the model")
        alone = (directory / "tokenizer.model").exists() and not (directory / "tokenizer.json").exists()
        advice = "; to read a tokenizer.model alone, pip install '.[sentencepiece]'" if alone else ""
        raise ConfigError(f"{directory} has no tokenizer that loads: {first_line(error)}{advice}") from error
    _check_round_trip(directory, tokenizer)
    return tokenizer


def _check_round_trip(directory: Path, tokenizer: Any) -> None:
    """Raise ConfigError if the class that transformers chose changes a text that tokenizer.json keeps.

    It may split a text in another way than its file says (transformers #45488): all spaces are then lost, in prompts
    and in what is scored.
    """
    ids = tokenizer.encode(_ROUND_TRIP, add_special_tokens=False)
    found = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    path = directory / "tokenizer.json"
    if found == _ROUND_TRIP or not path.is_file():
        return
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(path))
    if plain.decode(plain.encode(_ROUND_TRIP, add_special_tokens=False).ids) == _ROUND_TRIP:
        raise ConfigError(
            f"{directory}: transformers reads its tokenizer as {type(tokenizer).__name__}, which turns {_ROUND_TRIP!r} "
            f'into {found!r:.200}; tokenizer.json alone keeps it: set "tokenizer_class": "PreTrainedTokenizerFast" in '
            "tokenizer_config.json"
        )
