"""The tasks, by name."""

from tba.common.config import TaskSection
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.gsm8k import Gsm8kTask
from tba.searcher.tasks.limited import LimitedTask
from tba.searcher.tasks.task import Task


def load_task(config: TaskSection) -> Task:
    """The task of a configuration. Raises TaskError if its data is missing or malformed."""
    task: Task = ArithmeticTask() if config.name == "arithmetic" else Gsm8kTask(config.train, config.test)
    if config.limit or config.held_out_limit:
        return LimitedTask(task, config.limit, config.held_out_limit)
    return task
