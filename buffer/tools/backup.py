"""A copy of a buffer file while its server writes, by SQLite's backup API."""

import contextlib
import glob
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader
from tba.common.errors import StorageError, UsageError
from tba.common.system.durable import sync

# Pages copied between two progress reports.
_PAGES = 4096


def backup(source: Path, target: Path, *, force: bool, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Copy a database as it is now to one checked file. `progress` receives (bytes done, bytes in total).

    Raises UsageError if the target exists, StorageError if the copy cannot be written or fails its check.
    """
    check_target(source, target, force=force)
    with replacing(target) as temporary:
        try:
            pages = _copy(source, temporary, progress)
            with contextlib.closing(sqlite3.connect(temporary)) as copy:
                found = copy.execute("PRAGMA integrity_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise StorageError(f"the copy to {target} failed: {error}") from error
        if found != "ok":
            raise StorageError(f"the copy of {source} failed its integrity check and was deleted: {found}")
    return {"file": str(target), "bytes": target.stat().st_size, "pages": pages, "integrity": "ok"}


def check_target(source: Path, target: Path, *, force: bool) -> None:
    """Raise UsageError unless a file of this name may be written."""
    if target.exists() and source.exists() and target.samefile(source):
        raise UsageError(f"{target} is the database itself")
    if target.exists() and not force:
        raise UsageError(f"{target} exists: choose another name, or replace it with --force")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target.absolute().parent} is not a directory")


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. It becomes `target` once it is on disk, or is deleted if the block fails."""
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
    with open_reader(source) as connection:
        page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
        # With a read transaction the copy is of one moment. Without, a write by the server would restart it.
        connection.execute("BEGIN")
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()

        def report(_: int, remaining: int, total: int) -> None:
            progress((total - remaining) * page_bytes, total * page_bytes)

        with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as copy:
            try:
                connection.backup(copy, pages=_PAGES, progress=report)
                # Without WAL the file can be read anywhere, even in a read-only directory. A server switches back.
                copy.execute("PRAGMA journal_mode = DELETE")
                return int(copy.execute("PRAGMA page_count").fetchone()[0])
            except sqlite3.DatabaseError as error:
                raise StorageError(f"the copy of {source} could not be written: {error}") from error
