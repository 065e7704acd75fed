"""Put a backup in the place of a buffer file.

SQLite finds the write-ahead log by its name and applies it to whatever file has the database's name: a log that is left
behind undoes the restore. And a program that has the replaced file open deletes the log by name when it ends, which
would be the one of the restored file. So the log moves with its file, and no program may have that open.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tba.buffer.store.database import LOCKED_BYTE
from tba.buffer.store.reader import open_reader
from tba.buffer.store.schema import is_new
from tba.buffer.store.storage_errors import storage_errors
from tba.buffer.tools.backup import backup
from tba.common import run_files
from tba.common.errors import StorageError, UsageError
from tba.common.system.durable import exclusive_lock, link_or_copy, lock_bytes, sync

# Bytes that every connection to a database locks for reading while it is open: SHARED_FIRST and SHARED_SIZE of
# https://www.sqlite.org/src/file/src/os.h.
_SQLITE_SHARED = (0x40000002, 510)
# What SQLite applies to the file, and then its index of the log, which it makes again.
_LOGS, _INDEX = ("-wal", "-journal"), "-shm"


def restore(source: Path, target: Path, *, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Replace a database by a checked copy of another one. What was there is kept as `NAME.replaced-TIME`.

    Raises UsageError if the backup is the database itself or holds other runs; LockTaken if a server or another program
    has the database open; StorageError if the backup is damaged or the disk fails.
    """
    target = target.resolve()
    if target.exists() and source.exists() and target.samefile(source):
        raise UsageError(f"{source} is the database itself: name a backup of it")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a directory: create it, or name another file with --to")
    with storage_errors(target), _sole_user(target):
        _refuse_other_runs(source, target)
        copy = target.with_name(f"{target.name}.restoring")
        done = backup(source, copy, force=True, progress=progress)
        replaced = _set_aside(target)
        copy.replace(target)
        sync(target.parent)
    return {"file": str(target), "bytes": done["bytes"], "replaced": None if replaced is None else str(replaced)}


@contextlib.contextmanager
def _sole_user(target: Path) -> Iterator[None]:
    """Exclude a server, and refuse if any program has the database open. Raises LockTaken."""
    served = f"a buffer server has {target} open: stop it first"
    with contextlib.ExitStack() as held:
        held.enter_context(exclusive_lock(run_files.database_lock(target), served))
        if target.exists():
            file = os.open(target, os.O_RDWR)
            held.callback(os.close, file)
            lock_bytes(file, LOCKED_BYTE, 1, served)
            reading = f"another program has {target} open, such as `tba buffer tail` or Datasette: end it first"
            lock_bytes(file, *_SQLITE_SHARED, reading)
        yield


def _refuse_other_runs(source: Path, target: Path) -> None:
    """Raise UsageError if the database to replace holds a run that the backup does not.

    A database that cannot be read is replaced: that is what backups are for.
    """
    names = "SELECT uuid, name FROM runs"
    with open_reader(source) as connection:
        restored = dict(connection.execute(names))
    if not target.exists():
        return
    unreadable = contextlib.suppress(sqlite3.DatabaseError, StorageError)
    with unreadable, contextlib.closing(_as_it_is(target)) as connection:
        is_new(target, connection)
        lost = [name for uuid, name in connection.execute(names) if uuid not in restored]
        if lost:
            raise UsageError(
                f"{target} holds run {lost[0]}, which {source} does not: name the file to replace with --to, or move "
                f"{target.name} and its -wal away"
            )


def _as_it_is(path: Path) -> sqlite3.Connection:
    """Open the file alone, without its log: this process holds locks on it, and must not change or check it."""
    return sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)


def _set_aside(target: Path) -> Path | None:
    """Give the file and its log another name, together. Returns it, or None if there is neither.

    Both have the new name before the first loses the old one, so that an interruption leaves a complete pair.
    """
    replaced = target.with_name(f"{target.name}.replaced-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    found = [suffix for suffix in ("", *_LOGS) if Path(f"{target}{suffix}").exists()]
    for suffix in found:
        link_or_copy(Path(f"{target}{suffix}"), Path(f"{replaced}{suffix}"))
    sync(target.parent)
    for suffix in (*_LOGS, _INDEX):
        Path(f"{target}{suffix}").unlink(missing_ok=True)
    return replaced if found else None
