"""What the files of a reward model must be, told from its configuration and tokenizer before a weight is read."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tba.common.config import RewardModelSection
from tba.common.errors import ConfigError
from tba.common.memory import loading, not_loaded
from tba.common.model_files import model_directory, weight_files

SETTING = "reward_model.path"


def check_files(section: RewardModelSection) -> str:
    """One sentence on the model of `[reward_model]`, for `tba doctor`. Raises ConfigError if it cannot be one.

    The classifier is built without memory for its weights; whether the files hold a head is seen when they are loaded.
    """
    directory = model_directory(section.path, setting=SETTING)
    config = read_config(directory)
    with torch.device("meta"):
        try:
            name = type(AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)).__name__
        except Exception as error:  # whatever a model's constructor makes of such values
            raise not_loaded(f"the reward model in {directory}", error) from error
    weight_files(directory)
    read_tokenizer(directory, chat=section.template == "chat")
    return f"{section.path}: {name}, {_padding(config)}, {section.template}"


def read_config(directory: Path) -> Any:
    """The configuration of a classifier with one label. Raises ConfigError if it is something else, or MemoryShort."""
    with loading(f"the reward model in {directory}"):
        config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if config.num_labels != 1:
        raise ConfigError(
            f"the reward model in {directory} has {config.num_labels} labels: a reward needs a classifier with one"
        )
    pad, rows = own_pad_id(config), getattr(config.get_text_config(), "vocab_size", None)
    if pad is not None and rows is not None and pad >= rows:
        raise ConfigError(
            f"the reward model in {directory} pads with token {pad}, and has {rows} embeddings: "
            "set pad_token_id in its config.json to a token below, or to null if it was trained without padding"
        )
    return config


def read_tokenizer(directory: Path, *, chat: bool) -> Any:
    """Its tokenizer; with a template if it is to `chat`. Raises ConfigError, MemoryShort."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds; all but one mean that the files are none
        raise not_loaded(f"the tokenizer of the reward model in {directory}", error) from error
    if chat and not tokenizer.chat_template:
        raise ConfigError(
            f'reward_model.template = "chat", and the tokenizer in {directory} has no chat template: '
            'set reward_model.template = "concatenation"'
        )
    return tokenizer


def own_pad_id(config: Any) -> int | None:
    """The padding token that a model was trained with; None without one, which some files write as -1."""
    pad = config.get_text_config().pad_token_id
    return None if pad is None or pad < 0 else int(pad)


def _padding(config: Any) -> str:
    pad = own_pad_id(config)
    return "no padding token of its own" if pad is None else f"pads with token {pad}"
