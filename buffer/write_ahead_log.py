"""SQLite's write-ahead log of a database that one connection writes: synced and copied beside it, by other threads.

    writer ──COMMIT──► log ──copy──► database file
                        └─ sync: what is committed is on the disk

SQLite writes the log from its beginning again once all of it is copied, which under load never comes about by itself:
then `finish` copies the rest while writing is held back.
"""

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from types import TracebackType

from tba.buffer.storage_errors import storage_errors

_LONG_BYTES = 8 << 20
_VERY_LONG_BYTES = 16 << 20
_FINISH_ROUNDS = 4
_COPY_SECONDS = 60.0  # what is no trajectory is not counted: batches, leases, reports


class WriteAheadLog:
    """The log of the database at `path`, whose descriptor is `file`. It is there while its writer has it open.

    `sync` and `copy` may be called by two threads, while a third writes and counts in `written` what it wrote. All
    raise StorageError.
    """

    def __init__(self, path: Path, file: int, *, durable: bool) -> None:
        self._path = path
        self._file = file
        self._durable = durable
        self.written = 0  # bytes, roughly
        self._copied = 0  # of those, when they were last copied
        self._copied_at = time.monotonic()
        with contextlib.ExitStack() as resources:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            resources.callback(self._connection.close)
            self._page_bytes = int(self._connection.execute("PRAGMA page_size").fetchone()[0])
            self._log = os.open(path.with_name(path.name + "-wal"), os.O_RDONLY)
            resources.callback(os.close, self._log)
            self._resources = resources.pop_all()

    def __enter__(self) -> "WriteAheadLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def sync(self) -> None:
        """Make all that is committed survive a power cut, unless `durable` is False.

        SQLite itself syncs the log only before a checkpoint (synchronous=NORMAL); with this after a commit, and
        before its acknowledgement, the guarantee is that of synchronous=FULL. After an error what the disk holds is
        unknown, and the server must not go on.
        """
        if self._durable:
            with storage_errors(self._path):
                os.fdatasync(self._log)

    def copy(self) -> bool:
        """Copy what is in the log into the database file, if that is long, or a minute ago. True if `finish` is due."""
        written, now = self.written, time.monotonic()
        if written - self._copied <= _LONG_BYTES and now - self._copied_at < _COPY_SECONDS:
            return False
        self._copied, self._copied_at = written, now
        with storage_errors(self._path):
            frames, _ = self._checkpoint()
            if frames * self._page_bytes <= _VERY_LONG_BYTES:
                return False
            os.fdatasync(self._file)  # else `finish` would do this, and more of the copying, with everybody waiting
            frames, copied = self._checkpoint()
        return (frames - copied) * self._page_bytes <= _LONG_BYTES  # else a reader holds it

    def finish(self) -> None:
        """Copy all of the log. Whoever calls sees to it that next to nothing is written meanwhile.

        A reader that still needs the log keeps it from being written anew: then it grows on, until the next time.
        The file keeps its length: blocks that are there already are synced faster than new ones.
        """
        with storage_errors(self._path):
            for _ in range(_FINISH_ROUNDS):
                before = self.written
                frames, copied = self._checkpoint()
                if copied == frames and self.written == before:
                    break

    def _checkpoint(self) -> tuple[int, int]:
        """(frames in the log, those of them that are in the database file now). It waits for nobody."""
        _, frames, copied = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return frames, copied
