"""`tba buffer restore`: a backup in the place of a database, with nothing left that undoes it."""

import contextlib
import shutil
import sqlite3

import pytest

from tba.buffer.store.reader import open_reader
from tba.buffer.tools.check import check

COUNT = "SELECT COUNT(*) FROM trajectories"


def count(path) -> int:
    with open_reader(path) as connection:
        return connection.execute(COUNT).fetchone()[0]


@pytest.fixture
def run_directory(harness, tmp_path, tba_buffer):
    """A database with four trajectories, of which two are in its backup."""
    buffer = harness(tmp_path / "run.sqlite")
    buffer.fill(1, 2)
    assert tba_buffer("backup", "backup.sqlite", "-b", buffer.store.path).exit_code == 0
    buffer.announce(1, 1)
    buffer.fill(1, 2, version=1)
    yield buffer
    buffer.store.close()


def test_a_restore_replaces_the_database_and_keeps_what_was_there(run_directory, tba_buffer, tmp_path):
    run_directory.store.close()
    done = tba_buffer("restore", "backup.sqlite", "--to", "run.sqlite", "--json").json
    assert count(tmp_path / "run.sqlite") == 2
    assert count(tmp_path / done["replaced"]) == 4
    assert {finding["result"] for finding in check(tmp_path / "run.sqlite")} <= {"ok", "note"}


def test_a_log_that_was_left_behind_does_not_undo_a_restore(run_directory, tba_buffer, tmp_path, harness):
    for name in ("run.sqlite", "run.sqlite-wal"):
        shutil.copy(tmp_path / name, tmp_path / f"killed{name[3:]}")
    assert (tmp_path / "killed.sqlite-wal").stat().st_size > 0
    done = tba_buffer("restore", "backup.sqlite", "--to", "killed.sqlite", "--json").json
    assert not (tmp_path / "killed.sqlite-wal").exists()
    assert harness(tmp_path / "killed.sqlite").service.status().trajectories == 2
    # The replaced file has kept its log, with all that was acknowledged.
    assert count(tmp_path / done["replaced"]) == 4


def test_a_log_without_its_database_does_not_undo_a_restore(run_directory, tba_buffer, tmp_path):
    shutil.copy(tmp_path / "run.sqlite-wal", tmp_path / "moved.sqlite-wal")
    done = tba_buffer("restore", "backup.sqlite", "--to", "moved.sqlite", "--json").json
    assert count(tmp_path / "moved.sqlite") == 2
    assert (tmp_path / f"{done['replaced']}-wal").exists()


def test_a_restore_is_refused_while_a_server_has_the_database(run_directory, tba_buffer):
    refused = tba_buffer("restore", "backup.sqlite", "--to", "run.sqlite")
    assert (refused.exit_code, "a buffer server has" in refused.message) == (78, True)
    assert run_directory.service.status().trajectories == 4


def test_a_restore_is_refused_while_a_reader_has_the_database_open(run_directory, tba_buffer, tmp_path):
    run_directory.store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "run.sqlite")) as reader:
        reader.execute(COUNT).fetchone()
        assert "another program has" in tba_buffer("restore", "backup.sqlite", "--to", "run.sqlite").message
    assert tba_buffer("restore", "backup.sqlite", "--to", "run.sqlite").exit_code == 0


def test_a_damaged_database_is_replaced(run_directory, tba_buffer, tmp_path):
    run_directory.store.close()
    (tmp_path / "run.sqlite").write_bytes(b"no database")
    assert tba_buffer("restore", "backup.sqlite", "--to", "run.sqlite").exit_code == 0
    assert count(tmp_path / "run.sqlite") == 2


def test_a_damaged_backup_changes_nothing(run_directory, tba_buffer, tmp_path):
    run_directory.store.close()
    data = bytearray((tmp_path / "backup.sqlite").read_bytes())
    data[8 * 8192 : 9 * 8192] = b"\xff" * 8192
    (tmp_path / "backup.sqlite").write_bytes(data)
    assert tba_buffer("restore", "backup.sqlite", "--to", "run.sqlite").exit_code == 1
    assert count(tmp_path / "run.sqlite") == 4
    assert not list(tmp_path.glob("*restoring*"))


def test_a_backup_of_another_run_is_refused(run_directory, tba_buffer, harness):
    other = harness()
    other.store.close()
    refused = tba_buffer("restore", "backup.sqlite", "--to", other.store.path)
    assert (refused.exit_code, "holds run test, which" in refused.message) == (2, True)


def test_a_database_is_no_backup_of_itself(run_directory, tba_buffer):
    assert "is the database itself" in tba_buffer("restore", "run.sqlite", "--to", "run.sqlite").message
