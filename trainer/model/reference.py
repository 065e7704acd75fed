"""The reference policy: the initial model, a teacher, or one that is updated from the policy at intervals.

    frozen   initial, or a teacher ────────────────────────────
    reset    initial ── every ──► the policy ── every ──► the policy
    ema      initial ── every ──► decay x itself + (1 - decay) x the policy ── every ──► ...

Invariant: the reference of a step, and its name, depend on the step alone. Log-probabilities are stored under the
name, so each is computed once per trajectory and reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.common.config import ReferenceSection
from tba.common.wire.fields import INITIAL_REFERENCE
from tba.trainer.batch.batch import Row
from tba.trainer.model.adapters import without_adapters
from tba.trainer.model.scorer import Scorer, Scores, weights_of


@dataclass(frozen=True, eq=False, slots=True)
class Reference:
    """Scores with the reference policy, and updates it.

    `scorer` has the initial model: the reference's own copy, or for a frozen reference the policy itself, whose
    adapters are then disabled. `lineage` is a hash of the settings that determine the weights of an updated reference:
    a run that resumes with other settings has other references. `initial` is the name of the reference of step 0.
    """

    scorer: Scorer
    config: ReferenceSection
    lineage: str
    initial: str = INITIAL_REFERENCE

    @property
    def description(self) -> str:
        """What determines the weights of each version. A checkpoint can be restored only under the same description."""
        every, decay = f" every {self.config.every} steps", f" with decay {self.config.decay:g}"
        frozen = "frozen" if self.initial == INITIAL_REFERENCE else f"frozen {self.initial}"
        return {"frozen": frozen, "reset": f"reset{every}", "ema": f"ema{every}{decay}"}[self.config.kind]

    def name_at(self, step: int) -> str:
        """Return the name of the reference with which a step is trained."""
        version = 0 if self.config.kind == "frozen" else step // self.config.every
        return f"{self.config.kind}-{version:04d}-{self.lineage}" if version else self.initial

    def score(self, rows: Sequence[Row], passes: Sequence[Sequence[int]] | None = None) -> Scores:
        """Score rows under the current version; `passes` as in `Scorer.score`."""
        with without_adapters(self.scorer.model):
            return self.scorer.score(rows, passes)

    @torch.no_grad()
    def update(self, policy: PreTrainedModel, steps_done: int) -> None:
        """Become the reference of the next step. `steps_done` includes the update just made."""
        if self.name_at(steps_done) == self.name_at(steps_done - 1):
            return
        kept = self.config.decay if self.config.kind == "ema" else 0.0
        weights = weights_of(policy)
        for name, own in weights_of(self.scorer.model).items():
            if kept and own.is_floating_point():
                own.lerp_(weights[name].to(own.dtype), 1 - kept)
            else:
                own.copy_(weights[name])

    def moved_weights(self, steps_done: int) -> dict[str, Tensor]:
        """Return the weights if they differ from the initial ones, else {}."""
        return {} if self.name_at(steps_done) == self.initial else weights_of(self.scorer.model)

    @torch.no_grad()
    def restore(self, read_tensor: Callable[[str, Tensor], Tensor]) -> None:
        """Load the weights of a checkpoint: `read_tensor` returns one by its name, sharded as the other tensor is."""
        for name, own in weights_of(self.scorer.model).items():
            own.copy_(read_tensor(name, own))
