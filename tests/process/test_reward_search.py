"""Rewards that misbehave under a real `tba search`: rows get the error, the searcher continues, no process remains."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tba.common.errors import EXIT_CONFIG
from tba.common.system.orphan_guard import session_of
from tba.tests.helpers.announcer import Announcer
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.reward_server import serving
from tba.tests.process.conftest import arithmetic

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


class Searching:
    """A buffer with weights, and one searcher of a task."""

    def __init__(self, run: Any, start_tba: Callable[..., Any], model: Path, folder: Path) -> None:
        self._run = run
        self.query = run.query
        self._start_tba = start_tba
        start_tba("buffer", "serve", "--config", run.file)
        self.announcer = Announcer(run.address, model, folder / "snapshots")
        self.announcer.announce(0)
        self.log = folder / "tba1.log"

    def search(self, *options: str) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = self._start_tba("search", "--config", self._run.file, *options)
        return process

    def rows(self) -> list[tuple[str, float, str | None, dict[str, float], int]]:
        """(prompt, reward, error, parts, visit) of every trajectory, in order."""
        sql = (
            "SELECT p.key, reward, error, reward_parts, visit FROM trajectory_rows t JOIN prompts p ON p.id = t.prompt"
        )
        found = self.query(f"{sql} ORDER BY t.id")
        return [(key, reward, error, json.loads(parts), visit) for key, reward, error, parts, visit in found]


@pytest.fixture
def searching(make_config, start_tba, example_model, tmp_path, monkeypatch):
    """Makes a `Searching`; keyword arguments are keys of the task's section, or the section of the reward model."""
    folder = tmp_path / "misdeeds"
    folder.mkdir()
    monkeypatch.setenv("HOSTILE_FOLDER", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
    made: list[Searching] = []

    def make(reward_model: dict[str, Any] | None = None, **task: Any) -> Searching:
        sections = arithmetic(
            train={"prompts_per_step": 1},
            reward_model=reward_model or {},
            task={"reward_workers": 2, "reward_seconds": 3.0, "reward_memory_mib": 256} | task,
            search={"max_in_flight": 16},
        )
        run = make_config(**sections)
        made.append(Searching(run, start_tba, example_model, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.announcer.client.close()


def test_each_faulty_reward_is_a_row_with_an_error_and_the_search_continues(searching):
    here = searching(name="hostile_task:HostilePrompts")
    searcher = here.search()
    # The group of a reward that hangs is the last one; many more come after it.
    wait_until(lambda: "hangs" in {key for key, *_ in here.rows()})
    before = len(here.rows())
    wait_until(lambda: len(here.rows()) > before + 10 * SAMPLES)
    searcher.terminate()
    assert searcher.wait(240) == 0
    rows = here.rows()
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
    log = here.log.read_text()
    assert "more noise" in log
    assert "reward worker replaced" in log


# One searcher, or two under a supervisor, which is killed then.
@pytest.mark.parametrize("options", [(), ("--cpu", "2")])
def test_workers_and_programs_that_a_reward_started_end_with_the_killed_searcher(searching, tmp_path, options):
    here = searching(name="hostile_task:Starter")
    searcher = here.search(*options)
    pids = tmp_path / "misdeeds/pids"
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    wait_until(here.rows)
    worker, program = map(int, pids.read_text().split())
    assert session_of(program) == worker
    searcher.kill()
    searcher.wait()
    wait_until(lambda: session_of(worker) is None and session_of(program) is None)


def test_a_task_that_does_not_load_in_a_worker_ends_the_searcher_with_an_error(searching):
    here = searching(name="hostile_task:HeldBack")
    assert here.search().wait(240) == EXIT_CONFIG
    *_, sentence = [line for line in here.log.read_text().splitlines() if "no licence server" in line]
    assert (
        "in a reward worker: task.name hostile_task:HeldBack cannot be loaded: OSError: no licence server" in sentence
    )


def test_a_reward_server_that_fails_and_dies_leaves_rows_with_errors_and_the_search_continues(searching):
    def counts() -> tuple[int, int]:
        errors = [error is not None for _, _, error, _, _ in here.rows()]
        return errors.count(False), errors.count(True)

    with serving() as server:
        here = searching({"url": server.url, "time_limit_seconds": 0.5, "weight": 0.5})
        searcher = here.search()
        wait_until(lambda: counts()[0] > SAMPLES)
        server.fail("400", 3)
        wait_until(lambda: counts()[1] == 3)
        before = counts()[0]
        wait_until(lambda: counts()[0] > before + 10 * SAMPLES)
    wait_until(lambda: counts()[1] > 10 * SAMPLES)
    searcher.terminate()
    assert searcher.wait(240) == 0
    sql = "SELECT prompt_text, text, reward, reward_parts FROM trajectories WHERE error IS NULL"
    for prompt, response, reward, parts in here.query(sql):
        logit = len(prompt + response) / 10
        assert json.loads(parts)["reward_model"] == pytest.approx(logit)
        assert reward == pytest.approx(json.loads(parts)["correct"] + 0.5 * logit)
    reasons = [error for _, _, error, _, _ in here.rows() if error is not None]
    assert all(reason.startswith("reward: model: not scored: http://") for reason in reasons)
    assert "status 400" in " ".join(reasons)
    assert "ConnectError" in " ".join(reasons)
