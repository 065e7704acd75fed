"""`tba runs`: the states of runs, and where they are found."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tba.buffer.tools.run_results import read_results
from tba.common.errors import StorageError
from tba.common.system.durable import exclusive_lock
from tba.deploy.run_list import list_runs


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


def states(directory: Path, **result: Any) -> dict[str, tuple[str, str]]:
    def read(_: Path) -> list[dict[str, Any]]:
        return [{"run": "r", "steps": 3, "planned": 8, "reward": 0.5, "changed_at": 1e9, "finished": False} | result]

    return {Path(row["directory"]).name: (row["state"], row["why"]) for row in list_runs(directory, read)}


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


def test_a_run_is_listed_with_its_steps_and_its_last_reward(filled, tmp_path):
    (row,) = read_results(filled)
    assert (row["run"], row["steps"], row["finished"]) == ("test", 1, False)
    folder = tmp_path / "runs/a"
    folder.mkdir(parents=True)
    filled.rename(folder / "buffer.sqlite")
    evaluation = {"run": "test", "step": 1, "version": 1, "prompts": 9, "prompt_set": "p", "accuracy": 0.5}
    (folder / "eval.jsonl").write_text(json.dumps(evaluation) + "\n")
    (listed,) = list_runs(tmp_path / "runs", read_results)
    assert (listed["run"], listed["state"], listed["accuracy"]) == ("test", "stopped", 0.5)


def test_a_database_that_cannot_be_read_is_a_row(make_run, tmp_path):
    make_run("other")

    def read(path: Path) -> list[dict[str, Any]]:
        raise StorageError(f"{path.name} is not a buffer database")

    (row,) = list_runs(tmp_path, read)
    assert (row["state"], row["why"]) == ("unreadable", "buffer.sqlite is not a buffer database")
