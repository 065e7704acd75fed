"""The database file: opened by one writer, checked, and left in order; or, after a failed sync, as it is."""

import contextlib
import ctypes
import functools
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from tba.buffer.reader import applied_migrations
from tba.buffer.schema import check_not_newer, migrate
from tba.buffer.storage_errors import storage_errors
from tba.buffer.write_ahead_log import WriteAheadLog, leave, open_connection
from tba.common.durable import exclusive_lock
from tba.common.errors import StorageError, SyncFailed

_CACHE_KIB = 64 << 10
# Of a new database. A response of thousands of tokens takes half as many pages as with SQLite's own 4096.
_PAGE_BYTES = 8192
_CHECKED_BYTES = 1 << 30  # two or three seconds
# Rows in one INSERT: Python hands the interpreter lock to SQLite once for all of them, not once for each. Few
# sizes, so that the prepared statements stay in the cache.
_INSERT_SIZES = (256, 64, 16, 4, 1)
# For the whole process. Python looks for a way to convert each value that is no number and no text; with none
# registered it asks the protocol and the value for one, in vain: 0.2 us, for the seven such values of a trajectory.
sqlite3.register_adapter(memoryview, memoryview.toreadonly)
sqlite3.register_adapter(bytes, bytes)
sqlite3.register_adapter(type(None), lambda none: none)


class DatabaseFile:
    """One open database with the newest schema. Not thread-safe; but its `log` is.

    Raises LockTaken if another server has the file, StorageError if it is not a usable database.
    """

    def __init__(self, path: Path, *, durability: str) -> None:
        self.path = path
        taken = f"a buffer server has {path} open: stop that, or name another database"
        self._resources = contextlib.ExitStack()
        try:
            with storage_errors(path):
                self._resources.enter_context(exclusive_lock(path.with_name(path.name + ".lock"), taken))
                self._open(durable=durability == "power")
        except SyncFailed:
            self._leave()
            raise
        except BaseException:
            self._resources.close()
            raise

    def _open(self, *, durable: bool) -> None:
        # Closed last: SQLite's locks are the process's, and go with any descriptor of the file.
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._resources.callback(os.close, file)
        _refuse_unusable(self.path)
        self._connection = self._resources.enter_context(open_connection(self.path))
        self._connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._connection.execute("PRAGMA wal_autocheckpoint = 0")  # `WriteAheadLog.copy` does it
        migrate(Database(self._connection))
        # This writes, and so makes the log.
        self._connection.execute(f"PRAGMA user_version = {_identity(self.path.stat())}")
        self.log = self._resources.enter_context(WriteAheadLog(self.path, file, durable=durable))

    def close(self) -> None:
        """Close the file; what was committed stays.

        After a failed sync it is left open until the process ends, and the lock held: SQLite copies the log when the
        last connection closes, and would delete it.
        """
        if self.log.failure is None:
            self._resources.close()
        else:
            self._leave()

    def _leave(self) -> None:
        leave(self.path)
        # Never closed, not even when the interpreter ends, which closes all that it can still reach or count.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._resources))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit at the end, or nothing at all. Raises StorageError if the disk refuses."""
        with self.log.unless_failed():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    with contextlib.suppress(sqlite3.Error):  # what was raised says more
                        self._connection.execute("ROLLBACK")
                raise

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement."""
        return self._connection.execute(statement, values)

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each of these values."""
        self._connection.executemany(statement, rows)

    def insert(self, conflict: str, table: str, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> None:
        """Insert many rows at once: of each column its name and its values.

        What SQLite does by itself in a conflict, ABORT, undoes one statement: for that it would copy every page that
        the statement touches, as many bytes as it writes. A transaction here holds whole or not at all anyway.
        """
        rows, width, start = len(columns[0]), len(columns), 0
        if any(len(column) != rows for column in columns):  # else rows would get values of others
            raise ValueError(f"columns of {table} are not equally long")
        for size in _INSERT_SIZES:
            while rows - start >= size:
                values: list[Any] = [None] * (size * width)  # row after row
                for place, column in enumerate(columns):
                    values[place::width] = column[start : start + size]
                self._connection.execute(_insert_statement(table, tuple(names), size, conflict), values)
                start += size

    def one(self, query: str, *values: Any) -> tuple[Any, ...]:
        """The first row."""
        with storage_errors(self.path):
            row: tuple[Any, ...] = self._connection.execute(query, values).fetchone()
        return row

    def all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows."""
        with storage_errors(self.path):
            return self._connection.execute(query, values).fetchall()

    def each(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """All rows, read one after the other."""
        with storage_errors(self.path):
            yield from self._connection.execute(query, values)

    def shrink(self) -> None:
        """Give free pages back to the file system. Raises StorageError if the disk refuses."""
        with self.log.unless_failed():
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def size_bytes(self) -> int:
        """Size of the database with its write-ahead log."""
        wal = self.path.with_name(self.path.name + "-wal")
        return self.path.stat().st_size + (wal.stat().st_size if wal.exists() else 0)

    def free_bytes(self) -> int:
        """Free space of the disk that holds the database."""
        with storage_errors(self.path):
            return shutil.disk_usage(self.path.parent).free


def _refuse_unusable(path: Path) -> None:
    """Raise StorageError for a database that is not for us, before anything is written or copied there.

    A connection that may write would copy the log into the file when it closes, and delete it.
    """
    # Only a writer can undo what another began without a log, such as the very first statement here.
    mode = "rw" if path.with_name(path.name + "-journal").exists() else "ro"
    with contextlib.closing(
        sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)
    ) as connection:
        _refuse_damaged(path, connection)
        _refuse_foreign(path, connection)
        check_not_newer(applied_migrations(connection))


def _refuse_damaged(path: Path, connection: sqlite3.Connection) -> None:
    """Raise StorageError for a file that was copied while a server wrote to it: its parts are of different times.

    The database knows which file it is, so that a large one is read through only when it is new here.
    """
    file = path.stat()
    is_known = connection.execute("PRAGMA user_version").fetchone()[0] == _identity(file)
    if is_known and file.st_size > _CHECKED_BYTES:
        return
    found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]  # quick_check misses one such copy in ten
    if found != "ok":
        raise StorageError(
            f"{path} is damaged ({' '.join(found.split())}): was it copied while a server wrote to it? "
            "`tba buffer backup` makes copies that are whole"
        )


def _refuse_foreign(path: Path, connection: sqlite3.Connection) -> None:
    """Raise StorageError for the database of another program."""
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    names = {name for (name,) in connection.execute(tables)} - {"_sqlite_migrations"}
    if names and not applied_migrations(connection):
        raise StorageError(
            f"{path} is the database of another program, with tables such as {min(names)}: choose another file name "
            "for buffer.database"
        )


def _identity(file: os.stat_result) -> int:
    """A number that a copy of the file does not have, as large as SQLite has room for."""
    return file.st_ino & 0x7FFFFFFF


@functools.cache
def _insert_statement(table: str, columns: tuple[str, ...], rows: int, conflict: str) -> str:
    row = f"({', '.join('?' * len(columns))})"
    return f"INSERT {conflict} INTO {table} ({', '.join(columns)}) VALUES {', '.join([row] * rows)}"  # noqa: S608
