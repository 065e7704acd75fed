"""The runs that the interface shows: one for each run in each of the given directories and database files."""

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba.buffer.store.starts import STARTS, Start, starts_of
from tba.buffer.tools.query import PageRows, page_rows
from tba.common import run_files
from tba.common.config.layers import as_toml
from tba.common.errors import StorageError, UsageError
from tba.common.wire.messages import Status
from tba.deploy.run_directory import served_status

DEFAULT_DIRECTORY = Path("runs")
_PAGE_SECONDS = 5.0
_STATUS_SECONDS = 2.0
# How long a server that did not answer is not asked again.
_ABSENT_SECONDS = 15.0
# With the run.dir of the last start, of runs whose server recorded one.
_RUNS = """SELECT r.id, r.name, (SELECT json_extract(s.config, '$.run.dir') FROM starts s WHERE s.run = r.id
    AND json_valid(s.config) ORDER BY s.id DESC LIMIT 1) AS dir FROM runs r ORDER BY r.id"""


@dataclass
class Run:
    """One run. `key` is its part of an address: its name, with a number if several files hold a run of that name."""

    key: str
    name: str
    id: int
    database: Path
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _status: Status | None = field(default=None, repr=False)
    _ask_at: float = field(default=0.0, repr=False)

    @property
    def directory(self) -> Path:
        """The directory with the metrics of the run, next to its database."""
        return self.database.parent

    @contextlib.contextmanager
    def rows(self) -> Iterator[PageRows]:
        with page_rows(self.database, seconds=_PAGE_SECONDS) as rows:
            yield rows

    def config(self, rows: PageRows) -> dict[str, Any]:
        """Return the settings that a server last served the run with, by dotted key; {} if there are none."""
        newest = starts_of(rows.all(STARTS, self.id, 1))
        return newest[0].settings_here() if newest else {}

    def starts(self, rows: PageRows) -> list[Start]:
        """Return the starts of the run's servers, oldest first; without any, its last import."""
        starts = starts_of(rows.all(STARTS, self.id, -1))
        return [start for start in starts if not start.imported] or starts[-1:]

    def status(self, config: dict[str, Any]) -> Status | None:
        """Return the status that the buffer server of the run gives, at most seconds old; None if none answers."""
        address, keys = config.get("buffer.address", ""), config.get("security.keys")
        with self._lock:
            if time.monotonic() >= self._ask_at:
                self._status = served_status(self.database, {"run": self.name, "address": address, "keys": keys})
                self._ask_at = time.monotonic() + (_STATUS_SECONDS if self._status else _ABSENT_SECONDS)
            return self._status


def value_over_steps(starts: Sequence[Start], key: str) -> str:
    """Return the values with which steps were made: `1e-05 until step 105, then 3e-05`; "" if none is recorded."""
    told = last = ""
    for step, value in {start.step: start.settings[key] for start in starts if key in start.settings}.items():
        text = f"{value:g}" if isinstance(value, float) else as_toml(value)
        if text != last:
            told += f" until step {step}, then {text}" if told else text
        last = text
    return told


def find_runs(paths: Sequence[Path], report: Callable[[str], None]) -> list[Run]:
    """Return the runs of directories and database files; without any, those of every directory in runs/.

    Of several files, those that cannot be read are left out, and `report` receives a sentence. Raises UsageError if a
    path leads to no run, StorageError if the only file is not a buffer of this release.
    """
    if not paths and not _databases_in(DEFAULT_DIRECTORY):
        raise UsageError(
            f"this folder holds no runs: there is no {DEFAULT_DIRECTORY}/*/{run_files.DATABASE}. Change to the folder "
            "where a run was started, name its run.dir (`tba ui DIRECTORY`), or start a run with `tba run`"
        )
    databases = dict.fromkeys(database for path in paths or [DEFAULT_DIRECTORY] for database in _databases(path))
    runs: dict[str, Run] = {}
    found: list[tuple[str, str, int, Path]] = []
    for database in databases:
        try:
            with page_rows(database, seconds=_PAGE_SECONDS) as rows:
                own = rows.all(_RUNS)
            found += [(str(row["dir"]), row["name"], row["id"], database) for row in own]
        except StorageError as error:
            if len(databases) == 1:
                raise
            report(f"left out: {error}")
    # First those in the directory of their last start, then of their name: a copy must not take the address of a run.
    found.sort(key=lambda run: [name != run[3].parent.name for name in (os.path.basename(run[0]), run[1])])
    for _, name, id_, database in found:
        key = _free_key(name, database.parent.name, runs)
        runs[key] = Run(key=key, name=name, id=id_, database=database)
    if not runs:
        raise UsageError("the databases hold no run yet: start one with `tba run`")
    return list(runs.values())


def _free_key(name: str, directory: str, taken: Container[str]) -> str:
    """Return the part of an address for a run: its name, with its directory or a number if another run has that name.

    Both, in a file of other origin, may hold any character.
    """
    first, second = (re.sub(r"[^A-Za-z0-9._-]", "_", text).strip(".") or "run" for text in (name, directory))
    numbered = (f"{first}~{number}" for number in itertools.count(2))
    return next(key for key in itertools.chain([first, f"{first}~{second}"], numbered) if key not in taken)


def _databases(path: Path) -> list[Path]:
    """Return the database files that a path names: a file, a run directory, or a directory of run directories."""
    if path.is_file():
        return [path.resolve()]
    found = _databases_in(path)
    if not found:
        raise UsageError(
            f"{path} holds no {run_files.DATABASE}: name the directory of a run, a directory of such directories, or a "
            "database file"
        )
    return [database.resolve() for database in found]


def _databases_in(directory: Path) -> list[Path]:
    """Return the database of a run directory, or those of the run directories in it."""
    own = directory / run_files.DATABASE
    return [own] if own.is_file() else sorted(directory.glob(f"*/{run_files.DATABASE}"))
