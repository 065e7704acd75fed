"""Checks that the files and directories of a configuration exist. No file is opened, no directory created."""

import os
from pathlib import Path

from tba.common.config import Config, TaskSection
from tba.common.errors import ConfigError
from tba.common.weights.model_files import check_model


def check_paths(config: Config) -> list[str]:
    """Check all paths, and return a sentence for each model that will be downloaded from the hub.

    Raises ConfigError with key and path for the first one that does not exist or is not writable.
    """
    models = {"model.path": config.model.path}
    if config.reward_model.path:
        models["reward_model.path"] = config.reward_model.path
    elsewhere = [key for key, path in models.items() if not check_model(path, setting=key)]
    check_data(config.task)
    check_directories(config)
    return [f"{key} {models[key]} is not a local directory: it will be downloaded from the hub" for key in elsewhere]


def check_data(task: TaskSection) -> None:
    """Raise ConfigError for a file of prompts that does not exist. Other names are hub ids."""
    if not task.reads_files:
        return
    for key, path in (("task.train", task.train), ("task.test", task.test)):
        # Unlike Path.is_file, this is False in a directory that this user may not enter.
        if path.endswith((".json", ".jsonl")) and not os.path.isfile(path):
            raise ConfigError(f"{key} {path} does not exist")


def nearest_existing(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists and is visible to this user.

    Unlike `Path.exists`, it raises nothing for a path in a directory that this user may not enter.
    """
    return next(one for one in (path.absolute(), *path.absolute().parents) if os.path.exists(one))


def check_directories(config: Config) -> None:
    """Raise ConfigError for a directory that is not writable or cannot be created."""
    directories = {
        "run.dir": config.run.dir,
        "buffer.database": config.database.parent,
        "search.spool_dir": config.spool,
        "search.weights_dir": config.search.weights_dir,
    }
    for key, directory in directories.items():
        if directory is None:
            continue
        existing = nearest_existing(directory)
        if not existing.is_dir():
            raise ConfigError(f"{key} {directory} cannot be created: {existing} is not a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"{key} {directory} is not writable: {existing} belongs to another user or is read-only")
