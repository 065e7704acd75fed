"""Rows of a task's data: a local file with JSON lines, or a data set on the Hugging Face hub."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tba.common import jsonl
from tba.common.errors import MissingExtra, TaskError
from tba.searcher.tasks.task import Prompt


def is_file(source: str) -> bool:
    """Return whether `task.train` or `task.test` names a local file. Other names are hub ids."""
    return source.endswith((".jsonl", ".json")) or Path(source).exists()


def read_rows(task: str, source: str, split: str, subset: str | None) -> Iterable[Any]:
    """Yield the rows of a file, or of a split of the data set with this id on the hub.

    `subset` is the configuration of a hub data set, None for its only one. Raises TaskError if the data is missing or
    malformed, MissingExtra without the package `datasets`.
    """
    return _read_file(task, Path(source)) if is_file(source) else _read_hub(task, source, split, subset)


def without_repeated(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the first prompt of each key, in order: a question that appears twice is one prompt."""
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        found.setdefault(prompt.key, prompt)
    return list(found.values())


def _read_file(task: str, path: Path) -> Iterable[Any]:
    try:
        yield from (row for _, row in jsonl.read(path))
    except OSError as error:
        raise TaskError(
            f"task {task}: {path} cannot be read: {error.strerror}: set task.train and task.test"
        ) from error
    except ValueError as error:
        raise TaskError(f"task {task}: {error}") from error


def _read_hub(task: str, name: str, split: str, subset: str | None) -> Iterable[Any]:
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "hub") from None
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, subset, split=split)
    # The library raises many types; each means that the data is not available.
    except Exception as error:
        raise TaskError(f"task {task}: data set {name!r} ({split}) cannot be loaded: {error}") from error
    return rows
