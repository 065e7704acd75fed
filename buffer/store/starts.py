"""The table `starts`, read: the settings of a run over its starts, and the source that an offline run trains from."""

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader, read_maps
from tba.buffer.store.storage_errors import stored_config, stored_object
from tba.common.config import Config
from tba.common.config.layers import Resolved, secret_keys, secrets_of
from tba.common.config.paths import absolute_paths
from tba.common.errors import StorageError, UsageError
from tba.common.run_identity import RunIdentity, refuse_other_run
from tba.common.terminal import ConfigOptions

# Added to the recorded configuration of a start: its `OfflineSource`, or that it was an import without a server.
OFFLINE, IMPORT = "offline", "import"
# The same: the directory that relative paths refer to, and what tells whether a secret was replaced.
DIRECTORY, _SECRETS = "directory", "secrets"
# The newest start `s` of a server comes first, starts of imports come last.
# The starts of a run, at most so many (-1: all), each with the number of steps before it: `starts_of` reads them.
STARTS = f"""SELECT s.started_at, s.config, s.software, s.origins, COALESCE((SELECT b.step + 1 FROM batches b
    WHERE b.run = s.run AND b.trained_at < s.started_at ORDER BY b.step DESC LIMIT 1), 0) AS step FROM starts s
    WHERE s.run = ?
    ORDER BY json_extract(s.config, '$.{IMPORT}') IS NOT NULL, s.id DESC LIMIT ?"""  # noqa: S608

_RUNS = f"""SELECT r.name, (SELECT json_extract(s.config, '$.{OFFLINE}.file') FROM starts s WHERE s.run = r.id
    ORDER BY s.id LIMIT 1) FROM runs r ORDER BY r.id"""  # noqa: S608

# What says where a run is, which may be moved.
_PLACES = ("run.dir", "buffer.database")

# In the place of a secret that was replaced, which is recorded as asterisks.
_REPLACED = "another one"
# Two bytes tell a replaced secret from the same one, and far too little to find it by.
_SECRET_BYTES, _SECRET_ROUNDS = 2, 100_000
# How many names of runs an error message lists.
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Start:
    """A start of a run at a Unix time, after `step` steps, with its settings by dotted key.

    `software.torch` and the like are the versions of its software. `origins` says what set each key; None if that was
    not recorded. Relative paths refer to `directory`, "" if that was not recorded. `changes` are (key, value before,
    value) of what differs from the start before.
    """

    at: float
    step: int
    settings: dict[str, Any]
    directory: str
    secrets: dict[str, str]
    origins: dict[str, str] | None
    imported: bool
    changes: list[tuple[str, Any, Any]]

    def settings_here(self) -> dict[str, Any]:
        """Return the settings as this process must read them: absolute paths if its directory is another one."""
        return self.settings if self.directory == _here() else absolute_paths(self.settings, self.directory)


def record_of(config: Config) -> dict[str, Any]:
    """Return what a start records: the settings, the directory of this process, a short digest of each secret."""
    secrets = {key: _digest(value, f"{config.run.name} {key}") for key, value in secrets_of(config).items()}
    return {**config.model_dump(mode="json"), DIRECTORY: _here(), _SECRETS: secrets}


def _here() -> str:
    """Return the working directory, "" if it is deleted."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def _digest(secret: str, salt: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), salt.encode(), _SECRET_ROUNDS, _SECRET_BYTES).hex()


def starts_of(rows: Iterable[Mapping[str, Any]]) -> list[Start]:
    """Return the starts of the rows of `STARTS`: imports without a server, then those of servers, oldest first."""
    starts: list[Start] = []
    for row in reversed([*rows]):
        start = _start(stored_config(row["config"]), row)
        before = starts[-1:] if not start.imported else []
        starts.append(replace(start, changes=[change for one in before for change in changed(one, start)]))
    return starts


def _start(recorded: dict[str, Any], row: Mapping[str, Any]) -> Start:
    directory, secrets, software = recorded.pop(DIRECTORY, ""), recorded.pop(_SECRETS, {}), row.get("software")
    return Start(
        at=row.get("started_at", 0.0),
        step=row.get("step", 0),
        settings=by_key({**recorded, "software": stored_object(software)}),
        directory=directory if isinstance(directory, str) else "",
        secrets=secrets if isinstance(secrets, dict) else {},
        origins=None if row.get("origins") is None else stored_object(row["origins"]),
        imported=IMPORT in recorded,
        changes=[],
    )


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
    """Return what the runs of a database train from; None if they are not offline, or there is no file or no run.

    Writes nothing. Raises StorageError if the file is not a buffer database.
    """
    if not database.exists():
        return None
    with open_reader(database) as connection:
        row = connection.execute("SELECT config FROM starts ORDER BY id LIMIT 1").fetchone()
    source = stored_config(row[0] if row else None).get(OFFLINE)
    try:
        return None if source is None else OfflineSource(**source)
    except TypeError as error:
        raise StorageError(f"{database}: its source of an offline run is malformed: {error}") from error


def last_start(database: Path, run: str | None) -> Start | None:
    """Return the start that a run was last served with, None if there is no such run. `run` None is the only run.

    An import counts only if no server ever served the run. Raises UsageError if there is no file, or if `run` is None
    and there is not exactly one run.
    """
    with open_reader(database) as connection:
        run = run or choose_run(database, _run_names(connection), None, "--set run.name=NAME")
        id_ = connection.execute("SELECT id FROM runs WHERE name = ?", (run,)).fetchone()
        return _last(connection, id_[0]) if id_ else None


def _last(connection: sqlite3.Connection, run: int) -> Start | None:
    return next(iter(starts_of(read_maps(connection, STARTS, run, 1))), None)


def settings_of(connection: sqlite3.Connection, run: int | None) -> dict[str, Any]:
    """Return the settings of the start that a run was last served with, as this process must read them; {} without."""
    start = None if run is None else _last(connection, run)
    return {} if start is None else start.settings_here()


def recorded_settings(database: Path, run: str | None) -> dict[str, Any]:
    """Return the settings of `last_start`, as `settings_of`."""
    start = last_start(database, run)
    return {} if start is None else start.settings_here()


def changed(before: Start, after: Start) -> list[tuple[str, Any, Any]]:
    """Return (key, value before, value after) of the settings that both have and that differ, but for places.

    A path that is written in another way, and leads to the same place, does not differ.
    """
    was, now = (absolute_paths(start.settings, start.directory) for start in (before, after))
    differing = [
        (key, before.settings[key], value)
        for key, value in after.settings.items()
        if key not in _PLACES and before.settings.get(key, value) != value and was[key] != now[key]
    ]
    both = before.secrets.keys() & after.secrets.keys()
    replaced = [key for key in sorted(both) if before.secrets[key] != after.secrets[key]]
    return differing + [(key, before.settings[key], _REPLACED) for key in replaced]


def by_key(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of recorded sections by dotted key."""
    return {
        f"{section}.{name}": value
        for section, content in sections.items()
        if isinstance(content, dict)
        for name, value in content.items()
    }


def choose_run(path: Path, names: Iterable[str], name: str | None, flag: str) -> str:
    """Return the named one of the runs in a path, or the only one if `name` is None.

    Raises UsageError, which tells the user to name a run with `flag`, if there is not exactly one such run.
    """
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
    before = last_start(config.database, config.run.name)
    return [] if before is None else changed(before, _start(record_of(config), {}))


def _run_names(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM runs ORDER BY id")]


def refuse_other_runs(config: Config, source: str = "", *, alone: bool | None = None) -> None:
    """Raise ConfigError if a database is not that of the configured run, or of an offline run from a `source`.

    `alone`: the database holds no other run. By default that is so in run.dir, which has the checkpoints and metrics of
    one run, and not elsewhere. An offline run is alone in any case: its batches refer to ids of another file, which
    added trajectories would reuse.
    """
    path, asked = config.database, RunIdentity(config.run.name, source)
    if not path.exists():
        return
    with open_reader(path) as connection:
        found = [RunIdentity(name, source or "") for name, source in connection.execute(_RUNS)]
    alone = path.parent == config.run.dir if alone is None else alone
    if alone or source or any(run.source for run in found):
        refuse_other_run(path, found, asked)
