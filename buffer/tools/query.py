"""Run a user's SQL on a buffer file: one read-only statement, whose rows are streamed."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader
from tba.buffer.tools.reading_only import reading_only
from tba.common.errors import UsageError


@contextlib.contextmanager
def query(path: Path, sql: str, parameters: Sequence[Any] = ()) -> Iterator[tuple[list[str], sqlite3.Cursor]]:
    """Run one statement that reads: yield its column headings, and its rows, which are read when requested.

    Raises UsageError with SQLite's message if the statement is wrong, or if it would write.
    """
    with open_reader(path) as connection, reading_only(connection):
        cursor = connection.execute(sql, parameters)
        if cursor.description is None:
            raise UsageError("the statement returns no rows: a query is one SELECT")
        yield [column[0] for column in cursor.description], cursor
