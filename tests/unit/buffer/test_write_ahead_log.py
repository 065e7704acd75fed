"""Checkpoints and syncs of the WAL, the state after a failed sync, and databases that are refused.

SQLite must not restart the WAL during a checkpoint: up to 3.51.2 it may count frames as copied that are not.
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

from tba.buffer.store.store import Store
from tba.buffer.store.write_ahead_log import abandon
from tba.common.errors import LockTaken, StorageError, SyncFailed
from tba.tests.helpers.checks import not_none


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "buffer.sqlite", durability="power")
    yield store
    store.close()


class HookedConnection:
    """A connection that calls functions before and after each statement."""

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


def wal_header(store) -> bytes:
    """Return the header of the WAL, which changes when the WAL is restarted."""
    return store.path.with_name(store.path.name + "-wal").read_bytes()[:32]


def test_a_commit_does_not_restart_the_wal_during_a_checkpoint(store):
    commit(store)
    before = wal_header(store)
    store.log._connection = HookedConnection(store.log._connection, after=lambda: commit(store))
    frames, copied = store.log._checkpoint()
    assert copied == frames > 0
    assert wal_header(store) == before
    store.log._connection = store.log._connection._connection
    frames, copied = store.log._checkpoint()
    assert copied == frames
    commit(store)
    assert wal_header(store) != before


def test_a_checkpoint_copies_nothing_of_a_wal_that_was_just_restarted(store):
    commit(store)
    store.log._checkpoint()
    before = wal_header(store)
    store.log._connection = HookedConnection(store.log._connection, before=lambda: commit(store))
    frames, copied = store.log._checkpoint()
    assert wal_header(store) != before
    assert (copied, frames > 0) == (0, True)


class FailingDisk(HookedConnection):
    """A connection whose reads fail. SQLite then rolls the transaction back (https://sqlite.org/lang_transaction.html)."""

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


@pytest.mark.parametrize(("mib", "is_copied"), [(1, False), (3, True)])
def test_a_checkpoint_runs_only_after_enough_was_written(store, mib, is_copied):
    copied = []
    commit(store)
    store.log._connection = HookedConnection(store.log._connection, after=lambda: copied.append(True))
    store.log.written += mib << 20
    store.log.checkpoint()
    assert bool(copied) == is_copied


def test_a_read_error_during_a_checkpoint_is_a_warning(store, caplog):
    commit(store)
    store.log._reader = FailingDisk(store.log._reader)
    store.log.checkpoint_all()
    assert "checkpoint failed" in caplog.text
    store.log._reader = store.log._reader._connection
    store.log.sync()


def test_a_sync_without_a_commit_since_the_last_one_is_skipped(store, monkeypatch):
    synced, sync = [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (synced.append(file), sync(file)))
    commit(store)
    store.log.sync()
    store.log.sync()
    assert len(synced) == 1
    commit(store)
    store.log.sync()
    assert len(synced) == 2


def test_a_commit_during_a_sync_needs_another_sync(store, monkeypatch):
    commit(store)
    monkeypatch.setattr(os, "fdatasync", lambda _: commit(store))
    store.log.sync()
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    store.log.sync()
    assert len(synced) == 1


def test_a_sync_fails_if_another_thread_fails_to_sync_meanwhile(store, monkeypatch):
    commit(store)

    def fails_elsewhere(_: int) -> None:
        store.log.failure = SyncFailed("the disk")

    monkeypatch.setattr(os, "fdatasync", fails_elsewhere)
    with pytest.raises(SyncFailed):
        store.log.sync()
    store.log.failure = None


def test_the_directory_entry_of_a_new_wal_is_synced(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), sync(file)))
    Store(tmp_path / "buffer.sqlite", durability="power").close()
    assert tmp_path.stat().st_ino in synced


# ---------------------------------------------------------------- after a failed sync


def copied_frames(path) -> int:
    """Return the number of copied frames that the -shm file stores."""
    index = path.with_name(path.name + "-shm").read_bytes()
    return int.from_bytes(index[96:100], sys.byteorder)


@pytest.fixture
def copied(store):
    """A database whose WAL is copied completely, while another program prevents its restart."""
    commit(store)
    with closing(sqlite3.connect(store.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT 1 FROM runs").fetchone()
        store.log._checkpoint()
        assert copied_frames(store.path) > 0
        yield store.path


def test_after_a_start_that_cannot_sync_the_next_one_checkpoints_the_whole_wal(copied, store, monkeypatch):
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


CHECKPOINT_LOCK = """
import fcntl, sys
index = open(sys.argv[1], "r+b")
fcntl.lockf(index, fcntl.LOCK_EX, 1, 121)
print("copies", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_checkpoint(copied):
    """Another program that checkpoints the database until it is killed."""
    command = [sys.executable, "-c", CHECKPOINT_LOCK, f"{copied}-shm"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert not_none(program.stdout).readline() == b"copies\n"
        yield program
        program.kill()


def test_abandon_waits_for_a_checkpoint_of_another_program(copied, other_checkpoint, monkeypatch):
    seen = []

    def wait(_: float) -> None:
        seen.append(copied_frames(copied))
        other_checkpoint.kill()
        other_checkpoint.wait()

    monkeypatch.setattr(time, "sleep", wait)
    abandon(copied)
    assert seen
    assert seen[0] > 0
    assert copied_frames(copied) == 0


@pytest.mark.usefixtures("other_checkpoint")
def test_abandon_warns_of_a_checkpoint_that_takes_too_long_and_resets_the_number(copied, monkeypatch, caplog):
    monkeypatch.setattr("tba.buffer.store.write_ahead_log._OTHER_CHECKPOINT_SECONDS", 0.0)
    abandon(copied)
    assert "end all programs that have the database open" in caplog.text
    assert copied_frames(copied) == 0


# ---------------------------------------------------------------- refused files


@pytest.mark.parametrize("statement", ["CREATE TABLE theirs (a)", "{newer}"])
def test_a_refused_database_and_its_wal_stay_unchanged(tmp_path, statement):
    at, path = tmp_path / "at", tmp_path / "buffer.sqlite"
    if statement == "{newer}":
        Store(at, durability="process").close()
        statement = f"PRAGMA application_id = {(int.from_bytes(b'tba') << 8) + 255}"
    with closing(sqlite3.connect(at, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute(statement)
        for suffix in ("", "-wal"):
            shutil.copy(f"{at}{suffix}", f"{path}{suffix}")
    files = [path, path.with_name("buffer.sqlite-wal")]
    before = [file.read_bytes() for file in files]
    with pytest.raises(StorageError, match="another program|another build of tba"):
        Store(path, durability="power")
    assert [file.read_bytes() for file in files] == before


def test_a_database_with_a_hot_rollback_journal_is_opened(tmp_path):
    """The first statement switches to WAL mode. Its rollback journal can only be rolled back by a writer."""
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
