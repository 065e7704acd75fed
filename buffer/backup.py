"""A copy of a buffer file while its server writes, by SQLite's backup API."""

import contextlib
import glob
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tba.buffer.reader import open_reader
from tba.common.durable import sync
from tba.common.errors import StorageError, UsageError

_PAGES = 4096  # copied between two reports of progress: 16 MiB of the usual pages


def backup(source: Path, target: Path, *, force: bool, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Copy a database as it is now; the copy is one file, checked, and gets its name when it is on disk.

    `progress` hears (bytes done, bytes in all). Raises UsageError if the target is there already,
    StorageError if the copy cannot be written or is not sound.
    """
    check_target(source, target, force=force)
    with replacing(target) as temporary:
        try:
            pages = _copy(source, temporary, progress)
            said = _integrity(temporary)
        except sqlite3.DatabaseError as error:
            raise StorageError(f"the copy to {target} failed: {error}") from error
        if said != "ok":
            raise StorageError(f"the copy of {source} is not sound, and was deleted: {said}")
    return {"file": str(target), "bytes": target.stat().st_size, "pages": pages, "integrity": "ok"}


def check_target(source: Path, target: Path, *, force: bool) -> None:
    """Raise UsageError unless a file of this name may be written."""
    if target.exists() and source.exists() and target.samefile(source):
        raise UsageError(f"{target} is the database itself")
    if target.exists() and not force:
        raise UsageError(f"{target} exists: choose another name, or replace it with --force")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target.absolute().parent} is no directory")


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary name to write to; it becomes `target` once it is on disk, or is deleted if the block fails."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(target)
        sync(target.absolute().parent)
    except OSError as error:
        raise StorageError(f"{target}: {error}") from error
    finally:
        for leftover in temporary.parent.glob(f"{glob.escape(temporary.name)}*"):
            leftover.unlink()


def _copy(source: Path, temporary: Path, progress: Callable[[int, int], None]) -> int:
    with open_reader(source, any_schema=True) as connection:
        page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
        # Within one read transaction the copy is of one moment, and writes do not make it start again.
        connection.execute("BEGIN")
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()

        def report(_: int, remaining: int, total: int) -> None:
            progress((total - remaining) * page_bytes, total * page_bytes)

        copy = sqlite3.connect(temporary, isolation_level=None)
        try:
            connection.backup(copy, pages=_PAGES, progress=report)
            # One file that can be read anywhere, also from a read-only directory; a server makes it WAL again.
            copy.execute("PRAGMA journal_mode = DELETE")
            return int(copy.execute("PRAGMA page_count").fetchone()[0])
        except sqlite3.DatabaseError as error:
            raise StorageError(f"the copy of {source} could not be written: {error}") from error
        finally:
            copy.close()


def _integrity(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        return str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
    finally:
        connection.close()
