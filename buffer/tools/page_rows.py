"""Read rows of a buffer file for a page: statements of tba itself, within a limit on their time."""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader, read_maps
from tba.common.errors import UsageError

# A check of the clock costs as much as about a hundred instructions.
_PROGRESS_INSTRUCTIONS = 10_000


class PageRows:
    """The rows of one buffer file, as maps by column name. Used in the thread that opened it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def all(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Return all rows of a statement."""
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
