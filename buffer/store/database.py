"""The database file: opened by one writer, checked, and closed in order, or left open after a failed sync.

Invariant: a transaction is on the disk when it has committed (`synchronous = FULL`). A sync that fails is the last
thing that this process does (`storage_errors`).
"""

import contextlib
import ctypes
import functools
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tba.buffer.store import schema
from tba.buffer.store.storage_errors import refuse_strange_files, storage_errors
from tba.common import run_files
from tba.common.errors import StorageError, SyncFailed
from tba.common.log import get_logger
from tba.common.system import durable

log = get_logger(__name__)

_CACHE_KIB = 64 << 10
# Page size of a new database. A response of thousands of tokens needs half as many pages as with SQLite's default 4096.
_PAGE_BYTES = 8192
# A known database up to this size is checked at each start, which takes at most a second.
_CHECKED_BYTES = 128 << 20
# As much in the WAL is worth a checkpoint: twice as much takes twice as long, and a status waits for it.
_CHECKPOINT_BYTES = 4 << 20
# Approximate bytes that a transaction adds to the WAL for pages of tables and indexes, and for each row that it changes
# without its blobs. Measured.
_TRANSACTION_BYTES, _ROW_BYTES = 32 << 10, 512
# Longest wait for a lock of another program.
_BUSY_SECONDS = 10.0
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
    """One open database, made if the file is new. Not thread-safe.

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
        self.failure: SyncFailed | None = None
        # Approximate bytes in the WAL since the last checkpoint, and those of blobs since the last commit.
        self.written = self._blob_bytes = 0
        self._resources = contextlib.ExitStack()
        try:
            with storage_errors(path):
                self._resources.enter_context(durable.exclusive_lock(run_files.database_lock(path), taken))
                self._open(taken, "FULL" if durability == "power" else "NORMAL")
        except SyncFailed:
            self._abandon()
            raise
        except BaseException:
            self._resources.close()
            raise

    def _open(self, taken: str, synchronous: str) -> None:
        # Closed last: SQLite's POSIX locks belong to the process, which drops them when it closes any descriptor.
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._resources.callback(os.close, file)
        # The lock file is found by name: a hard link has another one, and it may have been deleted.
        durable.lock_bytes(file, LOCKED_BYTE, 1, taken)
        _refuse_unusable(self.path)
        self._connection = connection = sqlite3.connect(
            self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, uri=True
        )
        self._resources.callback(connection.close)
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        # `checkpoint` calls for it: SQLite's own call ignores a sync that fails.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        schema.create(connection)
        # A write, which also creates the WAL file.
        connection.execute(f"PRAGMA user_version = {_identity(self.path.stat())}")
        self._files = _OpenFiles(self.path, file)
        self._resources.callback(self._files.close)
        # A process that was killed leaves pages in the kernel's cache that the disk may lack. SQLite reads them as
        # committed, so a trajectory that comes again would be acknowledged as a duplicate.
        busy, *_ = connection.execute("PRAGMA main.wal_checkpoint(FULL)").fetchone()
        if busy:
            log.warning(
                "another program reads the database: what a crash left in its log is written to the database later",
                database=str(self.path),
            )
        durable.sync(self.path.parent)

    def close(self) -> None:
        """Close the file. After a failed sync it stays open and locked: SQLite's close would checkpoint the WAL."""
        if self.failure is None:
            self._resources.close()
        else:
            # At once, since a copy of a large database takes minutes.
            log.error("the database is closed", reason=str(self.failure))
            self._files.keep()
            self._abandon()

    def _abandon(self) -> None:
        # One reference too many, so that not even the interpreter's shutdown closes the connections.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._resources))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the block's writes, or none of them. Raises StorageError if the disk fails.

        Raises SyncFailed if it lost data, or if the database or its WAL is not the file that was opened.
        """
        self.checkpoint()
        before = self._connection.total_changes
        with self._final_failures():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
                self._files.check()
            except BaseException:
                if self._connection.in_transaction:
                    # The first error says more than one of the rollback.
                    with contextlib.suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                raise
        blob_bytes, self._blob_bytes = self._blob_bytes, 0
        if changed := self._connection.total_changes - before:
            self.written += _TRANSACTION_BYTES + _ROW_BYTES * changed + blob_bytes

    @contextlib.contextmanager
    def _final_failures(self) -> Iterator[None]:
        """Wrap every operation that may sync: none starts after a failed one. Raises StorageError, or SyncFailed."""
        if self.failure is not None:
            raise self.failure
        try:
            try:
                with storage_errors(self.path):
                    yield
            except StorageError:
                # In a directory that is gone no space is free, for example: then the cause is told, and no more tried.
                with storage_errors(self.path):
                    self._files.check()
                raise
        except SyncFailed as error:
            self.failure = error
            raise

    def checkpoint(self) -> None:
        """Checkpoint a WAL that has grown by much, as `transaction` does first. Without space a warning is logged."""
        if self.written <= _CHECKPOINT_BYTES:
            return
        self.written = 0
        try:
            with self._final_failures():
                self._connection.execute("PRAGMA main.wal_checkpoint(PASSIVE)").fetchone()
        except SyncFailed:
            raise
        except StorageError as error:
            log.warning("checkpoint failed", reason=str(error))

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement."""
        return self._connection.execute(statement, values)

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each row of values."""
        self._blob_bytes += sum(len(value) for row in rows for value in row if isinstance(value, bytes))
        self._connection.executemany(statement, rows)

    def insert(self, table: str, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> None:
        """Insert rows, given as the names and values of their columns. A conflict rolls the transaction back.

        SQLite's default, ABORT, would copy every page that the statement changes, to undo it alone.
        """
        rows, start = len(columns[0]), 0
        # Rows would receive values of other rows.
        if any(len(column) != rows for column in columns):
            raise ValueError(f"columns of {table} are not equally long")
        for column in columns:
            if rows and isinstance(column[0], bytes | memoryview):
                self._blob_bytes += sum(map(len, column))
        for size in _INSERT_SIZES:
            while rows - start >= size:
                # The values row after row, as the statement expects them.
                values: list[Any] = [None] * (size * len(columns))
                for position, column in enumerate(columns):
                    values[position :: len(columns)] = column[start : start + size]
                self._connection.execute(_insert_statement(table, tuple(names), size), values)
                start += size

    def one(self, query: str, *values: Any) -> tuple[Any, ...]:
        """Return the first row."""
        return self.all(query, *values)[0]

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
        with self._final_failures():
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA main.wal_checkpoint(TRUNCATE)")

    def size_bytes(self) -> int:
        """Return the size of the database and its WAL. Raises SyncFailed if either is not the file that was opened."""
        with self._final_failures():
            self._files.check()
            return self.path.stat().st_size + run_files.write_ahead_log(self.path).stat().st_size

    def disk_space(self) -> tuple[int, int]:
        """Return the free and the total bytes of the disk that holds the database. Raises as `size_bytes`."""
        with self._final_failures():
            usage = shutil.disk_usage(self.path.parent)
        return usage.free, usage.total


class _OpenFiles:
    """The database at `path`, whose file descriptor is `file`, with its WAL and its index, as they were opened.

    SQLite goes on with open files that were deleted, moved or replaced, which no later start would find.
    """

    def __init__(self, path: Path, file: int) -> None:
        self._path = path
        self._file = file
        self._log = os.open(run_files.write_ahead_log(path), os.O_RDWR)
        # By name, since closing a descriptor of the last one would drop SQLite's locks.
        names = (path, run_files.write_ahead_log(path), path.with_name(path.name + "-shm"))
        self._identities = {name: _file_identity(name) for name in names}

    def close(self) -> None:
        """Close the WAL."""
        os.close(self._log)

    def check(self) -> None:
        """Raise SyncFailed if one of the files is not the one that was opened."""
        for path, identity in self._identities.items():
            if (found := _file_identity(path)) != identity:
                what = "replaced by another file" if found else "deleted or moved"
                raise SyncFailed(f"{path} was {what} while it was open: nothing more is acknowledged")

    def keep(self) -> None:
        """Give what is open a name again if it has none, or leads into another file.

        A replaced database and its WAL become `NAME.replaced-TIME`, since that WAL would damage the other file.
        """
        database, wal = self._path, run_files.write_ahead_log(self._path)
        base = database
        if _file_identity(database) not in (None, self._identities[database]):
            base = database.with_name(f"{database.name}.replaced-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        for file, name, kept in ((self._file, database, base), (self._log, wal, Path(f"{base}-wal"))):
            try:
                if name != kept and _file_identity(name) == self._identities[name]:
                    name.rename(kept)
                elif not os.fstat(file).st_nlink:
                    # The whole directory may have been deleted.
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    durable.copy_file(Path(f"/proc/self/fd/{file}"), kept)
                    durable.sync(kept)
                else:
                    continue
                log.warning("kept what was acknowledged", file=str(kept))
            except OSError as error:
                log.error("what was acknowledged is lost", file=str(kept), reason=str(error))


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


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one of its name; None if there is none."""
    try:
        found = path.stat()
    # The second one if its directory was replaced by a file.
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


@functools.cache
def _insert_statement(table: str, names: tuple[str, ...], rows: int) -> str:
    row = f"({', '.join('?' * len(names))})"
    return f"INSERT OR ROLLBACK INTO {table} ({', '.join(names)}) VALUES {', '.join([row] * rows)}"  # noqa: S608
