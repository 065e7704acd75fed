"""The database file: opened by one writer, checked, and closed in order, or abandoned after a failed sync."""

import contextlib
import ctypes
import functools
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tba.buffer.store import schema
from tba.buffer.store.storage_errors import refuse_strange_files, storage_errors
from tba.buffer.store.write_ahead_log import WriteAheadLog, abandon, open_connection
from tba.common import run_files
from tba.common.errors import StorageError, SyncFailed
from tba.common.system.durable import exclusive_lock, lock_bytes

_CACHE_KIB = 64 << 10
# Page size of a new database. A response of thousands of tokens needs half as many pages as with SQLite's default 4096.
_PAGE_BYTES = 8192
# A known database up to this size is checked at each start, which takes at most a second.
_CHECKED_BYTES = 128 << 20
# Beyond the largest database of SQLite (281 TB), and so beyond the bytes that it locks.
LOCKED_BYTE = 1 << 62
# Rows per INSERT: Python releases the interpreter lock once per statement instead of once per row. Few different sizes,
# so that the prepared statements stay in the cache.
_INSERT_SIZES = (256, 64, 16, 4, 1)
# Process-wide. For each value that is neither a number nor text, Python searches for an adapter, and without one asks
# the protocol and the value: 0.2 us each, for seven values of a trajectory. Registered adapters end the search at once.
sqlite3.register_adapter(memoryview, memoryview.toreadonly)
sqlite3.register_adapter(bytes, bytes)
sqlite3.register_adapter(type(None), lambda none: none)


class DatabaseFile:
    """One open database, made if the file is new. Not thread-safe, except for its `log`.

    Raises LockTaken if another process has the file open for writing, StorageError if it is not a usable database.
    """

    def __init__(self, path: Path, *, durability: str) -> None:
        # SQLite resolves links, too: its WAL is next to the file itself.
        try:
            self.path = path = path.resolve()
        # Of a link that leads to itself.
        except RuntimeError as error:
            raise StorageError(f"{path}: {error}") from error
        taken = f"a buffer server has {path} open: stop it, or name another database"
        self._resources = contextlib.ExitStack()
        try:
            with storage_errors(path):
                self._resources.enter_context(exclusive_lock(run_files.database_lock(path), taken))
                self._open(taken, durable=durability == "power")
        except SyncFailed:
            self._abandon()
            raise
        except BaseException:
            self._resources.close()
            raise

    def _open(self, taken: str, *, durable: bool) -> None:
        # Closed last: SQLite's POSIX locks belong to the process, which drops them when it closes any descriptor.
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._resources.callback(os.close, file)
        # The lock file is found by name: a hard link has another one, and it may have been deleted.
        lock_bytes(file, LOCKED_BYTE, 1, taken)
        _refuse_unusable(self.path)
        self._connection = self._resources.enter_context(open_connection(self.path))
        self._connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        # `WriteAheadLog.checkpoint` does it, in another thread.
        self._connection.execute("PRAGMA wal_autocheckpoint = 0")
        schema.create(self._connection)
        # A write, which also creates the WAL file.
        self._connection.execute(f"PRAGMA user_version = {_identity(self.path.stat())}")
        self.log = WriteAheadLog(self.path, file, durable=durable)
        self._resources.callback(self.log.close)

    def close(self) -> None:
        """Close the file. After a failed sync it stays open and locked until the process ends.

        Closing the last connection would make SQLite checkpoint and delete the WAL.
        """
        if self.log.failure is None:
            self._resources.close()
        else:
            self.log.keep_files()
            self._abandon()

    def _abandon(self) -> None:
        abandon(self.path)
        # One reference too many, so that not even the interpreter's shutdown closes the connections.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._resources))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the block's writes, or none of them. Raises StorageError if the disk fails."""
        with self.log.refuse_after_failure():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    # The first error says more than one of the rollback.
                    with contextlib.suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                raise

    @property
    def changes(self) -> int:
        """The number of rows that this connection has written or deleted."""
        return self._connection.total_changes

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement."""
        return self._connection.execute(statement, values)

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each row of values."""
        self._connection.executemany(statement, rows)

    def insert(self, table: str, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> None:
        """Insert rows, given as the names and values of their columns. A conflict rolls the transaction back.

        SQLite's default, ABORT, undoes a single statement, for which it copies every page that the statement changes.
        That doubles the bytes written, for nothing: a transaction is committed whole or rolled back whole.
        """
        rows, width, start = len(columns[0]), len(columns), 0
        # Otherwise rows would receive values of other rows.
        if any(len(column) != rows for column in columns):
            raise ValueError(f"columns of {table} are not equally long")
        for size in _INSERT_SIZES:
            while rows - start >= size:
                # The values row after row, as the statement expects them.
                values: list[Any] = [None] * (size * width)
                for position, column in enumerate(columns):
                    values[position::width] = column[start : start + size]
                self._connection.execute(_insert_statement(table, tuple(names), size), values)
                start += size

    def one(self, query: str, *values: Any) -> tuple[Any, ...]:
        """Return the first row."""
        with storage_errors(self.path):
            row: tuple[Any, ...] = self._connection.execute(query, values).fetchone()
        return row

    def all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows."""
        with storage_errors(self.path):
            return self._connection.execute(query, values).fetchall()

    def each(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Yield all rows, each read when it is requested."""
        with storage_errors(self.path):
            yield from self._connection.execute(query, values)

    def shrink(self) -> None:
        """Return free pages to the file system. Raises StorageError if the disk fails."""
        with self.log.refuse_after_failure():
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def size_bytes(self) -> int:
        """Return the size of the database and its WAL. Raises SyncFailed if either is not the file that was opened."""
        self.log.check_files()
        with storage_errors(self.path):
            return self.path.stat().st_size + run_files.write_ahead_log(self.path).stat().st_size

    def disk_space(self) -> tuple[int, int]:
        """Return the free and the total bytes of the disk that holds the database."""
        with storage_errors(self.path):
            usage = shutil.disk_usage(self.path.parent)
        return usage.free, usage.total


class Table:
    """Statements on one or two tables of a database."""

    def __init__(self, database: DatabaseFile) -> None:
        self._database = database


def _refuse_unusable(path: Path) -> None:
    """Raise StorageError for a damaged or foreign database, without changing it.

    The connection is read-only: one that may write would checkpoint the WAL into the file and delete it on close.
    """
    refuse_strange_files(path)
    # Only a writer can roll back a hot rollback journal, such as that of an interrupted "journal_mode = WAL".
    mode = "rw" if path.with_name(path.name + "-journal").exists() else "ro"
    with contextlib.closing(
        sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)
    ) as connection:
        # First, since the other check computes expressions of the schema.
        schema.is_new(path, connection)
        _refuse_damaged(path, connection)


def _refuse_damaged(path: Path, connection: sqlite3.Connection) -> None:
    """Raise StorageError for an inconsistent file, such as one that was copied while a server wrote to it.

    The check reads the whole file. A large file is checked only if it is a copy: the database stores its identity.
    """
    file = path.stat()
    is_known = connection.execute("PRAGMA user_version").fetchone()[0] == _identity(file)
    if is_known and file.st_size > _CHECKED_BYTES:
        return
    # quick_check misses one such copy in ten.
    found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise StorageError(
            f"{path} is damaged ({' '.join(found.split())}): was it copied while a server wrote to it? "
            "`tba buffer backup` makes consistent copies"
        )


def _identity(file: os.stat_result) -> int:
    """Return a number that a copy of the file does not share: the inode, cut to the 31 bits that SQLite stores."""
    return file.st_ino & 0x7FFFFFFF


@functools.cache
def _insert_statement(table: str, columns: tuple[str, ...], rows: int) -> str:
    row = f"({', '.join('?' * len(columns))})"
    return f"INSERT OR ROLLBACK INTO {table} ({', '.join(columns)}) VALUES {', '.join([row] * rows)}"  # noqa: S608
