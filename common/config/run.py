"""[run], [model], [eval] and [launch]: what a run is called, what it starts from, and how its processes are watched."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tba.common.config.section import NonNegative, NonNegativeFloat, PositiveFloat, Section


class RunSection(Section):
    """What the run is called and where it writes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")] = "run"
    """Name of the run: letters, digits, dot, dash and underscore."""
    dir: Path = Path("runs/run")
    """Directory for the database, snapshots, checkpoints and metrics."""
    seed: NonNegative = 0
    """Seed of everything random: prompt order, sampling from the buffer, generation, initialisation."""


class ModelSection(Section):
    """The model to start from."""

    path: str = ""
    """A Hugging Face model directory, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the published weights and of the engines. The trainer's masters are float32."""


class EvalSection(Section):
    """Held-out evaluation, greedy."""

    at_end: bool = False
    """`tba run` evaluates the kept snapshots when training is done, and draws the picture. With
    `train.keep_snapshot_every` some of the way are kept too, besides the newest."""


class LaunchSection(Section):
    """`tba run`, and `tba search` with several searchers: how children are watched."""

    max_restarts: NonNegative = 5
    """Failures in a row after which a child counts as broken. It is still restarted while another child does its work:
    the launcher gives up when the buffer, the trainer, or all searchers are broken."""
    restart_delay_seconds: NonNegativeFloat = 1.0
    """Pause before a restart, in seconds; doubles with each failure in a row."""
    restart_delay_max_seconds: NonNegativeFloat = 60.0
    """Longest pause before a restart, in seconds."""
    stable_seconds: PositiveFloat = 600.0
    """A child that ran for so long, in seconds, has its failures forgotten."""
    summary_seconds: PositiveFloat = 10.0
    """`tba search` with several searchers: seconds between two summary lines."""
    drain_seconds: PositiveFloat = 20.0
    """Time for a child to end after SIGTERM, before it is killed."""
