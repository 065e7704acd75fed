"""The trainer's peer in torch and transformers alone: padded rows, log-probabilities, RLOO and AdamW."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from tba.trainer.batch.batch import Row, TrainBatch


def logprobs(model: Any, rows: Sequence[Row]) -> Tensor:
    """Return the log-probability [R] of each response token, from one pass over padded rows.

    They are float64 for a model in float64, and float32 otherwise.
    """
    texts = [torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)) for row in rows]
    ids = pad_sequence(texts, batch_first=True).to(model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    at = [(n, len(row.prompt_ids) - 1, row.tokens - 1) for n, row in enumerate(rows)]
    chosen = torch.cat([hidden[n, first:last] for n, first, last in at])
    target = torch.cat([ids[n, first + 1 : last + 1] for n, first, last in at])
    logits = model.get_output_embeddings()(chosen)
    return -cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target, reduction="none")


class BareTrainer:
    """RLOO on micro-batches of rows of similar lengths, of at most `tokens` tokens each, padding included.

    `rate` is the learning rate of AdamW. The gradient is clipped to 1. With `half` it computes in bfloat16.
    """

    def __init__(self, model: Any, *, rate: float, tokens: int, half: bool = False) -> None:
        self.model, self._tokens, self._half = model, tokens, half
        parts = [[one for one in model.parameters() if (one.ndim > 1) == matrix] for matrix in (True, False)]
        groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.01, 0.0), strict=True)]
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99))

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Make one update. Returns the loss, and the norm of the gradient before it is clipped."""
        loss = self.loss(batch, backward=True)
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm}

    def loss(self, batch: TrainBatch, *, backward: bool = False) -> float:
        """Return minus the mean over rows of the log-probability of the response times its advantage.

        The advantage is the reward minus the mean reward of the other responses of the group.
        """
        reward_BK = batch.reward_BK
        others_BK = (reward_BK.sum(1, keepdim=True) - reward_BK) / (batch.samples - 1)
        advantage, total = (reward_BK - others_BK).flatten().tolist(), 0.0
        for part in self._parts(batch.rows):
            weight_R = torch.tensor([advantage[n] for n in part for _ in batch.rows[n].response_ids])
            kind = self.model.device.type
            with torch.set_grad_enabled(backward), torch.autocast(kind, torch.bfloat16, enabled=self._half):
                found_R = logprobs(self.model, [batch.rows[n] for n in part])
            loss = -(found_R * weight_R.to(found_R)).sum() / len(batch.rows)
            if backward:
                loss.backward()
            total += float(loss.detach())
        return total

    def _parts(self, rows: Sequence[Row]) -> list[list[int]]:
        parts: list[list[int]] = [[]]
        for n in sorted(range(len(rows)), key=lambda n: rows[n].tokens):
            if parts[-1] and (len(parts[-1]) + 1) * rows[n].tokens > self._tokens:
                parts.append([])
            parts[-1].append(n)
        return parts
