"""Tasks: prompts with stable keys, and a scorer for their responses."""

import importlib
from collections.abc import Callable

from tba.common.config import TaskSection
from tba.common.errors import TaskError
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.gsm8k import Gsm8kTask
from tba.searcher.tasks.task import LimitedTask, Task

# The names are those of `tba.common.config.task.TASKS`.
_SHIPPED: dict[str, Callable[[TaskSection], Task]] = {
    "arithmetic": lambda _: ArithmeticTask(),
    "gsm8k": lambda config: Gsm8kTask(config.train, config.test),
}


def load_task(config: TaskSection) -> Task:
    """Load the task that the configuration names. Raises TaskError if it cannot be loaded or its data is malformed."""
    task = _task(config)
    if config.limit or config.held_out_limit:
        return LimitedTask(task, config.limit, config.held_out_limit)
    return task


def _task(config: TaskSection) -> Task:
    if (shipped := _SHIPPED.get(config.name)) is not None:
        return shipped(config)
    module, _, factory = config.name.partition(":")
    try:
        task: Task = getattr(importlib.import_module(module), factory)()
    # A shortage of memory may be transient, so it must not count as a mistake of the configuration.
    except MemoryError:
        raise
    # User code may raise anything.
    except Exception as error:
        raise TaskError(
            f"task.name {config.name} cannot be loaded: {type(error).__name__}: {error}; the module must be on "
            "PYTHONPATH and the factory take no arguments"
        ) from error
    if missing := [name for name in ("name", "prompts", "held_out", "score") if not hasattr(task, name)]:
        raise TaskError(f"task.name {config.name}: the object that the factory returned has no {', '.join(missing)}")
    return task
