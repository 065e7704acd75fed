"""What SQLite and the operating system say of a database file, as the errors of this project."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tba.common.errors import StorageError

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
    }
)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise StorageError for what is the disk's or the file's fault; what is ours passes as it is."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        # What is not the disk's fault is a bug of ours, and must not be tried again for ever. Without a code come
        # misuse, which is such a bug, and text that cannot be decoded, which is not.
        misused = isinstance(error, sqlite3.ProgrammingError)
        unknown = sqlite3.SQLITE_MISUSE if misused else sqlite3.SQLITE_CORRUPT
        if getattr(error, "sqlite_errorcode", unknown) & 0xFF not in _STORAGE_CODES:
            raise
        raise StorageError(f"{path}: {error}") from error
    except OSError as error:
        raise StorageError(f"{path}: {error}") from error
