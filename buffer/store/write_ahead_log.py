"""SQLite's write-ahead log (WAL) of a database with one writer, synced and checkpointed by other threads.

    writer ──COMMIT──► WAL ──checkpoint──► database file
                        └─ sync: commits are on the disk

SQLite restarts the WAL from its beginning once a checkpoint has copied all of it. Under load a checkpoint never catches
up with the writer, so `checkpoint_all` copies the rest while writing is paused.

Invariant: SQLite overwrites nothing in the WAL before the disk has it in the database file. A sync that fails may have
lost anything written since the last good sync, and a later sync would not report it. So a failed sync is the last thing
that this process does: `abandon` leaves the files so that the next writer checkpoints the whole WAL again.
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

from tba.buffer.store.storage_errors import storage_errors, sync_file
from tba.common import run_files
from tba.common.errors import StorageError, SyncFailed
from tba.common.log import get_logger
from tba.common.system import durable

log = get_logger(__name__)

# A checkpoint copies little at a time, so that a batch request that arrives meanwhile soon has the disk to itself.
_WORTH_COPYING_BYTES = 2 << 20
_LONG_BYTES = 8 << 20
_VERY_LONG_BYTES = 16 << 20
_FULL_ROUNDS = 4
# `written` hardly counts batches, leases and reports, so a checkpoint is also due after this time.
_CHECKPOINT_SECONDS = 60.0
_CHUNK_BYTES = 4 << 20
# Longest wait for a lock of another program.
_BUSY_SECONDS = 10.0
# SQLite's index of the WAL, the -shm file (https://www.sqlite.org/walformat.html, "The WAL-Index Header"): its format
# number, unchanged since 2010; the offset of nBackfill, the number of frames copied, in native byte order; and the byte
# that a checkpoint locks.
_INDEX_FORMAT = struct.pack("=I", 3_007_000)
_COPIED_FRAMES_OFFSET = 96
_CHECKPOINT_LOCK_OFFSET = 121
_OTHER_CHECKPOINT_SECONDS = 10.0
_OTHER_CHECKPOINT_POLL_SECONDS = 0.05


class WriteAheadLog:
    """The WAL of the database at `path`, whose file descriptor is `file`. It exists while its writer has it open.

    One thread may call `sync` and another one `checkpoint`, while a third writes and adds to `written`. After a failed
    sync all methods raise SyncFailed, in every thread.
    """

    def __init__(self, path: Path, file: int, *, durable: bool) -> None:
        self._path = path
        self._file = file
        self._durable = durable
        # Approximate total of bytes written by transactions, and its values when the last good sync and the last
        # checkpoint began.
        self.written = 0
        self._synced = 0
        self._checkpointed = 0
        self._checkpointed_at = time.monotonic()
        self.failure: SyncFailed | None = None
        with contextlib.ExitStack() as resources:
            self._connection = resources.enter_context(open_connection(path))
            self._reader = resources.enter_context(open_connection(path))
            self._page_bytes = int(self._connection.execute("PRAGMA page_size").fetchone()[0])
            self._log = os.open(run_files.write_ahead_log(path), os.O_RDWR)
            resources.callback(os.close, self._log)
            # By name, since closing a descriptor of the last one would drop SQLite's locks.
            names = (path, run_files.write_ahead_log(path), path.with_name(path.name + "-shm"))
            self._identities = {name: _identity(name) for name in names}
            self._rewrite()
            self._resources = resources.pop_all()

    def close(self) -> None:
        """Close the connections and the file."""
        self._resources.close()

    def _rewrite(self) -> None:
        """Rewrite the whole WAL in place with the same bytes, and sync it.

        A process that failed to sync, or was killed before, leaves pages in the kernel's cache that the disk may lack.
        SQLite reads them as committed, so a resent trajectory would be acknowledged as a duplicate. The kernel may
        consider such pages clean, so that a sync alone would skip them: only writing them again marks them dirty. The
        directory is synced too, because the file's name may be as new as its content.
        """
        # A write transaction: no other connection may append to the WAL or restart it.
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            offset = 0
            while chunk := os.pread(self._log, _CHUNK_BYTES, offset):
                offset += os.pwrite(self._log, chunk, offset)
            sync_file(self._log, self._path)
            durable.sync(self._path.parent)
        finally:
            _end_transaction(self._connection)

    def sync(self) -> None:
        """Make every commit durable, unless `durable` is False. Raises as `check_files`.

        With synchronous=NORMAL, SQLite syncs the WAL only before a checkpoint. Calling this between a commit and its
        acknowledgement gives the guarantee of synchronous=FULL.
        """
        with self.refuse_after_failure():
            written = self.written
            if self._durable and written > self._synced:
                sync_file(self._log, self._path)
            self._synced = written
            self._check_files()

    def check_files(self) -> None:
        """Raise SyncFailed if the database, its WAL or its index is not the file that was opened.

        SQLite goes on with the open files, which no later start would find.
        """
        with self.refuse_after_failure():
            self._check_files()

    def _check_files(self) -> None:
        for path, identity in self._identities.items():
            if (found := _identity(path)) != identity:
                what = "replaced by another file" if found else "deleted or moved"
                raise SyncFailed(f"{path} was {what} while it was open: nothing more is acknowledged")

    def keep_files(self) -> None:
        """After a failure of `check_files`, give what is open a name again if it has none, or leads into another file.

        A replaced database and its WAL become `NAME.replaced-TIME`, since that WAL would damage the other file.
        """
        database, wal = self._path, run_files.write_ahead_log(self._path)
        base = database
        if _identity(database) not in (None, self._identities[database]):
            base = database.with_name(f"{database.name}.replaced-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        for file, name, kept in ((self._file, database, base), (self._log, wal, Path(f"{base}-wal"))):
            try:
                if name != kept and _identity(name) == self._identities[name]:
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

    def checkpoint(self) -> bool:
        """Copy the WAL into the database file, if enough was written or enough time has passed.

        Returns True if `checkpoint_all` is due. If the disk is full, a warning is logged, and the WAL keeps all until
        the next call.
        """
        written, now = self.written, time.monotonic()
        is_small = written - self._checkpointed <= _WORTH_COPYING_BYTES
        if is_small and now - self._checkpointed_at < _CHECKPOINT_SECONDS:
            return False
        self._checkpointed, self._checkpointed_at = written, now
        is_due = False
        with self._warn_on_failure():
            is_due = self._checkpoint_most()
        return is_due  # noqa: RET504

    def _checkpoint_most(self) -> bool:
        frames, _ = self._checkpoint()
        if frames * self._page_bytes <= _VERY_LONG_BYTES:
            return False
        # Now, while puts continue: otherwise `checkpoint_all` would do this sync and more of the copying while they are
        # paused.
        sync_file(self._file, self._path)
        frames, copied = self._checkpoint()
        # If more is left, a reader prevents copying, and pausing the writer would not help.
        return (frames - copied) * self._page_bytes <= _LONG_BYTES

    def checkpoint_all(self) -> None:
        """Copy the whole WAL, so that SQLite restarts it. The caller pauses writing.

        A reader that still needs the WAL prevents the restart: then the WAL grows until the next call. The file is not
        truncated, because existing blocks are synced faster than new ones.
        """
        with self._warn_on_failure():
            for _ in range(_FULL_ROUNDS):
                before = self.written
                frames, copied = self._checkpoint()
                if copied == frames and self.written == before:
                    return

    @contextlib.contextmanager
    def _warn_on_failure(self) -> Iterator[None]:
        """Log a warning if a checkpoint fails. A failed sync is raised."""
        try:
            with self.refuse_after_failure():
                yield
        except SyncFailed:
            raise
        except StorageError as error:
            log.warning("checkpoint failed", reason=str(error))

    @contextlib.contextmanager
    def refuse_after_failure(self) -> Iterator[None]:
        """Wrap every operation that may sync: none starts or succeeds after a failed one.

        Raises StorageError, or SyncFailed.
        """
        self._raise_failure()
        try:
            with storage_errors(self._path):
                yield
        except SyncFailed as error:
            self.failure = error
            raise
        # The kernel may report an error only once: another thread's sync received it, while ours seemed to succeed.
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _checkpoint(self) -> tuple[int, int]:
        """Run a passive checkpoint, which waits for no lock. Returns (frames in the WAL, frames copied so far)."""
        # A read transaction, so that SQLite cannot restart the WAL during the checkpoint. The writer restarts it as
        # soon as all of it is copied. If that happens while a checkpoint starts, SQLite up to 3.51.2 may count frames
        # of the new WAL as copied, and they are lost (https://sqlite.org/wal.html#walresetbug). If everything is copied
        # already, the reader uses the database file only, and the writer may restart the WAL. But then the checkpoint
        # copies no frame of the new WAL, which would change the file under the reader. Remove the transaction when no
        # older SQLite is in use.
        self._reader.execute("BEGIN")
        try:
            self._reader.execute("SELECT 1 FROM sqlite_master").fetchone()
            _, frames, copied = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        finally:
            _end_transaction(self._reader)
        return frames, copied


@contextlib.contextmanager
def open_connection(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection that may write and sync. Any one thread at a time may use it."""
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, uri=True)
    with contextlib.closing(connection):
        # Some builds of SQLite default to OFF, with which a checkpoint would sync nothing.
        connection.execute("PRAGMA synchronous = NORMAL")
        yield connection


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one of its name; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _end_transaction(connection: sqlite3.Connection) -> None:
    """Roll back, unless SQLite has done so already because the disk failed."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def abandon(database: Path) -> None:
    """Reset the number of copied frames after a failed sync, so that the next checkpoint copies the whole WAL again.

    The -shm file stores how many frames are copied, and the disk may have lost those copied since the last good sync.
    The file is removed with the last process that has the database open. But another process may outlive this one, and
    would continue from that number in its own checkpoint, or pass it to our next start. A smaller number is harmless:
    frames are copied in order, and copying one again changes nothing.
    """
    try:
        # Never closed: POSIX drops all locks of a process on a file, SQLite's included, with any descriptor of it.
        index = os.open(database.with_name(database.name + "-shm"), os.O_RDWR)
        if os.pread(index, len(_INDEX_FORMAT), 0) == _INDEX_FORMAT:
            try:
                _lock_checkpoints(index)
            finally:
                os.pwrite(index, bytes(4), _COPIED_FRAMES_OFFSET)
    except OSError as error:
        log.warning("end all programs that have the database open before the next start", reason=str(error))


def _lock_checkpoints(index: int) -> None:
    """Wait for another program's checkpoint, which would write its own number when it ends, and prevent further ones.

    Raises OSError if the other checkpoint takes too long.
    """
    deadline = time.monotonic() + _OTHER_CHECKPOINT_SECONDS
    while True:
        try:
            fcntl.lockf(index, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _CHECKPOINT_LOCK_OFFSET)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > deadline:
                raise
        time.sleep(_OTHER_CHECKPOINT_POLL_SECONDS)
