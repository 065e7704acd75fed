"""What the trajectories of a run were made with, its task and its model: a start with others is refused.

The searchers' own check compares hashes of all prompts (`RegisterPrompts`). This one comes first, from the recorded
configuration, and needs neither the task nor its libraries.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader
from tba.buffer.store.starts import DIRECTORY, IMPORT, record_of
from tba.buffer.store.storage_errors import stored_config
from tba.common.config import Config
from tba.common.config.paths import absolute_paths
from tba.common.errors import ConfigError, StorageError
from tba.common.weights.model_files import model_here, weights_digest

# Added to the recorded configuration of a start: the hash of the model's weights, where they were on that machine.
MODEL_WEIGHTS = "model_weights"
_MODEL = "model.path"
# What the prompts and their scores come from. Paths of data may change, as may limits of time and memory.
_OF_TASK = ("name", "options", "mixture")
_OF_PROMPTS = ("limit", "system", "template_kwargs")
_OF_PART = ("name", "options", "limit", "label")
# Options, such as those of redteam: the same servers may have moved, and a limit of time changes no reward.
_MAY_CHANGE = ("url", "request_seconds")
# The start whose searchers registered the prompts: a later one may have been refused by the searchers.
_START = f"""SELECT s.config FROM runs r JOIN starts s ON s.run = r.id
    WHERE r.name = ? AND json_extract(s.config, '$.{IMPORT}') IS NULL
    AND s.started_at <= (SELECT v.leased_at FROM visits v WHERE v.run = r.id ORDER BY v.id LIMIT 1)
    ORDER BY s.id DESC LIMIT 1"""  # noqa: S608


def model_weights(config: Config) -> str | None:
    """Return the hash of the model's weights, None if they are not on this machine."""
    directory = model_here(config.model.path) if config.model.path else None
    try:
        return weights_digest(directory) if directory is not None else None
    except (ConfigError, OSError):
        return None


def refuse_other_work(config: Config, *, evaluates: bool = False) -> None:
    """Raise ConfigError if searchers worked on the run with another task or model. An evaluation may use other prompts.

    Nothing is refused where the database is not here, or cannot be read: its server says why.
    """
    try:
        recorded = _recorded(config)
    except StorageError:
        return
    different = [
        f"{key} was {_shown(was)} and is {_shown(now)}" if was != now else f"{key} {_shown(now)} had other weights"
        for key, was, now in _differences(recorded, config, evaluates)
    ]
    if different:
        raise ConfigError(
            f"{config.database} holds run {config.run.name} with trajectories of another task or model, which do not "
            f"go together with new ones: {'; '.join(different)}. Set another run.dir for a new run, or the old value "
            "to continue this one"
        )


def _recorded(config: Config) -> dict[str, Any]:
    """Return the configuration with which the run began; {} if no prompt of it was leased."""
    if not config.database.is_file():
        return {}
    with open_reader(config.database) as connection:
        row = connection.execute(_START, (config.run.name,)).fetchone()
    return stored_config(row[0] if row else None)


def _differences(recorded: Mapping[str, Any], config: Config, evaluates: bool) -> Sequence[tuple[str, Any, Any]]:
    """Return (key, recorded value, value) of what differs. A key that was not recorded differs in nothing."""
    new = record_of(config)
    tasks = [(found.get("task", {}), found.get(DIRECTORY, "")) for found in (recorded, new)]
    # As written, and as absolute paths: a run may have moved with its files, or be continued from another directory.
    pairs = [[task for task, _ in tasks], [absolute_paths(*task) for task in tasks]]
    keys = _OF_TASK if evaluates else (*_OF_TASK, *_OF_PROMPTS)
    found = [
        (f"task.{key}", recorded["task"][key], new["task"][key])
        for key in keys
        if all(key in old and _comparable(key, old[key]) != _comparable(key, now[key]) for old, now in pairs)
    ]
    if _is_other_model(recorded, config):
        found.append((_MODEL, recorded["model"]["path"], config.model.path))
    return found


def _is_other_model(recorded: Mapping[str, Any], config: Config) -> bool:
    """Compare weights where both are known: a directory may have moved, or hold another model now."""
    path = recorded.get("model", {}).get("path")
    if not path or not config.model.path:
        return False
    was, now = recorded.get(MODEL_WEIGHTS), model_weights(config)
    if was is None and path != config.model.path:
        was = model_weights(config.model_copy(update={"model": config.model.model_copy(update={"path": path})}))
    if was is None or now is None:
        return bool(path != config.model.path)
    return bool(was != now)


def _comparable(key: str, value: Any) -> Any:
    if key == "mixture":
        return [{name: _comparable(name, part.get(name)) for name in _OF_PART} for part in value]
    if key == "options":
        return _fixed(value)
    # The file of a task may have moved.
    if key == "name" and isinstance(value, str) and value.partition(":")[0].endswith(".py"):
        return Path(value).name
    return value


def _fixed(options: Any) -> Any:
    """Return options of a task without those that may change."""
    if not isinstance(options, dict):
        return options
    return {name: _fixed(value) for name, value in options.items() if name not in _MAY_CHANGE}


def _shown(value: Any) -> str:
    return json.dumps(value)
