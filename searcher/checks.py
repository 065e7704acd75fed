"""Checks of `tba doctor` and `tba config check` on what a searcher loads."""

from tba.common.config import RewardModelSection, TaskSection
from tba.common.terminal import need
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import check_prompts


def check_task(section: TaskSection) -> None:
    """Raise TbaError for a task that does not load, or whose prompts cannot be used."""
    check_prompts(load_task(section))


def check_reward_model(section: RewardModelSection) -> str:
    """Return a description of the reward model. Imports torch, which only a reward model needs on this machine."""
    need("torch", "train")
    need("transformers", "train")
    from tba.searcher.scoring.classifier import check_files

    return check_files(section)
