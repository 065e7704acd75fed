"""The models of an evaluation besides the policy: a frozen reference, and a sentence encoder.

The reference has float32 weights, with matrices in bfloat16 where autocast would round them before each product; it is
teacher forced, at temperature 1, and summed in float64 over the tokens that count. Duplicated on purpose: searcher and
trainer share no code that needs torch. `tests/unit/searcher/test_references.py` keeps this, the trainer's
`model/scorer.py` and `publishing/canary.py`, and the engine's `score` equal.

Shape suffixes: N sequences or texts, T tokens of the longest, R response tokens of one row, c a chunk of them, H hidden
size, V vocabulary.
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from tba.common.rotation import Rotation
from tba.common.system.load_errors import loading
from tba.common.token_batches import cut_by_tokens
from tba.common.weights.model_files import model_directory
from tba.common.weights.pretrained import causal_model, from_directory
from tba.common.wire.trajectory import Int32, TokenSequence, Trajectory, sequences
from tba.searcher.evaluation.measure import Floats

# Most tokens of a batch, padding included.
_BATCH_TOKENS = 8192
# Response positions whose logits exist at the same time.
_CHUNK = 256
# Texts that are embedded at a time, and the longest input of an encoder that names no limit of its own.
_TEXTS, _MAX_TOKENS = 64, 512


class ReferenceModel:
    """The model of a directory or hub id on one device. Raises ConfigError if it does not load, or OutOfMemory."""

    def __init__(self, model: str, *, device: str, dtype: str) -> None:
        directory = model_directory(model)
        with loading(f"the reference model in {directory}", device):
            self._model = causal_model(directory, torch.float32)
            self._device = torch.device(device)
            # As the trainer computes on such a device.
            self._autocast = self._device.type == "cuda" and dtype == "bfloat16"
            if self._autocast:
                to_bfloat16(self._model)
            self._model.to(device).requires_grad_(False)
        self._rotation = Rotation.of(self._model.config)
        self._vocabulary: int = self._model.get_input_embeddings().num_embeddings

    @torch.inference_mode()
    def logprobs(self, rows: Sequence[Trajectory]) -> list[float | None]:
        """The log-probability of each response given its prompt, a natural logarithm: the sum over its sequences.

        None for a failed rollout, for a row with a token outside the vocabulary, and where the result is not finite.
        """
        usable = [n for n, row in enumerate(rows) if all(map(self._are_known, (row.prompt_ids, row.response_ids)))]
        each = [(n, sequence) for n in usable for sequence in sequences(rows[n])]
        sums = dict.fromkeys(usable, 0.0)
        cut = partial(cut_by_tokens, limit=_BATCH_TOKENS, padded=True)
        for batch in self._rotation.split([_tokens(sequence) for _, sequence in each], cut):
            for index, logprob in zip(batch, self._batch([each[index][1] for index in batch]), strict=True):
                sums[each[index][0]] += logprob
        return [sums[n] if math.isfinite(sums.get(n, math.nan)) else None for n in range(len(rows))]

    def _are_known(self, ids: Int32) -> bool:
        return len(ids) > 0 and bool(0 <= ids.min() <= ids.max() < self._vocabulary)

    def _batch(self, rows: Sequence[TokenSequence]) -> list[float]:
        ids = [np.concatenate([row.context_ids, row.response_ids]).astype(np.int64) for row in rows]
        # Padded on the right, where attention is causal and does not reach it.
        tokens_NT = pad_sequence([*map(torch.from_numpy, ids)], batch_first=True).to(self._device)
        lengths_N1 = torch.tensor([*map(_tokens, rows)], device=self._device)[:, None]
        attention_NT = (torch.arange(tokens_NT.shape[1], device=self._device) < lengths_N1).long()
        self._rotation.forget(self._model)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            output = self._model.base_model(input_ids=tokens_NT, attention_mask=attention_NT, use_cache=False)
            hidden_NTH = output.last_hidden_state
            return [self._sum(row, hidden_NTH[n], tokens_NT[n]) for n, row in enumerate(rows)]

    def _sum(self, row: TokenSequence, hidden_TH: Tensor, tokens_T: Tensor) -> float:
        """The log-probability of one sequence. Token r is predicted at the position before its own."""
        first, last = len(row.context_ids), _tokens(row)
        head = self._model.get_output_embeddings()
        logprobs = []
        hidden_RH, target_R = hidden_TH[first - 1 : last - 1], tokens_T[first:last]
        for hidden_cH, target_c in zip(torch.split(hidden_RH, _CHUNK), torch.split(target_R, _CHUNK), strict=True):
            logits_cV = head(hidden_cH).float()
            logprobs.append(logits_cV.gather(1, target_c[:, None])[:, 0] - logits_cV.logsumexp(dim=1))
        logprob_R = torch.cat(logprobs).double()
        return float(torch.where(torch.from_numpy(row.mask != 0).to(self._device), logprob_R, 0.0).sum())


def to_bfloat16(model: PreTrainedModel) -> None:
    """Round the weights of linear layers, embeddings and experts to bfloat16; embeddings still give float32."""
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for parameter in model.parameters():
        if id(parameter) in matrices or parameter.dim() == 3:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.float())


def _tokens(row: TokenSequence) -> int:
    return len(row.context_ids) + len(row.response_ids)


class SentenceEncoder:
    """A sentence encoder: the mean of a transformer's last hidden states over the tokens of a text.

    This is how the sentence-transformers models pool, such as all-MiniLM-L6-v2; their final normalisation does not
    change a cosine. `model` is a directory or hub id. Raises ConfigError if it does not load, or OutOfMemory.
    """

    def __init__(self, model: str, *, device: str) -> None:
        directory = model_directory(model, setting="eval.embedder")
        with loading(f"the sentence encoder in {directory}", device):
            self._tokenizer = from_directory(AutoTokenizer, directory)
            self._model = from_directory(AutoModel, directory, use_safetensors=True)
            self._model.to(device).eval().requires_grad_(False)
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._device = torch.device(device)
        positions = getattr(self._model.config, "max_position_embeddings", None) or _MAX_TOKENS
        self._longest = min(self._tokenizer.model_max_length, positions)

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> Floats:
        """Return the embeddings [N, H] of texts, each cut to the longest input of the model."""
        parts, options = [], {"padding": True, "truncation": True, "max_length": self._longest, "return_tensors": "pt"}
        for start in range(0, len(texts), _TEXTS):
            batch = self._tokenizer(list(texts[start : start + _TEXTS]), **options).to(self._device)
            inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
            hidden_NTH = self._model(**inputs).last_hidden_state.float()
            mask_NT1 = batch["attention_mask"][..., None]
            mean_NH = (hidden_NTH * mask_NT1).sum(1) / mask_NT1.sum(1).clamp(min=1)
            parts.append(mean_NH.cpu().numpy().astype(np.float64))
        return np.concatenate(parts)
