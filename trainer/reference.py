"""The reference policy: the model that training starts from, or one that follows the policy at intervals.

    frozen   initial ──────────────────────────────────────────
    reset    initial ── every ──► the policy ── every ──► the policy
    ema      initial ── every ──► decay x itself + (1 - decay) x the policy ── every ──► ...

Invariant: which reference a step trains with, and its name, follow from the step alone. Log-probabilities are stored
under the name, so they are computed once for each trajectory and reference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.common.config import ReferenceSection
from tba.common.wire import INITIAL_REFERENCE
from tba.trainer.adapters import without_adapters
from tba.trainer.batch import Row
from tba.trainer.model import Scorer, Scores, weights_of
from tba.trainer.sharding import like


class Reference:
    """`scorer` has the model that training starts from: a copy that belongs to the reference, or for a frozen one the
    policy itself, whose adapters are then left out. `lineage` stands for the settings that a moved reference's weights
    come from: a run that resumes with others has other references."""

    def __init__(self, scorer: Scorer, config: ReferenceSection, lineage: str = "") -> None:
        self.scorer = scorer
        self._lineage = f"-{lineage}" if lineage else ""
        self._config = config

    @property
    def description(self) -> str:
        """What decides the weights of each version; a checkpoint is of one description."""
        config = self._config
        every, decay = f" every {config.every} steps", f" with decay {config.decay:g}"
        return {"frozen": "frozen", "reset": f"reset{every}", "ema": f"ema{every}{decay}"}[config.kind]

    def name_at(self, step: int) -> str:
        """The name of the reference that the batch of a step is trained with."""
        version = 0 if self._config.kind == "frozen" else step // self._config.every
        return f"{self._config.kind}-{version:04d}{self._lineage}" if version else INITIAL_REFERENCE

    def score(self, rows: Sequence[Row], *, passes: int = 0) -> Scores:
        """Log-probabilities under the present version; `passes` as in `Scorer.score`."""
        with without_adapters(self.scorer.model):
            return self.scorer.score(rows, passes=passes)

    @torch.no_grad()
    def follow(self, policy: PreTrainedModel, steps_done: int) -> None:
        """Become the reference of the next step, after the update that made `steps_done`."""
        if self.name_at(steps_done) == self.name_at(steps_done - 1):
            return
        kept = self._config.decay if self._config.kind == "ema" else 0.0
        weights = weights_of(policy)
        for name, own in weights_of(self.scorer.model).items():
            if kept and own.is_floating_point():
                own.lerp_(weights[name], 1 - kept)
            else:
                own.copy_(weights[name])

    def moved_weights(self, steps_done: int) -> dict[str, Tensor]:
        """The weights, where they are no longer those that training started from; else nothing."""
        return {} if self.name_at(steps_done) == INITIAL_REFERENCE else weights_of(self.scorer.model)

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of a checkpoint."""
        for name, own in weights_of(self.scorer.model).items():
            own.copy_(like(own, weights[name]))
