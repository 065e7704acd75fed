"""Checks of `tba doctor` and `tba config check` on what a searcher loads."""

from tba.common.config import Config, RewardModelSection, TaskSection
from tba.common.errors import TaskError
from tba.common.terminal import need
from tba.searcher.tasks import declared_floor, load_task
from tba.searcher.tasks.task import check_prompts


def check_task(section: TaskSection) -> None:
    """Raise TbaError for a task that does not load, or whose prompts cannot be used."""
    check_prompts(load_task(section))


def with_reward_floor(config: Config) -> Config:
    """Return the configuration with the least reward that the task declares as `objective.reward_floor`.

    A task is only asked if the objective depends on it. Raises TaskError if it cannot be loaded here.
    """
    objective = config.objective
    if objective.reward_floor != "task" or not objective.imitation_weight:
        return config
    try:
        floor = declared_floor(config.task)
    except TaskError as error:
        raise TaskError(
            f'objective.reward_floor = "task" needs the task of the searchers here: {error}; or set it to the least '
            "reward of the task"
        ) from error
    return config.model_copy(update={"objective": objective.model_copy(update={"reward_floor": floor})})


def check_reward_model(section: RewardModelSection) -> str:
    """Return a description of the reward model. Imports torch, which only a reward model needs on this machine."""
    need("torch", "train")
    need("transformers", "train")
    from tba.searcher.scoring.classifier import check_files

    return check_files(section)
