"""Tasks: prompts with stable keys, and a scorer or an environment for their responses."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tba.common.config import TaskSection
from tba.common.config.task import MIXTURE, TaskSource
from tba.common.errors import TaskError, TbaError, named
from tba.searcher.tasks.answers_task import AnswersTask
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.environments import ClassTask, GymnasiumTask, is_environment_class
from tba.searcher.tasks.games import CalculatorTask, GuessTask
from tba.searcher.tasks.gsm8k import Gsm8kTask
from tba.searcher.tasks.mathematics import MathTask
from tba.searcher.tasks.mixture import MixtureTask
from tba.searcher.tasks.reasoning import ReasoningGymTask
from tba.searcher.tasks.task import LimitedTask, Task

# What every task has. An episode task has an environment in place of the last.
_ATTRIBUTES = ("name", "prompts", "held_out", "score")
_ENVIRONMENT = "environment"
# The names are those of `tba.common.config.task.TASKS`, without the mixture.
_SHIPPED: dict[str, type] = {
    "answers": AnswersTask,
    "arithmetic": ArithmeticTask,
    "calculator": CalculatorTask,
    "gsm8k": Gsm8kTask,
    "gymnasium": GymnasiumTask,
    "guess": GuessTask,
    "math": MathTask,
    "reasoning_gym": ReasoningGymTask,
}


def load_task(config: TaskSection) -> Task:
    """Load the task that the configuration names. Raises TaskError if it cannot be loaded or its data is malformed."""
    if config.name != MIXTURE:
        return _load(config)
    parts = [(part.label or None, _load(part), part.weight) for part in config.mixture]
    return LimitedTask(MixtureTask(parts), config.limit, config.held_out_limit)


def _load(source: TaskSource) -> Task:
    return LimitedTask(_task(source), source.limit, source.held_out_limit)


def _task(source: TaskSource) -> Task:
    shipped = _SHIPPED.get(source.name)
    make: Any
    arguments = dict(source.options)
    if source.reads_files:
        arguments |= {"train": source.train, "test": source.test}
    try:
        make = shipped or _find_own(source.name)
        if is_environment_class(make) and _lacks(make):
            make = partial(ClassTask, make)
            arguments |= {"train": source.train, "test": source.test}
        _check_options(source, make)
        task: Task = make(**arguments)
    # A shortage of memory may be transient, so it must not count as a mistake of the configuration.
    except (MemoryError, TbaError):
        raise
    # User code may raise anything.
    except Exception as error:
        raise TaskError(f"task.name {source.name} cannot be loaded: {named(error)}") from error
    if missing := _lacks(task):
        raise TaskError(
            f"task {source.name} has no {', '.join(missing)}: a task has {', '.join(_ATTRIBUTES)}, as the file that "
            f"`tba task new` writes, or {_ENVIRONMENT} in place of score (docs/episodes.md)"
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


def _find_own(name: str) -> Callable[..., Any]:
    """Return the class or function that a `task.name` denotes: `package.module:Class`, `file.py:Class`, or `file.py`.

    A file without a name of a class must define exactly one class with the attributes of a task. Raises TaskError if it
    does not, and whatever the import raises.
    """
    place, _, wanted = name.partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(name, place)
    if not wanted:
        return _only_task(module, place)
    if not hasattr(module, wanted):
        raise TaskError(f"task.name {name}: {place} has no {wanted}; {_found(_classes(module))}")
    found: Callable[..., Any] = getattr(module, wanted)
    return found


def _import(name: str, place: str) -> ModuleType:
    _search_last(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # One that the module itself imports is reported by its own name.
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise TaskError(
            f"task.name {name}: there is no Python module {error.name} here: name the file of the task, such as "
            "my_task.py, or add the directory of the module to PYTHONPATH"
        ) from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"task.name {path}: the file does not exist; it is relative to the working directory")
    module_name = f"tba_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look up the module of a class by its name.
    sys.modules[module_name] = module
    _search_last(path.parent.absolute())
    spec.loader.exec_module(module)
    return module


def _search_last(folder: Path) -> None:
    """Find modules in a folder too. At the end: a file next to a task must not hide a module of another package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _classes(module: ModuleType) -> list[type]:
    """Return the classes that a module defines, without those that it imports."""
    return [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]


def _lacks(task: Any) -> list[str]:
    """Return the attributes that an object, or a class, lacks to be a task."""
    # The name may be set by `__init__`.
    needed = _ATTRIBUTES[1:] if isinstance(task, type) else _ATTRIBUTES
    return [one for one in needed if not (hasattr(task, one) or (one == "score" and hasattr(task, _ENVIRONMENT)))]


def _found(classes: list[type]) -> str:
    """Return which classes a file defines, and what each one lacks to be a task."""
    described = [
        f"{kind.__name__}, which has no {', '.join(lacking)}" if (lacking := _lacks(kind)) else kind.__name__
        for kind in classes
    ]
    return f"it defines {'; '.join(described) or 'no class'}"


def _only_task(module: ModuleType, place: str) -> Callable[..., Any]:
    classes = _classes(module)
    tasks = [kind for kind in classes if not _lacks(kind)]
    # An episode task has its environment in the same file.
    if not any(hasattr(kind, name) for kind in classes for name in ("prompts", "held_out", "environment")):
        tasks = [kind for kind in classes if is_environment_class(kind)]
    if len(tasks) > 1:
        names = ", ".join(task.__name__ for task in tasks)
        raise TaskError(f"task.name {place} has several tasks, {names}: name one, as {place}:{tasks[-1].__name__}")
    if not tasks:
        raise TaskError(
            f"task.name {place} has no task, which is a class with {', '.join(_ATTRIBUTES)}; {_found(classes)}: "
            "`tba task new` writes one that runs"
        )
    return tasks[0]
