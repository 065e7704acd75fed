"""The log is not begun anew while it is copied: SQLite up to 3.51.2 would take what is not copied for copied.

And what a failed sync, or a database that is not for us, leaves behind.
"""

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest

from tba.buffer.store import Store
from tba.buffer.write_ahead_log import leave
from tba.common.errors import LockTaken, StorageError, SyncFailed


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "buffer.sqlite", durability="power")
    yield store
    store.close()


class Meddling:
    """A connection with which something happens before or after each checkpoint."""

    def __init__(self, connection, *, before=lambda: None, after=lambda: None) -> None:
        self._connection, self._before, self._after = connection, before, after

    def execute(self, statement: str):
        self._before()
        row = self._connection.execute(statement).fetchone()
        self._after()
        return self._connection.execute("SELECT ?, ?, ?", row)

    def close(self) -> None:
        self._connection.close()


def commit(store) -> None:
    store.open_run("test", seed=0, config={}, software={})


def beginning(store) -> bytes:
    """It is another one when the log was begun anew."""
    return store.path.with_name(store.path.name + "-wal").read_bytes()[:32]


def test_a_commit_does_not_begin_the_log_anew_while_it_is_copied(store):
    commit(store)
    before = beginning(store)
    store.log._connection = Meddling(store.log._connection, after=lambda: commit(store))
    frames, copied = store.log._checkpoint()
    assert copied == frames > 0
    assert beginning(store) == before
    store.log._connection = store.log._connection._connection
    frames, copied = store.log._checkpoint()
    assert copied == frames
    commit(store)
    assert beginning(store) != before


def test_nothing_is_copied_of_a_log_that_was_begun_anew_since_the_look_at_it(store):
    commit(store)
    store.log._checkpoint()
    before = beginning(store)
    store.log._connection = Meddling(store.log._connection, before=lambda: commit(store))
    frames, copied = store.log._checkpoint()
    assert beginning(store) != before
    assert (copied, frames > 0) == (0, True)


class FailingDisk(Meddling):
    """A connection whose reads fail. Then SQLite ends the transaction (https://sqlite.org/lang_transaction.html)."""

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, statement: str):
        if not statement.startswith("SELECT"):
            return self._connection.execute(statement)
        self._connection.execute("ROLLBACK")
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
        raise error


@pytest.mark.parametrize(
    ("mib", "unless_short", "is_copied"), [(1, False, False), (3, False, True), (3, True, False), (9, True, True)]
)
def test_the_log_is_copied_when_that_is_worth_it(store, mib, unless_short, is_copied):
    copied = []
    commit(store)
    store.log._connection = Meddling(store.log._connection, after=lambda: copied.append(True))
    store.log.written += mib << 20
    store.log.copy(unless_short=unless_short)
    assert bool(copied) == is_copied


def test_what_a_disk_does_not_read_during_a_checkpoint_is_a_warning(store, caplog):
    commit(store)
    store.log._watch = FailingDisk(store.log._watch)
    store.log.finish()
    assert "checkpoint failed" in caplog.text
    store.log._watch = store.log._watch._connection
    store.log.sync()


def test_only_what_was_committed_since_the_last_sync_is_synced(store, monkeypatch):
    synced, sync = [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (synced.append(file), sync(file)))
    commit(store)
    store.log.sync()
    store.log.sync()
    assert len(synced) == 1
    commit(store)
    store.log.sync()
    assert len(synced) == 2


def test_what_is_committed_during_a_sync_needs_another_one(store, monkeypatch):
    commit(store)
    monkeypatch.setattr(os, "fdatasync", lambda _: commit(store))
    store.log.sync()
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    store.log.sync()
    assert len(synced) == 1


def test_a_sync_during_which_another_one_failed_acknowledges_nothing(store, monkeypatch):
    commit(store)

    def fails_elsewhere(_: int) -> None:
        store.log.failure = SyncFailed("the disk")

    monkeypatch.setattr(os, "fdatasync", fails_elsewhere)
    with pytest.raises(SyncFailed):
        store.log.sync()
    store.log.failure = None


def test_a_new_log_has_its_name_on_the_disk_before_anything_is_acknowledged(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), sync(file)))
    Store(tmp_path / "buffer.sqlite", durability="power").close()
    assert tmp_path.stat().st_ino in synced


# ---------------------------------------------------------------- after a failed sync


def copied_frames(path) -> int:
    """What SQLite remembers."""
    index = path.with_name(path.name + "-shm").read_bytes()
    return int.from_bytes(index[96:100], sys.byteorder)


@pytest.fixture
def copied(store):
    """All of the log is copied, and another program keeps it from being begun anew."""
    commit(store)
    with closing(sqlite3.connect(store.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT 1 FROM runs").fetchone()
        store.log._checkpoint()
        assert copied_frames(store.path) > 0
        yield store.path


def test_a_start_that_cannot_sync_makes_the_next_one_copy_all_of_the_log(copied, store, monkeypatch):
    def fails(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    store.close()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fails)
        with pytest.raises(SyncFailed):
            Store(copied, durability="power")
    assert copied_frames(copied) == 0
    with pytest.raises(LockTaken):
        Store(copied, durability="power")


COPYING = """
import fcntl, sys
index = open(sys.argv[1], "r+b")
fcntl.lockf(index, fcntl.LOCK_EX, 1, 121)
print("copies", flush=True)
sys.stdin.read()
"""


def test_who_copies_meanwhile_is_waited_for_before_its_number_is_reset(copied, monkeypatch):
    index = copied.with_name(copied.name + "-shm")
    command = [sys.executable, "-c", COPYING, str(index)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"copies\n"
        seen = []

        def wait(_: float) -> None:
            seen.append(copied_frames(copied))
            other.kill()
            other.wait()

        monkeypatch.setattr(time, "sleep", wait)
        leave(copied)
    assert seen
    assert seen[0] > 0
    assert copied_frames(copied) == 0


def test_who_copies_for_too_long_is_named_and_the_number_reset_all_the_same(copied, monkeypatch, caplog):
    index = copied.with_name(copied.name + "-shm")
    command = [sys.executable, "-c", COPYING, str(index)]
    monkeypatch.setattr("tba.buffer.write_ahead_log._COPYING_SECONDS", 0.0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"copies\n"
        leave(copied)
        other.kill()
    assert "end all programs that have the database open" in caplog.text
    assert copied_frames(copied) == 0


# ---------------------------------------------------------------- files that are not for us


@pytest.mark.parametrize("statement", ["CREATE TABLE theirs (a)", "{newer}"])
def test_a_database_that_is_refused_stays_as_it_is_with_its_log(tmp_path, statement):
    at, path = tmp_path / "at", tmp_path / "buffer.sqlite"
    if statement == "{newer}":
        Store(at, durability="process").close()
        statement = "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('tba', '9999_new', '')"
    with closing(sqlite3.connect(at, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute(statement)
        for suffix in ("", "-wal"):
            shutil.copy(f"{at}{suffix}", f"{path}{suffix}")
    files = [path, path.with_name("buffer.sqlite-wal")]
    before = [file.read_bytes() for file in files]
    with pytest.raises(StorageError, match="another program|does not know"):
        Store(path, durability="power")
    assert [file.read_bytes() for file in files] == before


def test_a_database_whose_first_statement_was_cut_off_is_opened(tmp_path):
    """It is what has the database keep a log: what is left of it has to be undone, which a reader cannot do."""
    at, path = tmp_path / "at", tmp_path / "buffer.sqlite"
    with closing(sqlite3.connect(at, isolation_level=None)) as writer:
        writer.executescript("CREATE TABLE theirs (a); DROP TABLE theirs")
        writer.executescript("PRAGMA cache_size = 1; BEGIN; CREATE TABLE theirs (a)")
        writer.execute("INSERT INTO theirs SELECT randomblob(1000) FROM pragma_function_list")
        for suffix in ("", "-journal"):
            shutil.copy(f"{at}{suffix}", f"{path}{suffix}")
    assert path.with_name("buffer.sqlite-journal").stat().st_size > 0
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as reader, pytest.raises(sqlite3.Error):
        reader.execute("SELECT 1 FROM sqlite_master").fetchone()
    store = Store(path, durability="power")
    assert store.runs is not None
    store.close()
