"""A database while a real server writes to it: commands on it, and copies of its files."""

import functools
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tba.buffer.store.store import Store
from tba.buffer.tools.check import check
from tba.common.errors import StorageError
from tba.tests.helpers.checks import not_none, wait_until
from tba.tests.helpers.faults import ROWS, Stored, producing, stored
from tba.tests.process.conftest import clean_environment

# Commands that read do not end with their parent by themselves, and would outlive a killed test.
_PROGRAM = "from tba.cli import main\nfrom tba.common.system.process import die_with_parent\ndie_with_parent()\nmain()"
TBA = [sys.executable, "-c", _PROGRAM]


@pytest.fixture
def writing(start_tba, run_config):
    """A server and a searcher that puts continuously. Returns a function that counts the acknowledged rows."""
    start_tba("buffer", "serve", "--config", run_config.file)
    with producing(run_config.address, 1, tokens=2, window=1) as (producer,):
        wait_until(lambda: producer.acknowledged)
        yield lambda: len(producer.acknowledged) * ROWS


def test_a_live_buffer_is_queried_checked_and_exported_while_the_server_writes(writing, tba_here, run_config, tmp_path):
    def counted() -> int:
        query = "SELECT COUNT(*) AS n FROM trajectories"
        return tba_here("buffer", "query", query, "--json", "--config", run_config.file).json[0]["n"]

    before = writing()
    assert counted() >= before
    # The query did not block the server.
    wait_until(lambda: writing() > before)
    result = tba_here("buffer", "check", "--config", run_config.file)
    assert result.exit_code == 0, result.output
    before = writing()
    assert tba_here("buffer", "export", "rows.jsonl", "--config", run_config.file).exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) >= before
    assert [row["sequence"] for row in rows] == list(range(len(rows)))


def test_tail_follows_until_ctrl_c(writing, run_config, tmp_path):
    command = [*TBA, "buffer", "tail", "-n", "1", "-f", "--json", "--config", run_config.file]
    environment = {**clean_environment(), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        ids = [json.loads(not_none(process.stdout).readline())["id"] for _ in range(20)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert ids == list(range(ids[0], ids[0] + 20))
    assert (process.returncode, errors) == (0, "")


def test_an_import_goes_through_the_running_server_unless_it_is_of_another_run(writing, tba_here, run_config, tmp_path):
    (tmp_path / "demos.jsonl").write_text(
        "".join(json.dumps({"prompt_ids": [1], "response_ids": [2, n], "prompt_key": "p0"}) + "\n" for n in range(100))
    )
    command = ("buffer", "import", "demos.jsonl", "--json", "--config", run_config.file)
    for new in (100, 0):
        result = tba_here(*command)
        assert result.exit_code == 0, result.message
        assert result.json["new"] == new
    refused = tba_here(*command, "--set", "run.name=other")
    assert (refused.exit_code, "belongs to run test, and run.name is other" in refused.message) == (78, True)
    query = "SELECT role, trajectories FROM clients WHERE role = 'importer'"
    result = tba_here("buffer", "query", query, "--json", "--config", run_config.file)
    assert result.json == [{"role": "importer", "trajectories": 100}]


def test_ctrl_c_ends_a_long_query_immediately(writing, run_config, tmp_path):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    command = [*TBA, "buffer", "query", endless, "--config", run_config.file]
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        # The query prints nothing, but its process opens the database.
        wait_until(lambda: str(run_config.database) in {file.path for file in psutil.Process(process.pid).open_files()})
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (1, 130)
    assert "Traceback" not in errors
    assert "error:" not in errors


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


def test_a_copy_made_under_load_is_a_prefix_or_is_reported_as_damaged(start_tba, tba, run_config, tmp_path):
    """A copy of the file alone, or of the file and its log."""
    start_tba("buffer", "serve", "--config", run_config.file)
    copies = []
    with producing(run_config.address, 3, tokens=512) as producers:
        for n in range(COPIES):
            # 6 MiB: some copies are made during a checkpoint.
            more = sum(producer.posted for producer in producers) + 400
            wait_until(
                functools.partial(lambda more: sum(producer.posted for producer in producers) > more, more),
                what="it grows",
            )
            for name, log in ((f"{n}", False), (f"{n}-log", True)):
                copies.append(copied(run_config.database, tmp_path / name, log=log))
    # Not while the producers work: each check takes as long as hundreds of puts.
    alone, with_log = ([is_sound(copy) for copy in copies[first::2]] for first in (0, 1))
    assert any(alone)
    assert any(with_log)
    for sound in set(alone):
        result = tba("buffer", "check", "--buffer", str(tmp_path / str(alone.index(sound)) / "buffer.sqlite"))
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
        sequences = sorted(found.sequences(producer))
        assert len(sequences) % ROWS == 0
        # A producer that connects again sends the puts that are not answered, at most four, after later ones.
        settled = max(0, len(sequences) - 3 * ROWS)
        assert sequences[:settled] == list(range(settled))
