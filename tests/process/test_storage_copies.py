"""Files copied from a running server: the readable rows are a prefix of the puts, or the copy is refused."""

import functools
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tba.buffer.store.store import Store
from tba.buffer.tools.check import check
from tba.common.errors import StorageError
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.faults import ROWS, Stored, producing, stored

COPIES = 10


def log_of(database: Path) -> Path:
    return database.with_name(database.name + "-wal")


@pytest.fixture
def killed_at_work(start_tba, run_config):
    """The files of a server that was killed before its first checkpoint, which a limit of puts keeps out of reach."""
    process = start_tba("buffer", "serve", "--config", run_config.file)
    with producing(run_config.address, 2, tokens=64, limit=20) as producers:
        wait_until(lambda: all(len(producer.acknowledged) > 15 for producer in producers), what="some are stored")
        process.kill()
        process.wait()
    return run_config.database


def copied(database: Path, folder: Path, *, log: bool = True) -> Path:
    """Copy the database, then its WAL."""
    folder.mkdir()
    copy = folder / database.name
    shutil.copyfile(database, copy)
    if log:
        shutil.copyfile(log_of(database), log_of(copy))
    return copy


@pytest.mark.parametrize("log", [False, True], ids=["file", "file and log"])
def test_a_copy_made_under_load_is_a_prefix_or_is_reported_as_damaged(start_tba, tba, run_config, tmp_path, log):
    start_tba("buffer", "serve", "--config", run_config.file)
    verdicts = []
    with producing(run_config.address, 3, tokens=512) as producers:
        for n in range(COPIES):
            # 1.6 MiB: some copies are made during a checkpoint.
            more = sum(producer.posted for producer in producers) + 100
            wait_until(
                functools.partial(lambda more: sum(producer.posted for producer in producers) > more, more),
                30,
                "it grows",
            )
            verdicts.append(is_sound(copied(run_config.database, tmp_path / str(n), log=log)))
    assert any(verdicts)
    for sound in set(verdicts):
        result = tba("buffer", "check", "--buffer", str(tmp_path / str(verdicts.index(sound)) / "buffer.sqlite"))
        assert (result.returncode == 0, "Traceback" in result.stderr) == (sound, False)


def test_a_database_and_a_log_of_different_times_are_refused_in_one_sentence(killed_at_work, tmp_path):
    source, torn = copied(killed_at_work, tmp_path / "source"), tmp_path / "torn"
    with closing(sqlite3.connect(source, isolation_level=None)) as server:
        server.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        torn = copied(source, torn, log=False)
        server.execute("UPDATE payloads SET response_ids = RANDOMBLOB(9000)")
        # All of this is now in the database file alone.
        server.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        server.execute("DELETE FROM payloads WHERE trajectory % 7 = 0")
        shutil.copyfile(log_of(source), log_of(torn))
    refusal = r"is damaged \(.*\): was it copied while a server wrote to it\?"
    with pytest.raises(StorageError, match=refusal) as refused:
        Store(torn, durability="process")
    assert "\n" not in str(refused.value)
    torn.unlink()
    log_of(torn).unlink()
    # The refused store has released the lock.
    Store(torn, durability="process").close()


def is_sound(copy: Path) -> bool:
    """Whether the check calls a copy sound; if so, its rows are. A store opens the copy, or refuses in one line."""
    sound, reason = False, ""
    try:
        sound = all(finding["result"] != "fail" for finding in check(copy))
        Store(copy, durability="process").close()
    except StorageError as error:
        sound, reason = False, str(error)
    assert "\n" not in reason
    if sound:
        assert_whole_puts_without_a_gap(stored(copy))
    return sound


def assert_whole_puts_without_a_gap(found: Stored) -> None:
    assert [id_ for id_, _, _ in found.rows] == list(range(1, len(found.rows) + 1))
    for producer in range(3):
        sequences = found.sequences(producer)
        assert sequences == list(range(len(sequences)))
        assert len(sequences) % ROWS == 0
