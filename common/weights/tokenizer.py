"""Load a tokenizer with transformers. Without transformers, `tba.buffer.tools.tokenizer` reads tokenizer.json."""

import os
from pathlib import Path
from typing import Any

from tba.common.errors import ConfigError, MissingExtra, first_line
from tba.common.weights.model_files import need_tokenizer


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
        if directory.is_dir():
            need_tokenizer(os.listdir(directory), str(directory), "the model")
        alone = (directory / "tokenizer.model").exists() and not (directory / "tokenizer.json").exists()
        advice = "; to read a tokenizer.model alone, pip install '.[sentencepiece]'" if alone else ""
        raise ConfigError(f"{directory} has no tokenizer that loads: {first_line(error)}{advice}") from error
