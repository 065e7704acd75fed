"""Rewards that misbehave under a real `tba search`: rows get the error, the searcher continues, no process remains."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tba.common.errors import EXIT_CONFIG
from tba.common.system.orphan_guard import session_of
from tba.tests.helpers.checks import wait_until
from tba.tests.process.conftest import RunConfig, arithmetic

SAMPLES = 4
ERRORS = {
    "raises": "reward of hostile: ValueError: lone ? surrogate",
    "hangs": "reward of hostile: timed out after 3 s",
    "exits": "reward of hostile: the worker died with exit code 3",
    "eats": "reward of hostile: out of memory (limit 256 MiB)",
    "nothing": "reward of hostile: TypeError: score returned NoneType, not a Reward",
    "text": "reward of hostile: TypeError: total of a reward is a str, not a number",
    "nan": "reward of hostile: ValueError: a reward must be finite, not nan with parts {}",
}
FOLDER = Path(__file__).parents[1] / "helpers"


@pytest.fixture
def search(make_config, serve_weights, start_tba, tmp_path, monkeypatch):
    """A function that starts a searcher of a hostile task. Returns the run and the process."""
    (tmp_path / "misdeeds").mkdir()
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path / "misdeeds"))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)

    def start(task: str, *options: str) -> tuple[RunConfig, subprocess.Popen[bytes]]:
        limits = {"reward_workers": 2, "reward_seconds": 3.0, "reward_memory_mib": 256}
        named = {"name": f"hostile_task:{task}"} | limits
        run = make_config(**arithmetic(train={"prompts_per_step": 1}, task=named, search={"max_in_flight": 16}))
        serve_weights(run)
        return run, start_tba("search", "--config", run.file, *options)

    return start


def rows_of(run) -> list[tuple[str, float, str | None, dict[str, float], int]]:
    """(prompt, reward, error, parts, visit) of every trajectory, in order."""
    sql = "SELECT p.key, reward, error, reward_parts, visit FROM trajectory_rows t JOIN prompts p ON p.id = t.prompt"
    found = run.query(f"{sql} ORDER BY t.id")
    return [(key, reward, error, json.loads(parts), visit) for key, reward, error, parts, visit in found]


def test_each_faulty_reward_is_a_row_with_an_error_and_the_search_continues(search, tmp_path):
    run, searcher = search("HostilePrompts")
    # The group of a reward that hangs is the last one; many more come after it.
    wait_until(lambda: "hangs" in {key for key, *_ in rows_of(run)})
    before = len(rows_of(run))
    wait_until(lambda: len(rows_of(run)) > before + 10 * SAMPLES)
    searcher.terminate()
    assert searcher.wait(240) == 0
    rows = rows_of(run)
    assert {key: error for key, _, error, _, _ in rows if error} == ERRORS
    assert sum(error is not None for _, _, error, _, _ in rows) == len(ERRORS)
    groups: dict[int, list[tuple[float, str | None]]] = {}
    for _, reward, error, _, visit in rows:
        groups.setdefault(visit, []).append((reward, error))
    for group in groups.values():
        assert len(group) == SAMPLES
        assert {reward for reward, error in group if error is None} == {1.0}
        assert {reward for reward, error in group if error} <= {0.0}
    loaded = [parts for *_, parts, _ in rows if parts]
    assert loaded
    assert {name for parts in loaded for name, there in parts.items() if there} == set(), "workers import no torch"
    log = (tmp_path / "tba1.log").read_text()
    assert "more noise" in log
    assert "reward worker replaced" in log


# One searcher, or two under a supervisor, which is killed then.
@pytest.mark.parametrize("options", [(), ("--cpu", "2")])
def test_workers_and_programs_that_a_reward_started_end_with_the_killed_searcher(search, tmp_path, options):
    run, searcher = search("Starter", *options)
    pids = tmp_path / "misdeeds/pids"
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    wait_until(lambda: rows_of(run))
    worker, program = map(int, pids.read_text().split())
    assert session_of(program) == worker
    searcher.kill()
    searcher.wait()
    wait_until(lambda: session_of(worker) is None and session_of(program) is None)


def test_a_task_that_does_not_load_in_a_worker_ends_the_searcher_with_an_error(search, tmp_path):
    assert search("HeldBack")[1].wait(240) == EXIT_CONFIG
    *_, sentence = [line for line in (tmp_path / "tba1.log").read_text().splitlines() if "no licence server" in line]
    assert (
        "in a reward worker: task.name hostile_task:HeldBack cannot be loaded: OSError: no licence server" in sentence
    )
