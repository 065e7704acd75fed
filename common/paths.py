"""Whether the files and directories that a configuration names are there, told from their names alone."""

import os
from pathlib import Path

from tba.common.config import Config, TaskSection
from tba.common.errors import ConfigError
from tba.common.model_files import check_model


def check_paths(config: Config) -> list[str]:
    """The models that will be taken from the hub, a sentence each.

    Raises ConfigError, with the key and the path, for the first that is not on this machine, or cannot be written to.
    """
    models = {"model.path": config.model.path}
    if config.reward_model.path:
        models["reward_model.path"] = config.reward_model.path
    elsewhere = [key for key, path in models.items() if not check_model(path, setting=key)]
    check_data(config.task)
    check_places(config)
    return [f"{key} {models[key]} is no directory here: it will be taken from the hub" for key in elsewhere]


def check_data(task: TaskSection) -> None:
    """Raise ConfigError for a file of prompts that is not there. What is no file may be a data set of the hub."""
    if not task.reads_files:
        return
    for key, path in (("task.train", task.train), ("task.test", task.test)):
        if path.endswith((".json", ".jsonl")) and not os.path.isfile(path):  # False where this user may not look
            raise ConfigError(f"{key} {path} does not exist")


def nearest_existing(place: Path) -> Path:
    """The place, or the nearest directory above it that is there and can be seen.

    Unlike `Path.exists`, this also has an answer for what lies in a directory that this user may not enter.
    """
    return next(path for path in (place.absolute(), *place.absolute().parents) if os.path.exists(path))


def check_places(config: Config) -> None:
    """Raise ConfigError for a directory that can neither be written to nor be made."""
    places = {
        "run.dir": config.run.dir,
        "buffer.database": config.database.parent,
        "search.spool_dir": config.spool,
        "search.weights_dir": config.search.weights_dir,
    }
    for key, place in places.items():
        if place is None:
            continue
        existing = nearest_existing(place)
        if not existing.is_dir():
            raise ConfigError(f"{key} {place} cannot be made: {existing} is no directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{key} {place} cannot be written to: {existing} belongs to another user, or is read-only"
            )
