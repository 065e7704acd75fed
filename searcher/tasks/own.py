"""A task of the user: a class or function in a module of the working directory or on PYTHONPATH, or in a file."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tba.common.errors import TaskError

# What every task has.
ATTRIBUTES = ("name", "prompts", "held_out", "score")


def find_own(name: str) -> Callable[..., Any]:
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


def _lacks(kind: type) -> list[str]:
    # The name may be set by `__init__`.
    return [attribute for attribute in ATTRIBUTES[1:] if not hasattr(kind, attribute)]


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
    if len(tasks) > 1:
        names = ", ".join(task.__name__ for task in tasks)
        raise TaskError(f"task.name {place} has several tasks, {names}: name one, as {place}:{tasks[-1].__name__}")
    if not tasks:
        raise TaskError(
            f"task.name {place} has no task, which is a class with {', '.join(ATTRIBUTES)}; {_found(classes)}: "
            "`tba task new` writes one that runs"
        )
    return tasks[0]
