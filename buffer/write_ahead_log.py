"""SQLite's write-ahead log of a database that one connection writes: synced and copied beside it, by other threads.

    writer ──COMMIT──► log ──copy──► database file
                        └─ sync: what is committed is on the disk

SQLite writes the log from its beginning again once all of it is copied, which under load never comes about by itself:
then `finish` copies the rest while writing is held back.

Invariant: nothing leaves the log before the disk has it in the database file. A sync that fails may have lost anything
that was written since the one before, and no later sync would tell. So it is the last thing that is done here: the
files are left as they are (`leave`), and whoever opens them next begins with all of the log.
"""

import contextlib
import errno
import fcntl
import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from tba.buffer.storage_errors import storage_errors, sync_file
from tba.common import durable
from tba.common.errors import StorageError, SyncFailed
from tba.common.log import get_logger

log = get_logger(__name__)

# Copied in small pieces: a request for a batch that comes meanwhile has the disk to itself after one.
_WORTH_COPYING_BYTES = 2 << 20
_LONG_BYTES = 8 << 20
_VERY_LONG_BYTES = 16 << 20
_FINISH_ROUNDS = 4
_COPY_SECONDS = 60.0  # what is no trajectory is hardly counted: batches, leases, reports
_CHUNK_BYTES = 4 << 20
_BUSY_SECONDS = 10.0  # for a lock of another program
# Of the file with SQLite's index of the log (https://www.sqlite.org/walformat.html, "The WAL-Index Header"): its
# format, which has been the same since 2010, how many frames have been copied, in the machine's byte order, and the
# byte that whoever copies has locked.
_INDEX_FORMAT = struct.pack("=I", 3_007_000)
_COPIED_FRAMES_AT = 96
_COPYING_LOCK_AT = 121
_COPYING_SECONDS = 10.0  # that another program which copies is waited for
_COPYING_POLL_SECONDS = 0.05


class WriteAheadLog:
    """The log of the database at `path`, whose descriptor is `file`. It is there while its writer has it open.

    `sync` and `copy` may be called by two threads, while a third writes and counts in `written` what it wrote. All
    raise SyncFailed after a failed sync, whoever heard of it first.
    """

    def __init__(self, path: Path, file: int, *, durable: bool) -> None:
        self._path = path
        self._file = file
        self._durable = durable
        self.written = 0  # bytes, roughly; each transaction adds some
        self._synced = 0  # of those, all that were there when the last good sync began
        self._copied = 0  # of those, when they were last copied
        self._copied_at = time.monotonic()
        self.failure: SyncFailed | None = None
        with contextlib.ExitStack() as resources:
            self._connection = resources.enter_context(open_connection(path))
            self._watch = resources.enter_context(open_connection(path))
            self._page_bytes = int(self._connection.execute("PRAGMA page_size").fetchone()[0])
            self._log = os.open(path.with_name(path.name + "-wal"), os.O_RDWR)
            resources.callback(os.close, self._log)
            self._write_again()
            self._resources = resources.pop_all()

    def __enter__(self) -> "WriteAheadLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def _write_again(self) -> None:
        """Write all of the log once more, the same bytes in the same places, and sync them.

        Who wrote it may have ended because it could not be synced, or by a kill before it was. Then SQLite finds in the
        kernel's memory what the disk has not got, a sync alone would leave it so, and what comes to us again would be
        acknowledged because it is there. The log's name may be as new as what is in it.
        """
        self._connection.execute("BEGIN IMMEDIATE")  # meanwhile nobody adds to the log or begins it anew
        try:
            at = 0
            while chunk := os.pread(self._log, _CHUNK_BYTES, at):
                at += os.pwrite(self._log, chunk, at)
            sync_file(self._log, self._path)
            durable.sync(self._path.parent)
        finally:
            _end_transaction(self._connection)

    def sync(self) -> None:
        """Make all that is committed survive a power cut, unless `durable` is False.

        SQLite itself syncs the log only before a checkpoint (synchronous=NORMAL); with this after a commit, and
        before its acknowledgement, the guarantee is that of synchronous=FULL.
        """
        with self.unless_failed():
            written = self.written
            if self._durable and written > self._synced:
                sync_file(self._log, self._path)
            self._synced = written

    def copy(self, *, unless_short: bool = False) -> bool:
        """Copy what is new in the log into the database file, if it is worth it, or the last time was a minute ago.

        `unless_short`: only if there is a lot of it. True if `finish` is due. For want of space, say, it may not be
        possible: a warning tells, the log keeps all, and there is a next time.
        """
        written, now = self.written, time.monotonic()
        enough = _LONG_BYTES if unless_short else _WORTH_COPYING_BYTES
        if written - self._copied <= enough and now - self._copied_at < _COPY_SECONDS:
            return False
        self._copied, self._copied_at = written, now
        is_due = False
        with self._told():
            is_due = self._copy()
        return is_due  # noqa: RET504  # what fails ends the block above

    def _copy(self) -> bool:
        frames, _ = self._checkpoint()
        if frames * self._page_bytes <= _VERY_LONG_BYTES:
            return False
        sync_file(self._file, self._path)  # else `finish` would do this, and more of the copying, while puts wait
        frames, copied = self._checkpoint()
        return (frames - copied) * self._page_bytes <= _LONG_BYTES  # else a reader holds it

    def finish(self) -> None:
        """Copy all of the log. Whoever calls sees to it that next to nothing is written meanwhile.

        A reader that still needs the log keeps it from being written anew: then it grows on, until the next time.
        The file keeps its length: blocks that are there already are synced faster than new ones.
        """
        with self._told():
            for _ in range(_FINISH_ROUNDS):
                before = self.written
                frames, copied = self._checkpoint()
                if copied == frames and self.written == before:
                    return

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Around what copies: if it fails, a warning."""
        try:
            with self.unless_failed():
                yield
        except SyncFailed:
            raise
        except StorageError as error:
            log.warning("checkpoint failed", reason=str(error))

    @contextlib.contextmanager
    def unless_failed(self) -> Iterator[None]:
        """Around all that may sync: after one that failed there is no other. Raises StorageError, SyncFailed."""
        self._raise_failure()
        try:
            with storage_errors(self._path):
                yield
        except SyncFailed as error:
            self.failure = error
            raise
        # A kernel that tells of an error only once may have told another thread's sync, while ours succeeded.
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _checkpoint(self) -> tuple[int, int]:
        """(frames in the log, those of them that are in the database file now). It waits for nobody."""
        with self._not_begun_anew():
            _, frames, copied = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return frames, copied

    @contextlib.contextmanager
    def _not_begun_anew(self) -> Iterator[None]:
        """A view of the database, in which the log is not begun anew; or, if all is copied, nothing can be copied.

        The writer beside us begins it anew whenever it may. If that happens while a checkpoint starts, SQLite up to
        3.51.2 may take frames of the new log for copied, and they are lost (https://sqlite.org/wal.html#walresetbug).
        This can go when no older SQLite is in use any more.
        """
        self._watch.execute("BEGIN")
        try:
            self._watch.execute("SELECT 1 FROM sqlite_master").fetchone()
            yield
        finally:
            _end_transaction(self._watch)


@contextlib.contextmanager
def open_connection(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that may copy and sync. Opened by one thread and used by another, never by two at a time."""
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, uri=True)
    with contextlib.closing(connection):
        # Of some builds the default is OFF, with which a checkpoint would sync nothing.
        connection.execute("PRAGMA synchronous = NORMAL")
        yield connection


def _end_transaction(connection: sqlite3.Connection) -> None:
    """Unless SQLite has rolled it back already, as it does when the disk fails."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def leave(database: Path) -> None:
    """After a failed sync: whoever copies the log into the database next begins with its first frame.

    SQLite remembers how far it has come, and what it has copied since the last good sync may be lost. Its memory goes
    with the last process that has the database open. But one that outlives us keeps it, for our next start, and copies
    the rest itself when it closes. Nobody minds the smaller number: frames are copied in their order.
    """
    try:
        # Never closed: with any descriptor of this file all of SQLite's locks on it would go.
        index = os.open(database.with_name(database.name + "-shm"), os.O_RDWR)
        if os.pread(index, len(_INDEX_FORMAT), 0) == _INDEX_FORMAT:
            try:
                _wait_for_copying(index)
            finally:
                os.pwrite(index, bytes(4), _COPIED_FRAMES_AT)
    except OSError as error:
        log.warning("end all programs that have the database open before the next start", reason=str(error))


def _wait_for_copying(index: int) -> None:
    """Until no other program copies, which would write its own number at its end; none begins while we live.

    Raises OSError if one copies for too long.
    """
    deadline = time.monotonic() + _COPYING_SECONDS
    while True:
        try:
            fcntl.lockf(index, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _COPYING_LOCK_AT)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > deadline:
                raise
        time.sleep(_COPYING_POLL_SECONDS)
