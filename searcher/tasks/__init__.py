"""Tasks: prompts with stable keys, and a scorer for their responses."""

import inspect
from collections.abc import Callable
from typing import Any

from tba.common.config import TaskSection
from tba.common.config.task import MIXTURE, TaskSource
from tba.common.errors import MissingExtra, TaskError, TbaError
from tba.searcher.tasks.answers_task import AnswersTask
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.gsm8k import Gsm8kTask
from tba.searcher.tasks.mathematics import MathTask
from tba.searcher.tasks.mixture import make_mixture
from tba.searcher.tasks.own import ATTRIBUTES, find_own
from tba.searcher.tasks.reasoning import ReasoningGymTask
from tba.searcher.tasks.task import LimitedTask, Task, least_reward


def _make_red_team(**options: Any) -> Task:
    # Its HTTP client is needed for no other task.
    try:
        from tba.searcher.tasks.redteam import RedTeamTask
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "httpx2", "train") from error
    return RedTeamTask(**options)


# The names are those of `tba.common.config.task.TASKS`, without the mixture.
_SHIPPED: dict[str, Callable[..., Task]] = {
    "answers": AnswersTask,
    "arithmetic": ArithmeticTask,
    "gsm8k": Gsm8kTask,
    "math": MathTask,
    "reasoning_gym": ReasoningGymTask,
    "redteam": _make_red_team,
}


def load_task(config: TaskSection) -> Task:
    """Load the task that the configuration names. Raises TaskError if it cannot be loaded or its data is malformed."""
    if config.name != MIXTURE:
        return _load(config)
    parts = [(part.label or None, _load(part), part.weight) for part in config.mixture]
    return LimitedTask(make_mixture(parts), config.limit, config.held_out_limit)


def declared_floor(config: TaskSection) -> float:
    """Return the least reward of the configured task, without loading the data of a built-in one."""
    return min(_declared(source) for source in config.sources)


def _declared(source: TaskSource) -> float:
    shipped = _SHIPPED.get(source.name)
    # A class states it as an attribute. A function has to be called.
    return least_reward(shipped if inspect.isclass(shipped) else _load(source))  # type: ignore[arg-type]


def _load(source: TaskSource) -> Task:
    return LimitedTask(_task(source), source.limit, source.held_out_limit)


def _task(source: TaskSource) -> Task:
    shipped = _SHIPPED.get(source.name)
    arguments = dict(source.options)
    if source.reads_files:
        arguments |= {"train": source.train, "test": source.test}
    try:
        make = shipped or find_own(source.name)
        _check_options(source, make)
        task = make(**arguments)
    # A shortage of memory may be transient, so it must not count as a mistake of the configuration.
    except (MemoryError, TbaError):
        raise
    # User code may raise anything.
    except Exception as error:
        raise TaskError(f"task.name {source.name} cannot be loaded: {type(error).__name__}: {error}") from error
    if missing := [attribute for attribute in ATTRIBUTES if not hasattr(task, attribute)]:
        raise TaskError(
            f"task {source.name} has no {', '.join(missing)}: a task has {', '.join(ATTRIBUTES)}, as the file that "
            "`tba task new` writes"
        )
    return task


def _check_options(source: TaskSource, make: Callable[..., Task]) -> None:
    """Raise TaskError for an option that the task lacks or does not have, with the names of those that it has."""
    parameters = inspect.signature(make).parameters.values()
    own = [parameter for parameter in parameters if parameter.name not in ("train", "test")]
    if lacking := [
        parameter.name
        for parameter in own
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in source.options
    ]:
        keys = ", ".join(f"task.options.{name}" for name in lacking)
        raise TaskError(f"task {source.name} needs {keys}: set it in the configuration, or with --set")
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in own]
    if unknown := [name for name in source.options if name not in known]:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise TaskError(f"task {source.name} has no option {', '.join(unknown)}: {has}")
