"""A sequence classifier with one label as a reward: its logit is the score of a (prompt, response) pair.

The score of a pair does not depend on the batch that it is computed in, beyond rounding: padding is on the right and
masked. Shape suffixes: N pairs, T tokens of the longest.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from tba.common.config import RewardModelSection
from tba.common.errors import ConfigError
from tba.common.memory import loading, out_of_memory
from tba.common.quantity import quantity
from tba.searcher.reward_model_files import own_pad_id, read_config, read_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": "auto"}

Score = float | str  # or the sentence of why there is none


class RewardModel:
    """A classifier of a directory on one device.

    Raises ConfigError if the files are no reward model, MemoryShort.
    """

    def __init__(self, directory: Path, config: RewardModelSection, device: str) -> None:
        self._config = config
        self._device = torch.device(device)
        self._model = _load(directory, config.dtype, self._device)
        self._tokenizer = read_tokenizer(directory, chat=config.template == "chat")
        self._vocabulary: int = self._model.get_input_embeddings().num_embeddings
        self._own_pad_id = own_pad_id(self._model.config)
        self._longest = _longest(self._model, self._tokenizer, config.max_length)

    def encode(self, prompt: str, response: str) -> list[int]:
        """The tokens of a pair. Raises ValueError for one that the model cannot score."""
        if self._config.template == "chat":
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            # The template writes the special tokens itself.
            try:
                text = self._tokenizer.apply_chat_template(turns, tokenize=False)
            except Exception as error:  # the template is a program of the model's maker
                raise ValueError(f"{type(error).__name__} of the chat template: {error}") from error
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        else:
            ids = self._tokenizer.encode(prompt + response, verbose=False)
        if not 0 < len(ids) <= self._longest:
            raise ValueError(f"{quantity(len(ids), 'token')}; it takes 1 to {self._longest} (reward_model.max_length)")
        if max(ids) >= self._vocabulary:
            raise ValueError(f"token {max(ids)} is outside the vocabulary of {self._vocabulary}")
        return ids

    def cut(self, pairs: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Places of pairs, longest first, in batches of at most `batch_tokens` with their padding.

        A batch has fewer pairs than there are tokens, so that there is one that none of them ends with.
        """
        part: list[int] = []
        for n in sorted(range(len(pairs)), key=lambda n: -len(pairs[n])):
            tokens = (len(part) + 1) * len(pairs[part[0]]) if part else 0
            if tokens > self._config.batch_tokens or len(part) == self._vocabulary - 1:
                yield part
                part = []
            part.append(n)
        if part:
            yield part

    def score(self, pairs: Sequence[Sequence[int]], begin: Callable[[int, int], None]) -> list[Score]:
        """One score per pair, in one batch, or in halves of it where memory is short.

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
            # Here, where the error and the tensors of its frames are gone.
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
        ids_NT = np.full((len(pairs), max(map(len, pairs))), self._pad_with(pairs), np.int64)
        attention_NT = np.zeros_like(ids_NT)
        for n, pair in enumerate(pairs):
            ids_NT[n, : len(pair)], attention_NT[n, : len(pair)] = pair, 1
        logits = self._model(
            input_ids=torch.from_numpy(ids_NT).to(self._device),
            attention_mask=torch.from_numpy(attention_NT).to(self._device),
        ).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return [score if np.isfinite(score) else f"the score is {score}" for score in scores]

    def _pad_with(self, pairs: Sequence[Sequence[int]]) -> int:
        """The padding token of a batch, which the model knows.

        transformers ignores the mask when it chooses where a decoder's score is read: at the last token that is not
        `pad_token_id`. A model that was trained with one is read as in its training. One without is read at the last
        token of all where a pair is alone: with a token that no pair ends with, it is so in a batch.
        """
        if self._own_pad_id is not None:
            return self._own_pad_id
        ends = {pair[-1] for pair in pairs}
        pad = next(token for token in range(self._vocabulary) if token not in ends)
        self._model.config.get_text_config().pad_token_id = pad
        return pad


def _load(directory: Path, dtype: str, device: torch.device) -> Any:
    config = read_config(directory)
    with loading(f"the reward model in {directory}", device):
        model, found = AutoModelForSequenceClassification.from_pretrained(
            directory,
            config=config,
            dtype=_DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        # A checkpoint without a head loads all the same, with a random one.
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(f"the reward model in {directory} is no classifier: it has no {', '.join(missing[:3])}")
        model.to(device).eval().requires_grad_(False)
    text = model.config.get_text_config()
    if hasattr(text, "use_cache"):
        text.use_cache = False
    return model


def _longest(model: Any, tokenizer: Any, max_length: int) -> int:
    """The most tokens of a pair: what the model has positions for and the configuration, or the tokenizer, allows."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (max_length or tokenizer.model_max_length, positions) if limit]
    return int(min(limits))
