"""`tba runs`: the states of runs, and where they are found."""

import shutil
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tba.buffer.tools.stats import read_results
from tba.common.config import Config
from tba.common.evaluations import record_evaluations
from tba.common.system.durable import exclusive_lock
from tba.deploy.run_list import ended_run, list_runs
from tba.tests.helpers.buffer import change
from tba.tests.helpers.checks import not_none


@pytest.fixture
def make_run(tmp_path: Path):
    """Make a directory that looks like that of a run; `lock` is the content of the launcher's lock file."""

    def make(name: str, lock: str | None = None, *, log: bytes = b"") -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "buffer.sqlite").touch()
        (folder / "buffer.sqlite-wal").write_bytes(log)
        if lock is not None:
            (folder / "launcher.lock").write_text(lock)
        return folder

    return make


def read(_: Path, **changes: Any) -> list[dict[str, Any]]:
    """What `read_results` returns of a database with one run."""
    return [{"run": "r", "steps": 8, "planned": 8, "reward": 0.746, "changed_at": 1e9, "finished": False} | changes]


def states(directory: Path, **result: Any) -> dict[str, tuple[str, str]]:
    rows = list_runs(directory, partial(read, **result))
    return {Path(row["directory"]).name: (row["state"], row["why"]) for row in rows}


def test_the_state_of_a_run_follows_from_its_locks_and_its_end(make_run, tmp_path):
    make_run("stopped", "pid 1 on h\nending\n")
    make_run("failed", "pid 1 on h\nfailed: the trainer failed\nending\n")
    make_run("killed", f"pid 1 on {socket.gethostname()}\n")
    make_run("power", log=b"x")
    make_run("by-hand")
    held = make_run("held", "pid 1 on h\n")
    (tmp_path / "runs/held/snapshots/deep").mkdir(parents=True)
    with exclusive_lock(held / "launcher.lock", ""):
        found = states(tmp_path)
    assert {name: state for name, (state, _) in found.items()} == {
        "stopped": "stopped",
        "failed": "crashed",
        "killed": "crashed",
        "power": "crashed",
        "by-hand": "stopped",
        "held": "running",
    }
    assert found["failed"][1] == "the trainer failed"
    assert {state for state, _ in states(tmp_path, finished=True).values()} == {"finished"}


def test_a_finished_run_whose_buffer_serves_is_finished(make_run, tmp_path):
    served = make_run("served")
    with exclusive_lock(served / "buffer.sqlite.lock", ""):
        assert states(tmp_path, finished=True) == {"served": ("finished", "the buffer still serves")}
        assert states(tmp_path) == {"served": ("running", "")}


def test_a_run_whose_database_is_a_link_has_the_state_of_the_file(make_run, tmp_path):
    folder, disk = make_run("linked"), tmp_path / "disk"
    disk.mkdir()
    (folder / "buffer.sqlite").rename(disk / "rows.sqlite")
    (folder / "buffer.sqlite").symlink_to(disk / "rows.sqlite")
    with exclusive_lock(disk / "rows.sqlite.lock", ""):
        assert states(tmp_path / "runs") == {"linked": ("running", "")}
    (disk / "rows.sqlite-wal").write_bytes(b"x")
    assert states(tmp_path / "runs")["linked"][0] == "crashed"


def test_runs_without_a_name_are_listed_by_their_directory(make_run, tmp_path):
    make_run("first")
    make_run("second")
    rows = list_runs(tmp_path, partial(read, run="run"))
    assert {(row["name"], row["run"]) for row in rows} == {("first", "run"), ("second", "run")}


def test_a_run_is_listed_with_its_steps_and_its_last_reward(filled, tmp_path):
    (row,) = read_results(filled)
    assert (row["run"], row["steps"], row["finished"]) == ("test", 1, False)
    folder = tmp_path / "runs/a"
    folder.mkdir(parents=True)
    filled.rename(folder / "buffer.sqlite")
    record_evaluations(folder, [{"run": "test", "step": 1, "version": 1, "prompts": 9, "accuracy": 0.5}])
    (listed,) = list_runs(tmp_path / "runs", read_results)
    assert (listed["run"], listed["state"], listed["accuracy"]) == ("test", "stopped", 0.5)


def test_a_database_that_cannot_be_read_is_a_row(make_run, tmp_path):
    make_run("other")
    (row,) = list_runs(tmp_path, read_results)
    assert (row["state"], "is not a buffer database" in row["why"]) == ("unreadable", True), row["why"]


@pytest.fixture
def new_york(monkeypatch):
    """A local time that is not UTC."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("new_york")
def test_a_database_with_odd_values_hides_no_other_run(filled, tmp_path):
    changes = {
        "a": "UPDATE batches SET metrics = '[1]', trained_at = 0.0",
        "b": "UPDATE starts SET config = '{nope'",
        "c": "UPDATE batches SET trained_at = 1e300",
        "d": "UPDATE batches SET metrics = '{nope'",
    }
    for name, sql in changes.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        path = shutil.copy(filled, tmp_path / "runs" / name / "buffer.sqlite")
        change(path, sql)
    rows = {Path(row["directory"]).name: row for row in list_runs(tmp_path / "runs", read_results)}
    found = {name: (row["state"], row["why"].partition(": ")[2]) for name, row in rows.items()}
    unreadable = ("unreadable", "malformed JSON")
    assert found == {"a": ("stopped", ""), "b": unreadable, "c": ("stopped", ""), "d": unreadable}
    assert (rows["a"]["changed"], rows["a"]["reward"], rows["c"]["changed"]) == ("1970-01-01 00:00:00 UTC", None, "")


def config_of(folder: Path) -> Config:
    return Config.model_validate({"run": {"dir": str(folder), "name": "r"}})


def test_a_finished_run_that_nothing_serves_is_described_with_its_result(make_run):
    folder = make_run("done")
    record_evaluations(folder, [{"run": "r", "version": 8, "step": 8, "prompts": 4, "accuracy": 0.887}])
    config, finished = config_of(folder), partial(read, finished=True)
    sentence = "is finished, and nothing serves it any more: 8/8 steps, reward 0.746, accuracy 0.887"
    assert sentence in not_none(ended_run(config, finished))["explanation"]
    with exclusive_lock(folder / "buffer.sqlite.lock", ""):
        assert ended_run(config, finished) is None
        assert ended_run(config, read) is None


def test_the_status_says_how_an_offline_run_and_one_whose_trainer_waits_go_on(make_run):
    folder = make_run("other", log=b"x")

    def told(**changes: Any) -> str:
        sentence: str = not_none(ended_run(config_of(folder), partial(read, **changes)))["explanation"]
        return sentence

    offline = "`tba train --offline --buffer runs/a/buffer.sqlite --resume` continues it"
    assert offline in told(source="runs/a/buffer.sqlite")
    assert "`tba run FILE --resume` continues it" in told()
    with exclusive_lock(folder / "trainer.lock", ""):
        assert "its trainer waits for the buffer: `tba buffer serve`" in told()


@pytest.mark.slow
def test_the_status_of_a_run_that_ended_early_says_how_to_continue_it(filled, make_run, tba_here):
    folder = make_run("early", "pid 1 on h\ncommand: tba run a.toml --set b=1\nfailed: no disk\nending\n")
    filled.rename(folder / "buffer.sqlite")
    outcome = tba_here("status", "--set", f"run.dir={folder}", "--set", "run.name=test")
    assert outcome.exit_code == 0
    sentence = f"run test in {folder} has crashed (no disk), and nothing serves it any more: 1"
    assert sentence in outcome.output
    assert "`tba run a.toml --set b=1 --resume` continues it" in outcome.output
    assert tba_here("status", folder).output == outcome.output
    none = tba_here("status", folder.parent)
    assert (none.exit_code, "holds no buffer.sqlite: it is not the directory of a run" in none.message) == (2, True)
