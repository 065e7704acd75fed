"""What a database records of how its runs were started, and of an offline run what it trains from."""

import json
import sqlite3
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tba.buffer.reader import open_reader
from tba.common.config import Config
from tba.common.errors import ConfigError, UsageError

_KEY = "offline"
_IMPORT = "import"
# Of the starts `s` of a run, the newest of a server first, and then those of imports.
SERVED_LAST = f"ORDER BY json_extract(s.config, '$.{_IMPORT}') IS NOT NULL, s.id DESC"


@dataclass(frozen=True, slots=True)
class Origin:
    """A recorded run at a step of its history, by what does not change when the run goes on."""

    file: str
    run: str
    uuid: str  # of the recorded run: the file may move
    as_of: int
    newest_trajectory: int  # nothing newer is sampled, also when the recorded run has grown
    replay: bool

    def into(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The configuration as a start of an offline run records it."""
        return {**settings, _KEY: asdict(self)}


def of_import(settings: dict[str, Any]) -> dict[str, Any]:
    """The configuration as an import that found no server records it."""
    return {**settings, _IMPORT: True}


def recorded_origin(database: Path) -> tuple[str, Origin | None] | None:
    """(name of the first run in a database, what that trains from if it is offline); None if there is no file.

    Writes nothing. Raises StorageError if the file is no buffer database.
    """
    if not database.exists():
        return None
    with open_reader(database, any_schema=True) as connection:
        query = "SELECT r.name, s.config FROM starts s JOIN runs r ON r.id = s.run ORDER BY s.id LIMIT 1"
        row = connection.execute(query).fetchone()
    if row is None:
        return None
    origin = json.loads(row[1]).get(_KEY)
    return row[0], None if origin is None else Origin(**origin)


def recorded_settings(database: Path, run: str | None) -> dict[str, Any]:
    """The settings, by dotted key, that a run was last served with; `run` None is the only one of the file.

    An import that found no server was started with settings of its own: they count only where no server ever was.
    Empty if there is no such run. Raises UsageError if there is no file, or no run or more than one to choose from.
    """
    with open_reader(database, any_schema=True) as connection:
        names = _run_names(connection)
        if run is None and len(names) != 1:
            raise UsageError(f"{database} has the runs {', '.join(names) or 'none'}: name one with --set run.name=NAME")
        starts = "SELECT s.config FROM starts s JOIN runs r ON r.id = s.run WHERE r.name = ?"
        query = f"{starts} {SERVED_LAST} LIMIT 1"
        row = connection.execute(query, (run or names[0],)).fetchone()
    sections: dict[str, Any] = json.loads(row[0]) if row else {}
    return {
        f"{section}.{name}": value
        for section, content in sections.items()
        if isinstance(content, dict)
        for name, value in content.items()
    }


def _run_names(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM runs ORDER BY id")]


def refuse_unnamed_run(database: Path, name: str) -> None:
    """Raise UsageError if a file holds runs and none of this name, which is a default: nobody has chosen a new one."""
    if not database.exists():
        return
    with open_reader(database, any_schema=True) as connection:
        names = _run_names(connection)
    if names and name not in names:
        raise UsageError(
            f"{database} holds {', '.join(names)} and no run {name}: say which run is meant with --set run.name=NAME"
        )


def earlier_origin(config: Config) -> Origin | None:
    """What the offline run of a configuration began with; None if its directory is new.

    Raises UsageError if another run is there, which training offline would mix up or overwrite.
    """
    directory = config.run.dir
    found = recorded_origin(config.database)
    if found is None:
        if (directory / "metrics.jsonl").exists() or (directory / "checkpoints").exists():
            raise UsageError(f"{directory} holds a run that was not trained offline: set another run.dir")
        return None
    name, origin = found
    if origin is None:
        raise UsageError(f"{config.database} is the buffer of run {name}: set another run.dir for the offline run")
    if name != config.run.name:
        raise UsageError(f"{config.database} is the record of the offline run {name}: set another run.dir")
    return origin


def refuse_offline_record(database: Path) -> None:
    """For what adds trajectories: those would get the ids that an offline run's batches have of another file.

    Raises ConfigError if the database is the record of an offline run.
    """
    found = recorded_origin(database)
    if found is not None and found[1] is not None:
        raise ConfigError(
            f"{database} is the record of a run that was trained offline from {found[1].file}, with no trajectories "
            "of its own: set another run.dir"
        )
