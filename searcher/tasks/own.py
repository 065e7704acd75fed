"""A task of the user: a class or function in a module on PYTHONPATH, or in a Python file."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tba.common.errors import TaskError

_METHODS = ("prompts", "held_out", "score")


def find_own(name: str) -> Callable[..., Any]:
    """Return the factory that a `task.name` denotes: `package.module:Class`, `file.py:Class`, or `file.py`.

    A file without a name of a class must define exactly one class with the methods of a task. Raises TaskError if it
    does not, and whatever the import raises.
    """
    place, _, factory = name.partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    if factory:
        found: Callable[..., Any] = getattr(module, factory)
        return found
    return _only_task(module, place)


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
    # At the end: a file next to the task must not hide a module of another package.
    if (folder := str(path.parent.absolute())) not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module


def _only_task(module: ModuleType, place: str) -> Callable[..., Any]:
    tasks = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and all(hasattr(value, m) for m in _METHODS)
    ]
    if len(tasks) != 1:
        names = ", ".join(task.__name__ for task in tasks) or "none"
        raise TaskError(
            f"task.name {place}: the file must define one class with {', '.join(_METHODS)}, and defines {names}: "
            f"name the one to use, such as {place}:MyTask"
        )
    return tasks[0]
