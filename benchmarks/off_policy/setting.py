"""The setting of one run: everything that its result depends on, apart from the code."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from tba.common.config import ObjectiveSection, TrainSection

# Seeds that chose rates or objectives are never reported. The others had no part in any choice.
CHOOSING_SEEDS = range(2000, 2010)
SWEEP_SEEDS = CHOOSING_SEEDS[:3]
REPORT_SEEDS = range(20, 40)
WARMUP_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One training.

    `objective` is a name, or a name with keys of `[objective]`: "tba_prime:mean_kl=policy". With `sync_every` 0 the
    batch of step s is sampled by the weights of step max(0, s - staleness). Otherwise the data comes from the paper's
    buffer: `sync_every` is k, `recency` m, `generated` the S responses of which `samples` (K) are drawn, `fill` the
    batches of the initial fill, and `priority` the inverse temperature of the softmax over rewards (0: uniform).
    `beta_first` is annealed linearly to `beta` over `anneal_steps`. `reset_every` copies the policy to the reference.
    `rate_by_ess` is `train.learning_rate_by_ess`. A random number of up to `penalty` is subtracted from each reward
    that is trained on.
    With an `explorer`, a model of `tasks.explorer_model` that never changes samples half of the groups of a batch.
    `teacher` is the directory of a model that is the reference; by default the start is. `top_p` is that of sampling.
    `part` is the part of the held-out problems that is measured: "choosing" or "reporting".
    """

    task: str = "arithmetic"
    objective: str
    staleness: int = 0
    rate: float
    seed: int
    steps: int = 128
    prompts: int = 8
    samples: int = 8
    beta: float
    beta_first: float = 0.0
    anneal_steps: int = 0
    reset_every: int = 0
    sync_every: int = 0
    recency: float = 1.0
    generated: int = 0
    fill: int = 0
    priority: float = 0.0
    rate_by_ess: bool = False
    penalty: float = 0.0
    explorer: str = ""
    teacher: str = ""
    top_p: float = 1.0

    @property
    def part(self) -> str:
        """The part of the held-out problems that this run is measured on."""
        return "choosing" if self.seed in CHOOSING_SEEDS else "reporting"

    @property
    def responses(self) -> int:
        """The number of responses that this run trains on."""
        return self.steps * self.prompts * self.samples

    def train_section(self) -> TrainSection:
        """Return the configuration of the trainer: a constant rate after a short warm-up."""
        return TrainSection(
            steps=self.steps,
            prompts_per_step=self.prompts,
            samples_per_prompt=self.samples,
            learning_rate=self.rate,
            learning_rate_by_ess=self.rate_by_ess,
            schedule="constant",
            warmup_steps=WARMUP_STEPS,
            beta=self.beta_first or self.beta,
            beta_final=self.beta,
            beta_anneal_steps=self.anneal_steps,
        )

    def replace(self, **changes: Any) -> "Setting":
        return dataclasses.replace(self, **changes)


def objective_section(text: str) -> ObjectiveSection:
    """Return the configuration of "NAME" or "NAME:KEY=VALUE,...".

    Raises pydantic's ValidationError for an unknown name or key.
    """
    name, _, keys = text.partition(":")
    pairs = (pair.split("=") for pair in keys.split(",") if pair)
    return ObjectiveSection.model_validate({"name": name} | {key: _value(value) for key, value in pairs})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
