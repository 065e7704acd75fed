"""The tasks, by name."""

import importlib

from tba.common.config import TaskSection
from tba.common.errors import TaskError
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.gsm8k import Gsm8kTask
from tba.searcher.tasks.limited import LimitedTask
from tba.searcher.tasks.task import Task


def load_task(config: TaskSection) -> Task:
    """The task of a configuration. Raises TaskError if its data is missing or malformed."""
    task = _task(config)
    if config.limit or config.held_out_limit:
        return LimitedTask(task, config.limit, config.held_out_limit)
    return task


def _task(config: TaskSection) -> Task:
    if config.name == "arithmetic":
        return ArithmeticTask()
    if config.name == "gsm8k":
        return Gsm8kTask(config.train, config.test)
    module, _, factory = config.name.partition(":")
    try:
        task: Task = getattr(importlib.import_module(module), factory)()
    except MemoryError:  # which may pass
        raise
    except Exception as error:  # user code: whatever else it raises, the task cannot be loaded
        raise TaskError(
            f"task.name {config.name} cannot be loaded: {type(error).__name__}: {error}; the module must be on "
            "PYTHONPATH and the factory take no arguments"
        ) from error
    if missing := [name for name in ("name", "prompts", "held_out", "score") if not hasattr(task, name)]:
        raise TaskError(f"task.name {config.name}: what the factory returned has no {', '.join(missing)}")
    return task
