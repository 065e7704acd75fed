"""The settings of sampling: the fields of `[buffer]` under the names they have there."""

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from tba.common.config.buffer import BufferSection

Priority = Literal["uniform", "recency", "softmax", "rank"]
Replacement = Literal["if_needed", "never", "always"]
PromptKeep = Literal["newest", "best", "reservoir"]
Keep = Literal["newest", "reservoir", "both"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What stays in the sampling index; `BufferSection` documents each field. None is no limit.

    `seed` is the run's: it decides which trajectories a reservoir keeps.
    """

    prompt_cap: int
    dedup: bool
    prompt_keep: PromptKeep = "newest"
    max_trajectories: int | None = None
    keep: Keep = "newest"
    max_payload_bytes: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """How batches are drawn, as `BufferSection` documents; `publish_every` is the trainer's. None is "auto"."""

    recency_fraction: float
    recency_window: int | None
    inverse_temperature: float
    max_staleness: int | None
    min_fill: int
    prompt_priority: Priority = "uniform"
    trajectory_priority: Priority = "softmax"
    flat_group_weight: float = 1.0
    replacement: Replacement = "if_needed"
    publish_every: int = 1

    def need(self, samples: int) -> int:
        """Return how many entries make a prompt eligible for a group of `samples`."""
        return samples if self.replacement == "never" else 1


@dataclass(frozen=True, slots=True)
class Shortage:
    """The reason why no batch can be sampled yet, and how much of what it needs is there."""

    reason: str
    have: int


_Settings = TypeVar("_Settings", Limits, SamplingRules)


def from_section(kind: type[_Settings], section: BufferSection, **others: int) -> _Settings:
    """Fill a settings class from the fields of `[buffer]`; "unbounded" and "auto" become None."""
    values: dict[str, Any] = {**others}
    for field in fields(kind):
        if field.name not in others:
            value = getattr(section, field.name)
            values[field.name] = None if value in ("unbounded", "auto") else value
    return kind(**values)
