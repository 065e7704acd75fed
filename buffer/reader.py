"""Reading a buffer file beside its server: nothing here can write, and nothing here holds the server up."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tba.buffer.schema import check_not_newer, schema_names
from tba.common.errors import StorageError, UsageError

_BUSY_MS = 10_000


@contextlib.contextmanager
def open_reader(path: Path, *, any_schema: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection that only reads. It sees what is committed, also while a server writes.

    Raises UsageError if there is no file; StorageError if it is no buffer database, if SQLite cannot read it
    where it lies, or if its schema is not this release's (an older one is let through by `any_schema`).
    """
    if not path.is_file():
        raise UsageError(
            f"{path} does not exist: name another file with --buffer or buffer.database, or start `tba buffer serve`"
        )
    with reading(path):
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        try:
            connection.execute("PRAGMA query_only = ON")
            connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
            _check_schema(path, applied_migrations(connection), any_schema=any_schema)
            yield connection
        finally:
            connection.close()


def applied_migrations(connection: sqlite3.Connection) -> set[str]:
    """Names of the migrations that a database has had; empty if it is none of ours."""
    tables = "SELECT 1 FROM sqlite_master WHERE name = '_sqlite_migrations'"
    if connection.execute(tables).fetchone() is None:
        return set()
    names = connection.execute("SELECT name FROM _sqlite_migrations WHERE migration_set = 'tba'")
    return {name for (name,) in names}


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what SQLite says of a file into one sentence."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise StorageError(_sentence(path, error)) from error


def _check_schema(path: Path, applied: set[str], *, any_schema: bool) -> None:
    if not applied:
        raise StorageError(f"{path} is not a buffer database: it has no tables of tba")
    check_not_newer(applied)
    if not any_schema and (missing := [name for name in schema_names() if name not in applied]):
        raise StorageError(
            f"{path} was written by an older release (it has no {missing[0]}): `tba buffer migrate` brings it up "
            "to date, and so does starting its server"
        )


def _sentence(path: Path, error: sqlite3.DatabaseError) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
        return (
            f"{path} cannot be read here ({error}): reading a database in WAL mode needs write access to its "
            f"directory, for {path.name}-shm. Copy {path.name}, and {path.name}-wal if there is one, to a directory of "
            "your own; or have its owner make a copy that needs none of that with `tba buffer backup`"
        )
    return f"{path} is not a readable buffer database: {error}"
