"""Convert errors of SQLite and the operating system into StorageError and SyncFailed.

A failed sync is an error of its own. The kernel forgets the pages that it could not write: the next sync succeeds, and
they are still not on the disk. So after a failed sync this process must not sync, checkpoint or acknowledge anything.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba.common.config import Config
from tba.common.errors import StorageError, SyncFailed

_FAILURES = "FULL IOERR BUSY LOCKED READONLY CORRUPT NOTADB CANTOPEN PERM NOMEM PROTOCOL"
_STORAGE_CODES = frozenset(getattr(sqlite3, f"SQLITE_{name}") for name in _FAILURES.split())

# The last bytes of a journal that ends with the name of a super-journal: those with which each journal begins.
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise StorageError for failures of disk or file, SyncFailed for a failed sync; other errors are bugs and pass."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        # Two errors have no code: misuse, which is a bug, and text that is not UTF-8, which is a damaged file.
        misused = isinstance(error, sqlite3.ProgrammingError)
        unknown = sqlite3.SQLITE_MISUSE if misused else sqlite3.SQLITE_CORRUPT
        code = getattr(error, "sqlite_errorcode", unknown)
        if code == sqlite3.SQLITE_IOERR_FSYNC:
            raise SyncFailed(
                f"the disk of {path} failed to write data ({error}): nothing more is acknowledged. Check the disk, "
                f"keep {path.name}-wal next to {path.name}, end every program that has it open, and start again: "
                "that file has all that was acknowledged, and the start writes it to the disk again"
            ) from error
        if code & 0xFF not in _STORAGE_CODES:
            raise
        raise StorageError(f"{path}: {error}") from error
    except OSError as error:
        raise StorageError(f"{path}: {error}") from error


def refuse_strange_files(database: Path) -> None:
    """Raise StorageError if SQLite would wait for a file next to a database, or write to or delete a file elsewhere.

    SQLite opens a FIFO, follows a link, and deletes the super-journal that a journal names after it has rolled it back,
    which may be any file of the user. tba never leaves any of these.
    """
    for ending in ("-wal", "-shm", "-journal"):
        path = database.resolve()
        path = path.with_name(path.name + ending)
        # SQLite refuses a directory itself.
        if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
            raise StorageError(f"{path} is no regular file, and SQLite would open it with the database: remove it")
        if ending == "-journal" and path.exists() and _last_bytes(path, len(_SUPER_JOURNAL)) == _SUPER_JOURNAL:
            raise StorageError(
                f"{path} names another journal, which SQLite would delete: it is not of tba; remove it, or restore a "
                "backup"
            )


def _last_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - count))
        return file.read(count)


def stored_object(text: str | None) -> dict[str, Any]:
    """Decode a JSON object that a database holds, {} for NULL or "". Raises StorageError for other content."""
    found = _stored(text or "{}")
    if not isinstance(found, dict):
        raise StorageError(f"a value of the database is not a JSON object: {text!r:.80}")
    return found


def stored_list(text: str) -> list[dict[str, Any]]:
    """Decode a JSON list of objects that a database holds. Raises StorageError for other content."""
    found = _stored(text)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise StorageError(f"a value of the database is not a JSON list of objects: {text!r:.80}")
    return found


def _stored(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise StorageError(f"a value of the database is not JSON ({error}): {text!r:.80}") from error


def stored_config(text: str | None) -> dict[str, Any]:
    """Decode the configuration of a start, as `stored_object`. Raises StorageError also if a section is no object."""
    sections = stored_object(text)
    if wrong := [name for name in Config.model_fields if not isinstance(sections.get(name, {}), dict)]:
        raise StorageError(f"the configuration that the database holds has no section {wrong[0]}, but a value")
    return sections
