"""The frozen reference in a searcher: sequence log-probabilities by the trainer's definition (`trainer/model.py`).

Float32 weights, teacher forced, temperature 1, the sum in float64 over the tokens that count. It is written here again
since searcher and trainer share no code that needs torch; a test holds the two together.

Shape suffixes: N rows, T tokens of the longest, R response tokens of one row, c a chunk of them, H hidden size,
V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tba.common.memory import loading
from tba.common.model_files import model_directory
from tba.common.trajectory import Trajectory

_BATCH_TOKENS = 8192  # padding included
_CHUNK = 256  # response positions whose logits exist at the same time


class ReferenceModel:
    """The model of a directory or hub id on one device. Raises ConfigError if it does not load, or MemoryShort."""

    def __init__(self, model: str, *, device: str, dtype: str) -> None:
        directory = model_directory(model)
        with loading(f"the reference model in {directory}", device):
            self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, use_safetensors=True)
            self._model.to(device).eval().requires_grad_(False)
        self._device = torch.device(device)
        self._vocabulary: int = self._model.get_input_embeddings().num_embeddings
        # As the trainer computes on such a device.
        self._autocast = self._device.type == "cuda" and dtype == "bfloat16"

    @torch.inference_mode()
    def logprobs(self, rows: Sequence[Trajectory]) -> list[float | None]:
        """One per row. None for a failed rollout, a token outside the vocabulary, or what is not finite."""
        found: list[float | None] = [None] * len(rows)
        usable = [n for n, row in enumerate(rows) if self._is_usable(row)]
        for part in _cut(usable, rows):
            for n, logprob in zip(part, self._batch([rows[n] for n in part]), strict=True):
                found[n] = logprob if math.isfinite(logprob) else None
        return found

    def _is_usable(self, row: Trajectory) -> bool:
        ids = (row.prompt_ids, row.response_ids)
        return all(len(part) and part.min() >= 0 and part.max() < self._vocabulary for part in ids)

    def _batch(self, rows: Sequence[Trajectory]) -> list[float]:
        width = max(map(_tokens, rows))
        tokens = np.zeros((len(rows), width), np.int64)  # padded on the right, where nothing sees it
        attention = np.zeros_like(tokens)
        for n, row in enumerate(rows):
            tokens[n, : _tokens(row)] = np.concatenate([row.prompt_ids, row.response_ids])
            attention[n, : _tokens(row)] = 1
        tokens_NT, attention_NT = (torch.from_numpy(array).to(self._device) for array in (tokens, attention))
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            hidden_NTH = self._model.base_model(
                input_ids=tokens_NT, attention_mask=attention_NT, use_cache=False
            ).last_hidden_state
            return [self._sum(row, hidden_NTH[n], tokens_NT[n]) for n, row in enumerate(rows)]

    def _sum(self, row: Trajectory, hidden_TH: Tensor, tokens_T: Tensor) -> float:
        """Response token r is predicted at the position before its own."""
        first, last = len(row.prompt_ids), _tokens(row)
        head = self._model.get_output_embeddings()
        logprobs = []
        hidden_RH, target_R = hidden_TH[first - 1 : last - 1], tokens_T[first:last]
        for hidden_cH, target_c in zip(torch.split(hidden_RH, _CHUNK), torch.split(target_R, _CHUNK), strict=True):
            logits_cV = head(hidden_cH).float()
            logprobs.append(logits_cV.gather(1, target_c[:, None])[:, 0] - logits_cV.logsumexp(dim=1))
        logprob_R = torch.cat(logprobs).double()
        if len(row.loss_mask):
            logprob_R = torch.where(torch.from_numpy(row.loss_mask != 0).to(self._device), logprob_R, 0.0)
        return float(logprob_R.sum())


def _tokens(row: Trajectory) -> int:
    return len(row.prompt_ids) + len(row.response_ids)


def _cut(usable: Sequence[int], rows: Sequence[Trajectory]) -> Iterator[list[int]]:
    """Places of rows, longest first, in batches of at most `_BATCH_TOKENS` with their padding."""
    part: list[int] = []
    for n in sorted(usable, key=lambda n: -_tokens(rows[n])):
        if part and (len(part) + 1) * _tokens(rows[part[0]]) > _BATCH_TOKENS:
            yield part
            part = []
        part.append(n)
    if part:
        yield part
