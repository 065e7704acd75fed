"""A sentence encoder: the mean of a transformer's last hidden states over the tokens of a text.

This is how the sentence-transformers models pool, such as all-MiniLM-L6-v2; their final normalisation does not change a
cosine. Shape suffixes: N texts, T tokens of the longest, H hidden size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from tba.common.system.load_errors import loading
from tba.common.weights.model_files import model_directory
from tba.common.weights.pretrained import from_directory
from tba.searcher.evaluation.measure import Floats

_BATCH = 64
# The longest input of a model that names no limit of its own.
_MAX_TOKENS = 512


class SentenceEncoder:
    """The encoder of a directory or hub id on one device. Raises ConfigError if it does not load, or OutOfMemory."""

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
        parts = []
        for start in range(0, len(texts), _BATCH):
            batch = self._tokenizer(
                list(texts[start : start + _BATCH]),
                padding=True,
                truncation=True,
                max_length=self._longest,
                return_tensors="pt",
            ).to(self._device)
            inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
            hidden_NTH = self._model(**inputs).last_hidden_state.float()
            mask_NT1 = batch["attention_mask"][..., None]
            mean_NH = (hidden_NTH * mask_NT1).sum(1) / mask_NT1.sum(1).clamp(min=1)
            parts.append(mean_NH.cpu().numpy().astype(np.float64))
        return np.concatenate(parts)
