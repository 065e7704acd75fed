"""A sequence classifier with one label as a reward: its logit is the score of a (prompt, response) pair.

The score of a pair does not depend on the batch that it is computed in, beyond rounding: padding is on the right and
masked. Shape suffixes: N pairs, T tokens of the longest.

`python -m tba.searcher.scoring.classifier FD` is the reward model's process, started by `rewards.py`. Its messages
are those of `worker_pool.py`: `begin` before each forward pass, and one `results` after each batch. An error of the
model other than a lack of memory ends the process: a CUDA context does not survive one.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from tba.common.config import RewardModelSection
from tba.common.errors import ConfigError, named, quantity
from tba.common.log import get_logger
from tba.common.rendering import Message, as_map
from tba.common.rotation import Rotation
from tba.common.system.load_errors import loading, not_loaded, out_of_memory
from tba.common.token_batches import cut_by_tokens
from tba.common.weights.model_files import model_directory, weight_files
from tba.common.weights.pretrained import from_config, from_directory
from tba.searcher.scoring.scoring import storable
from tba.searcher.scoring.worker_pool import Connection
from tba.searcher.tasks.task import Prompt

log = get_logger(__name__)

# Maximum tokens of one forward pass, including padding; a single pair may have more.
BATCH_TOKENS = 16_384

# A score, or a sentence why there is none.
Score = float | str


class RewardModel:
    """The classifier of a directory on a device. Raises ConfigError if the files are no reward model, OutOfMemory."""

    def __init__(self, directory: Path, config: RewardModelSection, device: str) -> None:
        self._config = config
        self._device = torch.device(device)
        self._model = _load(directory, self._device)
        self._tokenizer = _read_tokenizer(directory, chat=config.template == "chat")
        self._vocabulary: int = self._model.get_input_embeddings().num_embeddings
        self._own_pad_id = _own_pad_id(self._model.config)
        # The length of a pair is limited by the model's positions and by the tokenizer.
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        limits = (self._tokenizer.model_max_length, positions)
        self._max_tokens = int(min(limit for limit in limits if limit))

    def encode(self, prompt: str, response: str, messages: Sequence[Message] = ()) -> list[int]:
        """The tokens of a pair. Raises ValueError for one that the model cannot score.

        `messages` are those of a prompt that is a conversation; a chat template gets them instead of the text.
        """
        if self._config.template == "chat":
            whole = (*(messages or [("user", prompt)]), ("assistant", response))
            chat = [as_map(message) for message in whole]
            # A template is a program that comes with the model and may raise anything.
            try:
                text = self._tokenizer.apply_chat_template(chat, tokenize=False)
            except Exception as error:
                raise ValueError(f"the chat template raised {named(error)}") from error
            # The template has written the special tokens.
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        else:
            if messages and not prompt:
                raise ValueError('the prompt has messages and no text: set reward_model.template = "chat"')
            ids = self._tokenizer.encode(prompt + response, verbose=False)
        if not 0 < len(ids) <= self._max_tokens:
            raise ValueError(f"{quantity(len(ids), 'token')}; the reward model takes 1 to {self._max_tokens}")
        if max(ids) >= self._vocabulary:
            raise ValueError(f"token {max(ids)} is outside the vocabulary of {self._vocabulary}")
        return ids

    def batches(self, pairs: Sequence[Sequence[int]]) -> list[list[int]]:
        """Indices of pairs, longest first, in batches of at most BATCH_TOKENS, padding included.

        A batch has fewer pairs than the vocabulary has tokens, so that there is a token that none of them ends with.
        """
        cut = partial(cut_by_tokens, limit=BATCH_TOKENS, padded=True, max_rows=self._vocabulary - 1)
        return Rotation.of(self._model.config).split([len(pair) for pair in pairs], cut)

    def score(self, pairs: Sequence[Sequence[int]], begin: Callable[[int, int], None]) -> list[Score]:
        """One score per pair, computed in one batch, or in halves of it when memory is short.

        `begin(start, stop)` is called before each forward pass of `pairs[start:stop]`.
        """
        scores: list[Score] = []
        todo = [(0, len(pairs))]
        while todo:
            start, stop = todo.pop()
            begin(start, stop)
            try:
                scores += self._forward(pairs[start:stop])
                continue
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
            # After the block: the error, and the tensors that its frames refer to, are gone.
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            if stop - start == 1:
                scores.append(f"out of memory on {self._device} with {quantity(len(pairs[start]), 'token')}")
            else:
                middle = (start + stop) // 2
                todo += [(middle, stop), (start, middle)]
        return scores

    @torch.inference_mode()
    def _forward(self, pairs: Sequence[Sequence[int]]) -> list[Score]:
        ids_NT = np.full((len(pairs), max(map(len, pairs))), self._pad_id(pairs), np.int64)
        attention_NT = np.zeros_like(ids_NT)
        for n, pair in enumerate(pairs):
            ids_NT[n, : len(pair)], attention_NT[n, : len(pair)] = pair, 1
        logits = self._model(
            input_ids=torch.from_numpy(ids_NT).to(self._device),
            attention_mask=torch.from_numpy(attention_NT).to(self._device),
        ).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return [score if np.isfinite(score) else f"the score is {score}" for score in scores]

    def _pad_id(self, pairs: Sequence[Sequence[int]]) -> int:
        """Choose the padding token of a batch, and set it in the model.

        transformers ignores the attention mask when it chooses the position to read a decoder's score at: it takes the
        last token that is not `pad_token_id`. A model trained with a padding token must be read the same way as in
        training. A model without one is read at the very last token of a pair that is alone; in a batch, padding with
        a token that no pair ends with has the same effect.
        """
        if self._own_pad_id is not None:
            return self._own_pad_id
        ends = {pair[-1] for pair in pairs}
        pad = next(token for token in range(self._vocabulary) if token not in ends)
        self._model.config.get_text_config().pad_token_id = pad
        return pad


def check_files(config: RewardModelSection) -> str:
    """Describe the reward model in one sentence, for `tba doctor`. Raises ConfigError for another kind of model.

    The classifier is built without memory for its weights; whether the files hold a head is only seen when they load.
    """
    directory = model_directory(config.path, setting="reward_model.path")
    model_config = _read_config(directory)
    with torch.device("meta"):
        try:
            name = type(from_config(AutoModelForSequenceClassification, model_config, directory)).__name__
        except ConfigError:
            raise
        # A model's constructor may raise anything for values that it does not expect.
        except Exception as error:
            raise not_loaded(_model_in(directory), error) from error
    weight_files(directory)
    _read_tokenizer(directory, chat=config.template == "chat")
    pad = _own_pad_id(model_config)
    padding = "no padding token of its own" if pad is None else f"pads with token {pad}"
    return f"{config.path}: {name}, {padding}, {config.template}"


def _model_in(directory: Path) -> str:
    return f"the reward model in {directory}"


def _load(directory: Path, device: torch.device) -> Any:
    config = _read_config(directory)
    with loading(_model_in(directory), device):
        options = {"config": config, "dtype": "auto", "use_safetensors": True, "output_loading_info": True}
        model, found = from_directory(AutoModelForSequenceClassification, directory, **options)
        # A checkpoint without a head loads too, with a random one.
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(f"{_model_in(directory)} is not a classifier: it lacks {', '.join(missing[:3])}")
        model.to(device).eval().requires_grad_(False)
    text = model.config.get_text_config()
    if hasattr(text, "use_cache"):
        text.use_cache = False
    return model


def _read_config(directory: Path) -> Any:
    """The configuration of a classifier with one label. Raises ConfigError if it is something else, or OutOfMemory."""
    model = _model_in(directory)
    with loading(model):
        config: Any = from_directory(AutoConfig, directory)
    if config.num_labels != 1:
        raise ConfigError(f"{model} has {config.num_labels} labels: a reward needs a classifier with one")
    pad, rows = _own_pad_id(config), getattr(config.get_text_config(), "vocab_size", None)
    if pad is not None and rows is not None and pad >= rows:
        raise ConfigError(
            f"{model} pads with token {pad}, and has {rows} embeddings: "
            "set pad_token_id in its config.json to a token below, or to null if it was trained without padding"
        )
    return config


def _read_tokenizer(directory: Path, *, chat: bool) -> Any:
    """The model's tokenizer. With `chat` it must have a chat template. Raises ConfigError, OutOfMemory."""
    try:
        tokenizer = from_directory(AutoTokenizer, directory)
    except ConfigError:
        raise
    # The library raises many kinds; `not_loaded` tells a lack of memory from faulty files.
    except Exception as error:
        raise not_loaded(f"the tokenizer of {_model_in(directory)}", error) from error
    if chat and not tokenizer.chat_template:
        raise ConfigError(
            f'reward_model.template = "chat", and the tokenizer in {directory} has no chat template: '
            'set reward_model.template = "concatenation"'
        )
    return tokenizer


def _own_pad_id(config: Any) -> int | None:
    """The padding token that a model was trained with. None if there is none, which some files write as -1."""
    pad = config.get_text_config().pad_token_id
    return None if pad is None or pad < 0 else int(pad)


def main() -> None:
    connection = Connection()
    transformers_logging.disable_progress_bar()
    settings = next(connection.messages)
    try:
        config = RewardModelSection.model_validate(settings["config"])
        model = RewardModel(Path(settings["directory"]), config, settings["device"])
    except Exception as error:
        is_refused = isinstance(error, ConfigError)
        if not is_refused:
            log.exception("the model was not loaded")
        connection.send(["refused", storable(str(error))] if is_refused else ["failed", storable(named(error))])
        sys.exit(1)
    connection.send(["ready"])
    for items in connection.messages:
        _score(connection, model, items)


def _score(connection: Connection, model: RewardModel, items: Sequence[Any]) -> None:
    # A process that ends while it tokenizes may have ended because of any of these.
    connection.send(["begin", [item[0] for item in items]])
    tickets, pairs, refused = [], [], []
    for ticket, fields, response, _ in items:
        prompt = Prompt(*fields)
        try:
            pairs.append(model.encode(prompt.text, response, prompt.messages))
            tickets.append(ticket)
        except ValueError as error:
            refused.append([ticket, None, storable(f"not scored: {error}")])
    if refused:
        connection.send(["results", refused])

    def begin(numbers: Sequence[int], start: int, stop: int) -> None:
        connection.send(["begin", [tickets[n] for n in numbers[start:stop]]])

    for batch in model.batches(pairs):
        batch_tickets = [tickets[n] for n in batch]
        try:
            scores = model.score([pairs[n] for n in batch], partial(begin, batch))
        except Exception as error:
            log.exception("the model failed", pairs=len(batch))
            connection.send(["results", [[ticket, None, storable(named(error))] for ticket in batch_tickets]])
            sys.exit(1)
        outcomes = ([None, score] if isinstance(score, str) else [score, None] for score in scores)
        connection.send(["results", [[n, *outcome] for n, outcome in zip(batch_tickets, outcomes, strict=True)]])


if __name__ == "__main__":
    main()
