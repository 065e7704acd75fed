"""The configuration of a run: one TOML file for all roles, one frozen object per section.

    __init__   Config: the sections together, and what follows from them
    run        [run] [model] [eval] [launch]
    task       [task] [reward_model]
    buffer     [buffer]
    search     [search]
    train      [train] [objective] [lora] [reference] [metrics]
    checks     what the sections must agree on
    section    what all sections are made of

Relative paths are relative to the directory the command runs in. The docstring under a field is its documentation:
`docs/configuration.md` and the comments of `tba config show` are made from it. Where values come from, and which of
them wins, is in `tba.common.config_layers`.
"""

import math
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import model_validator

from tba.common.config.buffer import BufferSection
from tba.common.config.checks import check
from tba.common.config.run import EvalSection, LaunchSection, ModelSection, RunSection
from tba.common.config.search import Explored, SearchSection
from tba.common.config.section import Section
from tba.common.config.task import RewardModelSection, TaskSection
from tba.common.config.train import LoraSection, MetricsSection, ObjectiveSection, ReferenceSection, TrainSection

__all__ = [
    "BufferSection",
    "Config",
    "EvalSection",
    "Explored",
    "LaunchSection",
    "LoraSection",
    "MetricsSection",
    "ModelSection",
    "ObjectiveSection",
    "ReferenceSection",
    "RewardModelSection",
    "RunSection",
    "SearchSection",
    "Section",
    "TaskSection",
    "TrainSection",
]


class Config(Section):
    """The whole configuration."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    reward_model: RewardModelSection = RewardModelSection()
    buffer: BufferSection = BufferSection()
    search: SearchSection = SearchSection()
    train: TrainSection = TrainSection()
    objective: ObjectiveSection = ObjectiveSection()
    lora: LoraSection = LoraSection()
    reference: ReferenceSection = ReferenceSection()
    metrics: MetricsSection = MetricsSection()
    eval: EvalSection = EvalSection()
    launch: LaunchSection = LaunchSection()

    @property
    def database(self) -> Path:
        """The SQLite file of the buffer."""
        return self.buffer.database or self.run.dir / "buffer.sqlite"

    @property
    def snapshots(self) -> Path:
        """Directory of the published snapshots."""
        return self.run.dir / "snapshots"

    @property
    def checkpoints(self) -> Path:
        """Directory of the trainer's checkpoints."""
        return self.run.dir / "checkpoints"

    @property
    def spool(self) -> Path:
        """Directory of the searchers' spools."""
        return self.search.spool_dir or self.run.dir / "spool"

    @property
    def max_staleness(self) -> int | None:
        """The staleness limit in optimiser steps, None for unbounded."""
        return _bound(self.buffer.max_staleness)

    @property
    def recency_fraction_final(self) -> float | None:
        """m at the end of its schedule, None where it stays what it is."""
        final = self.buffer.recency_fraction_final
        return None if final == "same" else final

    @property
    def samples_per_insert(self) -> float | None:
        """How often a trajectory is trained on, on average; None for unbounded."""
        return _bound(self.buffer.samples_per_insert)

    @property
    def least_slack(self) -> int:
        """The smallest `samples_per_insert_slack`: one batch, and one lease, so that never both sides wait."""
        ratio = self.samples_per_insert or math.inf
        batch = self.train.prompts_per_step * self.train.samples_per_prompt
        return math.floor(batch / ratio) + 1 + self.search.samples_per_prompt

    @property
    def samples_per_insert_slack(self) -> int:
        """How many trajectories searchers may be ahead."""
        slack = self.buffer.samples_per_insert_slack
        return 2 * self.least_slack if slack == "auto" else slack

    @property
    def max_trajectories(self) -> int | None:
        """Most sampleable trajectories, None for unbounded."""
        return _bound(self.buffer.max_trajectories)

    @property
    def max_payload_bytes(self) -> int | None:
        """Most sampleable bytes, None for unbounded."""
        return _bound(self.buffer.max_payload_bytes)

    @property
    def canary_tolerance(self) -> float:
        """The tolerance of the canary, by the type of the weights unless it is set."""
        return self.search.canary_tolerance or (1e-3 if self.model.dtype == "float32" else 0.5)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check(self)
        return self


_Number = TypeVar("_Number", int, float)


def _bound(value: _Number | Literal["unbounded"]) -> _Number | None:
    return None if value == "unbounded" else value
