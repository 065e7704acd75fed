"""The configuration of a run: one TOML file for all roles, one frozen object per section.

    root        Config: all sections, derived values, and the checks across sections
    run         [run] [model] [eval] [launch] [security]
    task        [task] [reward_model]
    buffer      [buffer] [curriculum]
    search      [search]
    train       [train] [sft] [objective] [lora] [reference] [metrics]
    section     the base class of all sections
    layers      where values come from: flag over environment over file over default
    paths       checks that the files and directories of a configuration exist

Relative paths are relative to the working directory of the command. The docstring under a field is its documentation:
`docs/configuration.md` is generated from it.
"""

from tba.common.config.buffer import BufferSection, CurriculumSection
from tba.common.config.root import Config
from tba.common.config.run import EvalSection, LaunchSection, ModelSection, RunSection, SecuritySection
from tba.common.config.search import Explored, SearchSection
from tba.common.config.section import Section
from tba.common.config.task import RewardModelSection, TaskSection, Truncated
from tba.common.config.train import (
    LoraSection,
    MetricsSection,
    ObjectiveSection,
    ReferenceSection,
    SftSection,
    TrainSection,
)

__all__ = [
    "BufferSection",
    "Config",
    "CurriculumSection",
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
    "SecuritySection",
    "SftSection",
    "TaskSection",
    "TrainSection",
    "Truncated",
]
