"""A sequence classifier with one label as a reward: its logit is the score of a (prompt, response) pair.

The score of a pair does not depend on the batch that it is computed in, beyond rounding: padding is on the right and
masked. Shape suffixes: N pairs, T tokens of the longest.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tba.common.config import RewardModelSection
from tba.common.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": "auto"}
# What torch says when the CPU's allocator fails; a GPU has a class of errors of its own.
_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"

Score = float | str  # or the sentence of why there is none


class RewardModel:
    """A classifier of a directory on one device. Raises ConfigError if it does not load or is no reward model."""

    def __init__(self, directory: Path, config: RewardModelSection, device: str) -> None:
        self._config = config
        self._device = torch.device(device)
        self._model = _load(directory, config.dtype)
        self._tokenizer = _load_tokenizer(directory, chat=config.template == "chat")
        self._vocabulary: int = self._model.get_input_embeddings().num_embeddings
        self._pad_id = _padded_with(self._model, self._tokenizer)
        self._longest = _longest(self._model, self._tokenizer, config.max_length)
        self._model.to(self._device).eval().requires_grad_(False)

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
            raise ValueError(f"{len(ids)} tokens; it takes 1 to {self._longest} (reward_model.max_length)")
        if max(ids) >= self._vocabulary:
            raise ValueError(f"token {max(ids)} is outside the vocabulary of {self._vocabulary}")
        return ids

    def cut(self, pairs: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Places of pairs, longest first, in batches of at most `batch_tokens` with their padding."""
        part: list[int] = []
        for n in sorted(range(len(pairs)), key=lambda n: -len(pairs[n])):
            if part and (len(part) + 1) * len(pairs[part[0]]) > self._config.batch_tokens:
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
                if not _out_of_memory(error):
                    raise
            # Here, where the error and the tensors of its frames are gone.
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            if stop - start == 1:
                scores.append(f"out of memory on {self._device} with {len(pairs[start])} tokens")
            else:
                middle = (start + stop) // 2
                todo += [(middle, stop), (start, middle)]
        return scores

    @torch.inference_mode()
    def _forward(self, pairs: Sequence[Sequence[int]]) -> list[Score]:
        ids_NT = np.full((len(pairs), max(map(len, pairs))), self._pad_id, np.int64)
        attention_NT = np.zeros_like(ids_NT)
        for n, pair in enumerate(pairs):
            ids_NT[n, : len(pair)], attention_NT[n, : len(pair)] = pair, 1
        logits = self._model(
            input_ids=torch.from_numpy(ids_NT).to(self._device),
            attention_mask=torch.from_numpy(attention_NT).to(self._device),
        ).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return [score if np.isfinite(score) else f"the score is {score}" for score in scores]


def _load(directory: Path, dtype: str) -> Any:
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=_DTYPES[dtype], use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the reward model in {directory} cannot be loaded: {reason}") from error
    if model.config.num_labels != 1:
        raise ConfigError(
            f"the reward model in {directory} has {model.config.num_labels} labels: "
            "a reward needs a classifier with one"
        )
    # A checkpoint without a head loads all the same, with a random one.
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(f"the reward model in {directory} is no classifier: it has no {', '.join(missing[:3])}")
    text = model.config.get_text_config()
    if hasattr(text, "use_cache"):
        text.use_cache = False
    return model


def _load_tokenizer(directory: Path, *, chat: bool) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds; all mean that the files are no tokenizer
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the reward model in {directory} has no tokenizer that loads: {reason}") from error
    if chat and not tokenizer.chat_template:
        raise ConfigError(
            f'reward_model.template = "chat", and the tokenizer in {directory} has no chat template: '
            'set reward_model.template = "concatenation"'
        )
    return tokenizer


def _padded_with(model: Any, tokenizer: Any) -> int:
    """The padding token, made known to the model: a decoder is read at its last token that is not this one."""
    text = model.config.get_text_config()
    for candidate in (text.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0):
        if candidate is not None:
            text.pad_token_id = int(candidate)
            break
    return int(text.pad_token_id)


def _longest(model: Any, tokenizer: Any, max_length: int) -> int:
    """The most tokens of a pair: what the model has positions for and the configuration, or the tokenizer, allows."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (max_length or tokenizer.model_max_length, positions) if limit]
    return int(min(limits))


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU_OUT_OF_MEMORY in str(error)
