"""Read a buffer file while its server runs: a reader cannot write, and does not block the server."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tba.buffer.store.schema import applied_migrations, check_schema, schema_names
from tba.buffer.store.storage_errors import refuse_strange_files
from tba.common.errors import StorageError, UsageError

_BUSY_MS = 10_000


@contextlib.contextmanager
def open_reader(path: Path, *, any_schema: bool = False) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection. It sees committed data only, also while a server writes.

    Raises UsageError if there is no file; StorageError if it is not a buffer database, if SQLite cannot read it in its
    directory, or if its schema is not that of this release. `any_schema` allows an older schema.
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
            _check_schema(path, connection, any_schema=any_schema)
            yield connection
    except sqlite3.DatabaseError as error:
        raise StorageError(_sentence(path, error)) from error


def _check_schema(path: Path, connection: sqlite3.Connection, *, any_schema: bool) -> None:
    applied = applied_migrations(connection)
    if not applied:
        raise StorageError(f"{path} is not a buffer database: it has no tables of tba")
    check_schema(path, connection)
    if not any_schema and (missing := [name for name in schema_names() if name not in applied]):
        raise StorageError(
            f"{path} was written by an older release (it lacks migration {missing[0]}): run `tba buffer migrate`, or "
            "start its server, which migrates it"
        )


def _sentence(path: Path, error: sqlite3.DatabaseError) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
        return (
            f"{path} cannot be read here ({error}): reading a database in WAL mode needs write access to its "
            f"directory, for {path.name}-shm. Copy {path.name}, and {path.name}-wal if it exists, to a directory of "
            "your own, or ask the owner for a copy made by `tba buffer backup`, which can be read anywhere"
        )
    return f"{path} is not a readable buffer database: {error}"
