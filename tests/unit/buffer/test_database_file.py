"""The database file: its names, which process may write to it, its checkpoints, and files that are refused."""

import os
import shutil
import sqlite3
from contextlib import closing

import pytest

from tba.buffer.store.store import Store
from tba.common.errors import LockTaken, StorageError, SyncFailed


@pytest.fixture
def served(tmp_path):
    """A database that is open for writing, with one run."""
    store = Store(tmp_path / "buffer.sqlite", durability="process")
    store.open_run("demo", seed=0, config={}, software={})
    yield store
    store.close()


def test_a_second_writer_is_refused_through_a_hard_link_and_without_the_lock_file(served, tmp_path):
    os.link(served.path, tmp_path / "other.sqlite")
    served.path.with_name("buffer.sqlite.lock").unlink()
    for path in (tmp_path / "other.sqlite", served.path):
        with pytest.raises(LockTaken, match=f"{path.name} open"):
            Store(path, durability="process")


def test_the_lock_on_the_content_ends_with_the_writer_and_excludes_no_reader(served):
    with closing(sqlite3.connect(served.path)) as reader, reader:
        assert reader.execute("SELECT name FROM runs").fetchall() == [("demo",)]
    reader.close()
    served.close()
    Store(served.path, durability="process").close()


@pytest.mark.parametrize(("look", "in_its_place"), [("size_bytes", ""), ("size_bytes", "a file"), ("disk_space", "")])
def test_a_database_that_was_deleted_while_it_was_open_stores_nothing_more(tmp_path, look, in_its_place):
    """Puts ask for the free space first, which a directory that is gone does not have."""
    store = Store(tmp_path / "run/buffer.sqlite", durability="process")
    assert store.database.size_bytes() > 0
    (tmp_path / "run").rename(tmp_path / "moved")
    if in_its_place:
        (tmp_path / "run").write_text(in_its_place)
    with pytest.raises(SyncFailed, match="was deleted or moved while it was open"):
        getattr(store.database, look)()
    assert store.database.failure is not None
    (tmp_path / "run").unlink(missing_ok=True)
    store.close()


def test_a_database_is_served_through_a_symbolic_link(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link.sqlite"
    link.symlink_to(tmp_path / "disk" / "buffer.sqlite")
    store = Store(link, durability="power")
    store.open_run("demo", seed=0, config={}, software={})
    with pytest.raises(LockTaken):
        Store(tmp_path / "disk" / "buffer.sqlite", durability="power")
    store.close()
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["buffer.sqlite", "buffer.sqlite.lock"]
    assert [path.name for path in tmp_path.iterdir() if not path.is_dir()] == ["link.sqlite"]


# ---------------------------------------------------------------- checkpoints


def runs_without_wal(path) -> list[str]:
    """Return the names of the runs that the database file itself holds."""
    with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as reader:
        return [name for (name,) in reader.execute("SELECT name FROM runs")]


def test_a_wal_that_has_grown_is_copied_to_the_database_when_asked_or_by_the_next_transaction(served):
    for mib, found in ((3, []), (5, ["demo"])):
        served.database.written = mib << 20
        served.database.checkpoint()
        assert runs_without_wal(served.path) == found
    served.open_run("more", seed=0, config={}, software={})
    served.database.written = 5 << 20
    with served.transaction():
        assert runs_without_wal(served.path) == ["demo", "more"]
    assert served.database.written == 0


def test_what_a_killed_server_left_in_the_wal_is_in_the_database_after_a_start(served, tmp_path):
    """Its pages may be in the kernel's cache alone, and a trajectory that comes again is only counted."""
    (tmp_path / "killed").mkdir()
    path = tmp_path / "killed" / "buffer.sqlite"
    for suffix in ("", "-wal"):
        shutil.copy(f"{served.path}{suffix}", f"{path}{suffix}")
    assert runs_without_wal(path) == []
    store = Store(path, durability="power")
    assert runs_without_wal(path) == ["demo"]
    store.close()


class FullDisk:
    """A connection whose checkpoints find no space."""

    def __init__(self, connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str):
        return getattr(self._connection, name)

    def execute(self, statement: str, *values):
        if "wal_checkpoint" not in statement:
            return self._connection.execute(statement, *values)
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error


def test_a_checkpoint_without_space_is_a_warning_and_writing_continues(served, caplog, monkeypatch):
    monkeypatch.setattr(served.database, "_connection", FullDisk(served.database._connection))
    served.database.written = 5 << 20
    served.database.checkpoint()
    assert "checkpoint failed" in caplog.text
    served.open_run("other", seed=0, config={}, software={})


def test_the_directory_entry_of_a_new_wal_is_synced(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), sync(file)))
    Store(tmp_path / "buffer.sqlite", durability="power").close()
    assert tmp_path.stat().st_ino in synced


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
    Store(path, durability="power").close()


def test_any_number_of_rows_is_inserted_with_their_own_values(tmp_path):
    with closing(Store(tmp_path / "buffer.sqlite", durability="process")) as store:
        for count in (1, 5, 256, 341):
            store.database.execute("CREATE TEMP TABLE noted (id INTEGER PRIMARY KEY, text TEXT, score REAL)")
            texts, scores = [f"text {n}" for n in range(count)], [n / 8 for n in range(count)]
            store.database.insert("noted", ("score", "text", "id"), [scores, texts, range(count)])
            stored = store.database.all("SELECT * FROM noted ORDER BY id")
            assert stored == list(zip(range(count), texts, scores, strict=True))
            store.database.execute("DROP TABLE noted")
