"""The table `starts`, read: the settings of a run over its starts, and the source that an offline run trains from.

What the trajectories of a run were made with, its task and its model, is compared too: a start with others is refused.
The searchers' own check compares hashes of all prompts (`RegisterPrompts`). This one comes first, from the recorded
configuration, and needs neither the task nor its libraries.
"""

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader, read_maps
from tba.buffer.store.storage_errors import stored_config, stored_object
from tba.common.config import Config
from tba.common.config.layers import Resolved, secret_keys, secrets_of
from tba.common.config.paths import absolute_paths
from tba.common.errors import ConfigError, StorageError, UsageError
from tba.common.run_identity import RunIdentity, refuse_other_run
from tba.common.terminal import ConfigOptions
from tba.common.weights.model_files import model_here, weights_digest

# Added to the recorded configuration of a start: its `OfflineSource`, or that it was an import without a server.
OFFLINE, IMPORT = "offline", "import"
# Added to each: the directory that its relative paths refer to.
DIRECTORY = "directory"
# The starts of a run, at most so many (-1: all), each with the number of steps before it: `starts_of` reads them. The
# newest start of a server comes first, imports come last.
STARTS = f"""SELECT s.started_at, s.config, s.software, s.origins, COALESCE((SELECT b.step + 1 FROM batches b
    WHERE b.run = s.run AND b.trained_at < s.started_at ORDER BY b.step DESC LIMIT 1), 0) AS step FROM starts s
    WHERE s.run = ? ORDER BY json_extract(s.config, '$.{IMPORT}') IS NOT NULL, s.id DESC LIMIT ?"""  # noqa: S608
_RUNS = f"""SELECT r.name, (SELECT json_extract(s.config, '$.{OFFLINE}.file') FROM starts s WHERE s.run = r.id
    ORDER BY s.id LIMIT 1) FROM runs r ORDER BY r.id"""  # noqa: S608

# What says where a run is, which may be moved.
_PLACES = ("run.dir", "buffer.database")

# Two bytes tell a secret that was replaced from the same one, and are far too little to find it by.
_SECRET_ROUNDS, _SECRET_BYTES = 100_000, 2
# How many names of runs an error message lists.
_SHOWN = 20
# Added to the recorded configuration of a start: the hash of the model's weights, where they were on that machine.
MODEL_WEIGHTS = "model_weights"
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


@dataclass(frozen=True, slots=True)
class Start:
    """A start of a run at a Unix time, after `step` steps, with its settings by dotted key.

    `software.torch` and the like are the versions of its software. `origins` says what set each key; None if that was
    not recorded. `changes` are (key, value before, value) of what differs from the start before.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    directory: str = ""
    at: float = 0.0
    step: int = 0
    origins: dict[str, str] | None = None
    imported: bool = False
    changes: Sequence[tuple[str, Any, Any]] = ()

    def settings_here(self) -> dict[str, Any]:
        """Return the settings as this process must read them: absolute paths if its directory is another one."""
        return self.settings if self.directory == _here() else absolute_paths(self.settings, self.directory)


def record_of(config: Config) -> dict[str, Any]:
    """Return what a start records: the settings, a short digest of each secret, and the directory of this process."""
    recorded = config.model_dump(mode="json")
    for key, value in secrets_of(config).items():
        section, name = key.split(".")
        salt = f"{config.run.name} {key}".encode()
        digest = hashlib.pbkdf2_hmac("sha256", value.encode(), salt, _SECRET_ROUNDS, _SECRET_BYTES)
        recorded[section][name] += f" {digest.hex()}"
    return {**recorded, DIRECTORY: _here()}


def _here() -> str:
    """Return the working directory, "" if it is deleted."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def starts_of(rows: Sequence[Mapping[str, Any]]) -> list[Start]:
    """Return the starts of the rows of `STARTS`: imports without a server, then those of servers, oldest first."""
    starts: list[Start] = []
    for row in reversed(rows):
        recorded, origins = stored_config(row["config"]), row["origins"]
        start = Start(
            settings=by_key({**recorded, "software": stored_object(row["software"])}),
            directory=str(recorded.get(DIRECTORY, "")),
            at=row["started_at"],
            step=row["step"],
            origins=None if origins is None else stored_object(origins),
            imported=IMPORT in recorded,
        )
        before = starts[-1] if starts and not (start.imported or starts[-1].imported) else start
        starts.append(replace(start, changes=changed(before, start)))
    return starts


@dataclass(frozen=True, slots=True)
class OfflineSource:
    """What an offline run trains from: a recorded run at a step. `uuid` identifies the run if the file has moved.

    Trajectories newer than `newest_trajectory` are not sampled, so a continued recorded run changes nothing.
    """

    file: str
    run: str
    uuid: str
    as_of: int
    newest_trajectory: int
    replay: bool


def recorded_source(database: Path) -> OfflineSource | None:
    """Return what the runs of a database train from, None if not offline. Raises StorageError if it is no buffer."""
    if not database.exists():
        return None
    with open_reader(database) as connection:
        row = connection.execute("SELECT config FROM starts ORDER BY id LIMIT 1").fetchone()
    source = stored_config(row[0] if row else None).get(OFFLINE)
    try:
        return None if source is None else OfflineSource(**source)
    except TypeError as error:
        raise StorageError(f"{database}: its source of an offline run is malformed: {error}") from error


def last_start(connection: sqlite3.Connection, run: int | None) -> Start:
    """Return the start that a run was last served with, or its last import; an empty one if there is neither."""
    return next(iter(starts_of(read_maps(connection, STARTS, run, 1))), Start())


def recorded_start(database: Path, run: str | None) -> Start:
    """Return the `last_start` of a run by its name; None is the only run of the file.

    Raises UsageError if there is no file, or if `run` is None and there is not exactly one run.
    """
    with open_reader(database) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM runs ORDER BY id")]
        run = run or choose_run(database, names, None, "--set run.name=NAME")
        return last_start(connection, *connection.execute("SELECT MAX(id) FROM runs WHERE name = ?", (run,)).fetchone())


def changed(before: Start, after: Start) -> list[tuple[str, Any, Any]]:
    """Return (key, value before, value after) of the settings that both have and that differ, but for places.

    A path that is written in another way, and leads to the same place, does not differ.
    """
    keys = [
        key for key, value in after.settings.items() if key not in _PLACES and before.settings.get(key, value) != value
    ]
    was, now = ({key: start.settings[key] for key in keys} for start in (before, after))
    places = absolute_paths(was, before.directory), absolute_paths(now, after.directory)
    return [(key, was[key], now[key]) for key in keys if places[0][key] != places[1][key]]


def by_key(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of recorded sections by dotted key."""
    return {
        f"{section}.{name}": value
        for section, content in sections.items()
        if isinstance(content, dict)
        for name, value in content.items()
    }


def choose_run(path: Path, names: Iterable[str], name: str | None, flag: str) -> str:
    """Return the run of this name, or the only one. Raises UsageError, which advises `flag`, if there is none."""
    names = list(names)
    fitting = [one for one in names if name in (None, one)]
    if len(fitting) != 1:
        raise UsageError(f"{path} holds the runs {', '.join(names[:_SHOWN]) or 'none'}: name one with {flag}")
    return fitting[0]


def as_recorded(resolved: Resolved) -> Resolved:
    """Return a configuration, or without a file that with which its run was last served, and what was set on top.

    Raises UsageError if the database holds several runs and none is named.
    """
    config, database = resolved.config, resolved.config.database
    if resolved.file is not None or not database.is_file():
        return resolved
    start = recorded_start(database, config.run.name if "run.name" in resolved.origins else None)
    # A secret was recorded as asterisks.
    recorded = {key: value for key, value in start.settings_here().items() if key not in secret_keys()}
    if not recorded:
        return resolved
    # The directory may have moved.
    here = {"run.dir": config.run.dir, "buffer.database": config.buffer.database}
    config = resolved.over({**recorded, **here}, f"recorded in {database}", needs="search")
    return replace(resolved, config=config, origins={**(start.origins or {}), **resolved.origins})


def resolve_start(options: ConfigOptions, overrides: dict[str, Any] | None = None) -> Resolved:
    """As the method of `options`; the directory of a run stands for the settings with which it was last served."""
    if options.file is None or not options.file.is_dir():
        return options.resolve_start(overrides)
    return as_recorded(options.resolve_run(overrides))


def changes_since_last_start(config: Config) -> list[tuple[str, Any, Any]]:
    """Return (key, value then, value now) of the settings that differ from those a run was last served with."""
    now = record_of(config)
    return changed(recorded_start(config.database, config.run.name), Start(by_key(now), now[DIRECTORY]))


def refuse_other_runs(config: Config, source: str = "", *, alone: bool | None = None) -> None:
    """Raise ConfigError if a database is not that of the configured run, or of an offline run from a `source`.

    `alone`: the database holds no other run; by default so in run.dir. An offline run is alone in any case: its batches
    refer to ids of another file, which added trajectories would reuse.
    """
    path, asked = config.database, RunIdentity(config.run.name, source)
    if not path.exists():
        return
    with open_reader(path) as connection:
        found = [RunIdentity(name, source or "") for name, source in connection.execute(_RUNS)]
    alone = path.parent == config.run.dir if alone is None else alone
    if alone or source or any(run.source for run in found):
        refuse_other_run(path, found, asked)


# ---------------------------------------------------------------- the work of a run


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
    if not config.database.is_file():
        return
    try:
        with open_reader(config.database) as connection:
            row = connection.execute(_START, (config.run.name,)).fetchone()
        recorded = stored_config(row[0] if row else None)
    except StorageError:
        return
    different = [
        f"{key} was {json.dumps(was)} and is {json.dumps(now)}"
        if was != now
        else f"{key} {json.dumps(now)} had other weights"
        for key, was, now in _differences(recorded, config, evaluates)
    ]
    if different:
        raise ConfigError(
            f"{config.database} holds run {config.run.name} with trajectories of another task or model, which do not "
            f"go together with new ones: {'; '.join(different)}. Set another run.dir for a new run, or the old value "
            "to continue this one"
        )


def _differences(recorded: Mapping[str, Any], config: Config, evaluates: bool) -> Sequence[tuple[str, Any, Any]]:
    """Return (key, recorded value, value) of what differs. What was not recorded, as before any lease, does not."""
    new, keys = record_of(config), _OF_TASK if evaluates else (*_OF_TASK, *_OF_PROMPTS)
    starts = []
    for work in (recorded, new):
        task = {key: _comparable(key, value) for key, value in work.get("task", {}).items() if key in keys}
        starts.append(Start(task, work.get(DIRECTORY, "")))
    found = [(f"task.{key}", recorded["task"][key], new["task"][key]) for key, *_ in changed(*starts)]
    if _is_other_model(recorded, config):
        found.append(("model.path", recorded["model"]["path"], config.model.path))
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
