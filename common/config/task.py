"""[task] and [reward_model]: what is asked, and how answers are scored."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from tba.common.config.section import NonNegative, Positive, PositiveFloat, Section

TASKS = ("arithmetic", "gsm8k")
_OWN_TASK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class TaskSection(Section):
    """What is asked, and how answers are scored."""

    name: str = "arithmetic"
    """The task: arithmetic, gsm8k, or your own as `package.module:factory` on PYTHONPATH, see docs/rewards.md."""
    train: str = ""
    """gsm8k: a local jsonl file with `question` and `answer`, or a hub id such as openai/gsm8k."""
    test: str = ""
    """gsm8k: the held-out jsonl file; empty takes the hub id's test split."""
    limit: NonNegative = 0
    """Use only the first so many training prompts; 0 is all."""
    held_out_limit: NonNegative = 0
    """Use only the first so many held-out prompts; 0 is all."""
    reward_workers: NonNegative = 2
    """Processes per searcher that score responses; 0 scores in the searcher, where no limit holds."""
    reward_seconds: PositiveFloat = 10.0
    """A response that is not scored in so many seconds becomes a row with an error, and its worker is replaced."""
    reward_memory_mib: Annotated[int, Field(ge=128)] = 1024
    """Memory of one reward worker, in MiB."""
    load_seconds: PositiveFloat = 600.0
    """A reward worker that has not loaded the task in so many seconds is started again."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name not in TASKS and not _OWN_TASK.fullmatch(name):
            raise ValueError(
                f"no task has this name; they are {', '.join(TASKS)}, and your own as `package.module:factory`"
            )
        return name

    @property
    def reads_files(self) -> bool:
        """It takes its prompts from `train` and `test`; the others have their own."""
        return self.name == "gsm8k"

    @property
    def is_own(self) -> bool:
        """It comes from a module of the user."""
        return self.name not in TASKS


class RewardModelSection(Section):
    """A sequence classifier whose logit is a part of the reward, beside the task's own: docs/rewards.md."""

    path: str = ""
    """A Hugging Face model directory, or a hub id, of a classifier with one label; empty uses none."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda:\d+)$")] = "auto"
    """Where it computes, in a process of its own for each searcher: auto is the searcher's device, whose
    search.gpu_memory_utilization must leave room for it; `cuda:1` is the GPU that nvidia-smi calls 1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of its weights; auto is that of the checkpoint."""
    weight: float = 1.0
    """The reward is the task's own plus this times the logit."""
    template: Literal["concatenation", "chat"] = "concatenation"
    """What it reads. concatenation: prompt and response as one text; chat: a turn of the user and one of the assistant,
    by the chat template of its tokenizer."""
    batch_tokens: Positive = 16384
    """Tokens of one forward pass, padding included; a single pair may have more."""
    max_length: NonNegative = 0
    """Longest pair of prompt and response in its tokens; a longer one becomes a row with an error. 0 is the model's own
    limit."""
    time_limit_seconds: PositiveFloat = 60.0
    """Pairs of a forward pass that takes longer, in seconds, become rows with an error, and the process is replaced; so
    do pairs that wait longer for one that does not start."""
    load_seconds: PositiveFloat = 600.0
    """Time to load the model, in seconds, before the process is replaced."""
