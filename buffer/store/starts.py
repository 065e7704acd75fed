"""The table `starts`, read: the settings of a run, and the source that an offline run trains from."""

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader
from tba.buffer.store.storage_errors import stored_config
from tba.common.config import Config
from tba.common.config.layers import Resolved, secret_keys
from tba.common.errors import StorageError, UsageError
from tba.common.run_identity import RunIdentity, refuse_other_run
from tba.common.terminal import ConfigOptions

# Added to the recorded configuration of a start: its `OfflineSource`, or that it was an import without a server.
OFFLINE, IMPORT = "offline", "import"
# The newest start `s` of a server comes first, starts of imports come last.
SERVED_FIRST = f"ORDER BY json_extract(s.config, '$.{IMPORT}') IS NOT NULL, s.id DESC"

_RUNS = f"""SELECT r.name, (SELECT json_extract(s.config, '$.{OFFLINE}.file') FROM starts s WHERE s.run = r.id
    ORDER BY s.id LIMIT 1) FROM runs r ORDER BY r.id"""  # noqa: S608

# What says where a run is, which may be moved.
_PLACES = ("run.dir", "buffer.database")

# How many names of runs an error message lists.
_SHOWN = 20


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


def recorded_settings(database: Path, run: str | None) -> dict[str, Any]:
    """Return the settings, by dotted key, that a run was last served with. `run` None is the only run of the file.

    Settings of an import count only if no server ever served the run. Empty if there is no such run. Raises UsageError
    if there is no file, or if `run` is None and there is not exactly one run.
    """
    with open_reader(database) as connection:
        run = run or choose_run(database, _run_names(connection), None, "--set run.name=NAME")
        query = f"SELECT s.config FROM starts s JOIN runs r ON r.id = s.run WHERE r.name = ? {SERVED_FIRST} LIMIT 1"  # noqa: S608
        row = connection.execute(query, (run,)).fetchone()
    return by_key(stored_config(row[0] if row else None))


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, value before, value after) of the settings that both have and that differ, but for places."""
    return [
        (key, before[key], value)
        for key, value in after.items()
        if key in before and before[key] != value and key not in _PLACES
    ]


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


def as_recorded(resolved: Resolved) -> Config:
    """Return a configuration, or without a file that with which its run was last served, and what was set on top.

    Raises UsageError if the database holds several runs and none is named.
    """
    config, database = resolved.config, resolved.config.database
    if resolved.file is not None or not database.is_file():
        return config
    recorded = recorded_settings(database, config.run.name if "run.name" in resolved.origins else None)
    # A secret was recorded as asterisks.
    recorded = {key: value for key, value in recorded.items() if key not in secret_keys()}
    # The directory may have moved.
    here = {"run.dir": config.run.dir, "buffer.database": config.buffer.database}
    return resolved.over({**recorded, **here}, f"recorded in {database}", needs="search") if recorded else config


def resolve_start(options: ConfigOptions, overrides: dict[str, Any] | None = None) -> Resolved:
    """As the method of `options`; the directory of a run stands for the settings with which it was last served."""
    if options.file is None or not options.file.is_dir():
        return options.resolve_start(overrides)
    resolved = options.resolve_run(overrides)
    return replace(resolved, config=as_recorded(resolved))


def changes_since_last_start(config: Config) -> list[tuple[str, Any, Any]]:
    """Return (key, value then, value now) of the settings that differ from those a run was last served with."""
    return changed_settings(recorded_settings(config.database, config.run.name), by_key(config.model_dump(mode="json")))


def _run_names(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM runs ORDER BY id")]


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
