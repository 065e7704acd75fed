"""The database file under other names, and which process may write to it."""

import os
import sqlite3
from contextlib import closing

import pytest

from tba.buffer.store.store import Store
from tba.common.errors import LockTaken, SyncFailed


@pytest.fixture
def served(tmp_path):
    """A database that is open for writing, with one run."""
    store = Store(tmp_path / "buffer.sqlite", durability="process")
    store.open_run("demo", seed=0, config={}, software={})
    yield store
    store.close()


def test_a_second_writer_is_refused_through_a_hard_link(served, tmp_path):
    os.link(served.path, tmp_path / "other.sqlite")
    with pytest.raises(LockTaken, match="other.sqlite open"):
        Store(tmp_path / "other.sqlite", durability="process")


def test_a_second_writer_is_refused_after_the_lock_file_was_removed(served):
    served.path.with_name("buffer.sqlite.lock").unlink()
    with pytest.raises(LockTaken):
        Store(served.path, durability="process")


def test_the_lock_on_the_content_ends_with_the_writer_and_excludes_no_reader(served):
    with closing(sqlite3.connect(served.path)) as reader, reader:
        assert reader.execute("SELECT name FROM runs").fetchall() == [("demo",)]
    reader.close()
    served.close()
    Store(served.path, durability="process").close()


def test_a_database_that_was_deleted_while_it_was_open_stores_nothing_more(served, tmp_path):
    assert served.database.size_bytes() > 0
    served.path.rename(tmp_path / "moved.sqlite")
    with pytest.raises(SyncFailed, match="was deleted or moved while it was open"):
        served.database.size_bytes()


def test_a_database_is_served_through_a_symbolic_link(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link.sqlite"
    link.symlink_to(tmp_path / "disk" / "buffer.sqlite")
    store = Store(link, durability="power")
    store.open_run("demo", seed=0, config={}, software={})
    store.log.sync()
    with pytest.raises(LockTaken):
        Store(tmp_path / "disk" / "buffer.sqlite", durability="power")
    store.close()
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["buffer.sqlite", "buffer.sqlite.lock"]
    assert [path.name for path in tmp_path.iterdir() if not path.is_dir()] == ["link.sqlite"]
