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

from tba.common.config.buffer import CurriculumSection
from tba.common.config.root import Config
from tba.common.config.run import LaunchSection
from tba.common.config.search import Explored, SearchSection
from tba.common.config.task import RewardModelSection, TaskSection, Truncated
from tba.common.config.train import LoraSection, MetricsSection, ObjectiveSection, ReferenceSection, TrainSection

__all__ = [
    "Config",
    "CurriculumSection",
    "Explored",
    "LaunchSection",
    "LoraSection",
    "MetricsSection",
    "ObjectiveSection",
    "ReferenceSection",
    "RewardModelSection",
    "SearchSection",
    "TaskSection",
    "TrainSection",
    "Truncated",
]
