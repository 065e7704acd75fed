"""What SQLite and the operating system say of a database file, as the errors of this project.

A sync that failed is an error of its own. The kernel forgets what it could not write: the next sync succeeds, and the
pages are still not on the disk. So nothing may be synced, copied or acknowledged after it by this process.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tba.common.errors import StorageError, SyncFailed

_STORAGE_CODES = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PROTOCOL,
    }
)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise StorageError for what is the disk's or the file's fault, SyncFailed for a sync that SQLite made.

    What is ours passes as it is.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        # What is not the disk's fault is a bug of ours, and must not be tried again for ever. Without a code come
        # misuse, which is such a bug, and text that cannot be decoded, which is not.
        misused = isinstance(error, sqlite3.ProgrammingError)
        unknown = sqlite3.SQLITE_MISUSE if misused else sqlite3.SQLITE_CORRUPT
        code = getattr(error, "sqlite_errorcode", unknown)
        if code == sqlite3.SQLITE_IOERR_FSYNC:
            raise _sync_failed(path, str(error)) from error
        if code & 0xFF not in _STORAGE_CODES:
            raise
        raise StorageError(f"{path}: {error}") from error
    except OSError as error:
        raise StorageError(f"{path}: {error}") from error


def sync_file(file: int, database: Path) -> None:
    """Wait until all of a file of this database is on the disk. Raises SyncFailed."""
    try:
        os.fdatasync(file)
    except OSError as error:
        raise _sync_failed(database, error.strerror or str(error)) from error


def _sync_failed(database: Path, reason: str) -> SyncFailed:
    return SyncFailed(
        f"the disk of {database} failed to take what was written there ({reason}): nothing more is acknowledged. Check "
        f"the disk, keep {database.name}-wal beside {database.name}, and start again: what was acknowledged is in that "
        "log, and is written anew"
    )
