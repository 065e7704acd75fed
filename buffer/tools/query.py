"""Read rows of a buffer file, for a user's SQL or for a page.

SQLite can crash or compute for minutes between two looks at the clock, in functions that no list names completely. So
the statement of a browser runs in another process (`query_process`), which the system ends at the limit. Statements of
tba itself, for a page, share a limit on their time.
"""

import contextlib
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tba.buffer.store.reader import open_reader, read_maps
from tba.buffer.tools import query_process
from tba.buffer.tools.query_process import QueryResult, reading_only
from tba.common.errors import UsageError
from tba.common.system.process import signal_name

# How long the process may take to start, in addition to the limit of the query.
_START_SECONDS = 60.0


@contextlib.contextmanager
def query(path: Path, sql: str) -> Iterator[tuple[list[str], sqlite3.Cursor]]:
    """Run one statement that reads: yield its column headings, and its rows, which are read when requested.

    Raises UsageError with SQLite's message if the statement is wrong, or if it would write.
    """
    with open_reader(path) as connection, reading_only(connection):
        cursor = connection.execute(sql)
        if cursor.description is None:
            raise UsageError("the statement returns no rows: a query is one SELECT")
        yield [column[0] for column in cursor.description], cursor


def limit_memory(path: Path) -> None:
    """Limit the memory of SQLite in this process. Raises UsageError or StorageError if the file is not a buffer."""
    with open_reader(path) as connection:
        connection.execute(query_process.LIMIT_HEAP)


def query_limited(path: Path, sql: str, *, rows: int, seconds: float) -> QueryResult:
    """Return the first rows of one statement that reads; `cut` of the result is a sentence if there are more.

    Raises UsageError for a wrong statement or one that needs too much; StorageError if it is no buffer.
    """
    with open_reader(path):
        pass
    command = [sys.executable, "-m", query_process.__name__, path.absolute().as_uri(), str(rows), str(seconds)]
    text, patience = sql.encode(errors="replace"), seconds + _START_SECONDS
    try:
        done = subprocess.run(command, input=text, capture_output=True, timeout=patience, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        code = -signal.SIGALRM
    else:
        code = done.returncode
    if code == 0:
        return msgspec.msgpack.decode(done.stdout, type=QueryResult)
    if code == query_process.REFUSED:
        raise UsageError(done.stdout.decode())
    if code in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        raise UsageError(f"the query takes longer than {seconds:g} s: read fewer rows")
    how = signal_name(-code) if code < 0 else f"exit code {code}"
    raise UsageError(f"the query ended SQLite with {how}: write it in another way")


# A check of the clock costs as much as about a hundred instructions.
_PROGRESS_INSTRUCTIONS = 10_000


class PageRows:
    """The rows of one buffer file, as maps by column name. Used in the thread that opened it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def all(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        return read_maps(self._connection, sql, *values)

    def first(self, sql: str, *values: Any) -> dict[str, Any] | None:
        """Return the first row of a statement, None if there is none."""
        return next(iter(self.all(sql, *values)), None)

    def value(self, sql: str, *values: Any) -> Any:
        """Return the first column of the first row, None if there is none."""
        row = self._connection.execute(sql, values).fetchone()
        return row[0] if row else None


@contextlib.contextmanager
def page_rows(path: Path, *, seconds: float) -> Iterator[PageRows]:
    """Open a buffer file for one page, whose statements together may take some seconds.

    Raises UsageError if they take longer or there is no file, StorageError if it is not a buffer of this release.
    """
    deadline = time.monotonic() + seconds
    with open_reader(path) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _PROGRESS_INSTRUCTIONS)
        try:
            yield PageRows(connection)
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_INTERRUPT:
                raise UsageError(f"{path} needs more than {seconds:g} s for this page: narrow the filter") from error
            raise
