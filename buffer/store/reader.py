"""Read a buffer file while its server runs: a reader cannot write, and does not block the server."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba.buffer.store.schema import is_new
from tba.buffer.store.storage_errors import refuse_strange_files
from tba.common.errors import StorageError, UsageError

_BUSY_MS = 10_000


@contextlib.contextmanager
def open_reader(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection, which sees committed data only, also while a server writes.

    Raises UsageError if there is no file, StorageError if it is no buffer of this release or cannot be read.
    """
    if not path.is_file():
        raise UsageError(
            f"{path} does not exist: name another file with --buffer or buffer.database, or start `tba buffer serve`"
        )
    refuse_strange_files(path)
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
            connection.execute("PRAGMA query_only = ON")
            connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
            if is_new(path, connection):
                raise StorageError(f"{path} is not a buffer database: it has no tables of tba")
            yield connection
    except sqlite3.DatabaseError as error:
        raise StorageError(_sentence(path, error)) from error


def read_maps(connection: sqlite3.Connection, sql: str, *values: Any) -> list[dict[str, Any]]:
    """Return all rows of a statement as maps by column name."""
    cursor = connection.execute(sql, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _sentence(path: Path, error: sqlite3.DatabaseError) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
        return (
            f"{path} cannot be read here ({error}): reading a database in WAL mode needs write access to its "
            f"directory, for {path.name}-shm. Copy {path.name}, and {path.name}-wal if it exists, to a directory of "
            "your own, or ask the owner for a copy made by `tba buffer backup`, which can be read anywhere"
        )
    return f"{path} is not a readable buffer database: {error}"
