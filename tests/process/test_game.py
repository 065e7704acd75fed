"""Episodes in whole runs: the demo of the game, processes killed in mid-episode, and environments that misbehave."""

import contextlib
import json
import re
import shlex
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pytest

from tba.tests.helpers.buffer import ask
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.whole_run import STEPS, check_history, children_of, small_sections, starts_of
from tba.tests.process.conftest import ROOT, changed, free_port, merged, run_example
from tba.tests.process.test_demo import check_gain
from tba.tests.runner import FULL_SIZE, size

CONFIG = "examples/game/demo.toml"
# Few enough that a run of a few steps has several epochs.
_PROMPTS = 24
SLOW = """
import time
from tba.searcher.tasks.games import GuessTask

class Slow(GuessTask):
    def environment(self, prompt):
        game = super().environment(prompt)
        quick = game.step

        def step(reply, finished):
            time.sleep(0.02)
            return quick(reply, finished)

        game.step = step
        return game
"""
HOSTILE = """
from hostile_environments import misbehave
from tba.searcher.tasks.games import GuessTask

class Hostile(GuessTask):
    def environment(self, prompt):
        game = super().environment(prompt)
        misdeed = {"0": "raises", "1": "exits", "2": "hangs", "3": "forks"}.get(prompt.key, "")
        play = game.step
        game.step = lambda *reply: misbehave(misdeed) and play(*reply)
        return game
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The untrained model of the game."""
    directory = tmp_path_factory.mktemp("game") / "start"
    run_example("game/prepare.py", "--out", directory)
    return directory


def kill(processes) -> list[int]:
    for process in processes:
        process.kill()
    return [process.pid for process in processes]


def is_worker(process: psutil.Process) -> bool:
    # It may have just ended.
    with contextlib.suppress(psutil.Error):
        return "task_scorer" in " ".join(process.cmdline())
    return False


def steps_done(run, steps: int) -> bool:
    return len(run.lines()) >= steps


def started_again(run, role: str) -> bool:
    return starts_of(run, role) >= 2


def check_that_long_episodes_were_leased_first(run) -> None:
    """Check that the visits of a batch are in the order of the mean length of eight episodes before, if they differ."""
    expected = run.query(
        """SELECT v.epoch, v.place / 8, (SELECT AVG(n) FROM (SELECT response_tokens AS n FROM trajectory_rows t
               WHERE t.prompt = v.prompt AND t.received_at < v.leased_at ORDER BY policy_version DESC, id DESC LIMIT 8))
           FROM visits v WHERE v.epoch > 0 ORDER BY v.epoch, v.place"""
    )
    pairs = [(a, b) for (*at, a), (*then, b) in pairwise(expected) if at == then and None not in (a, b) and a != b]
    # A visit that was leased again after a kill says when that was.
    assert sum(a > b for a, b in pairs) > 0.8 * len(pairs) > 8, pairs


def check_that_a_replay_has_the_same_losses(tba_here, directory, arguments, tmp_path) -> None:
    """Train again from the recorded episodes: on the recorded batches, and on what there was at a step."""
    offline = ("train", "--config", ROOT / CONFIG, *arguments, "--offline", "--buffer", directory / "buffer.sqlite")
    steps = size(3, 500)
    for name, flags, said in (
        ("replay", ("--replay",), f"replayed {steps} steps; losses: bit for bit the same"),
        ("early", ("--as-of", steps - 1, "--set", "train.steps=2"), ""),
    ):
        done = tba_here(*offline, *flags, "--set", f"run.dir={tmp_path / name}")
        assert (done.exit_code, said in done.output) == (0, True), done.message
        assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == (2 if name == "early" else steps)


@pytest.fixture
def make_game(start, make_config, tmp_path):
    """Return a function that makes a run of a few steps whose task is a file with this text."""

    def make(text: str, **sections: dict[str, Any]) -> Any:
        (tmp_path / "game.py").write_text(text)
        game: dict[str, dict[str, Any]] = {
            "model": {"path": str(start), "dtype": "float32"},
            "task": {"name": "game.py", "options": {"prompts": _PROMPTS}, "limit": 0, "held_out_limit": 0},
            "search": {"max_turns": 3, "turn_tokens": 2, "max_tokens": 12, "samples_per_prompt": 4},
        }
        return make_config(**small_sections(**merged(game, sections)))

    return make


def test_processes_killed_in_the_middle_of_episodes_lose_nothing(make_game, start_tba):
    # Without a searcher no step is made, so the run does not end before the last kill.
    buffer = {"max_staleness": 2, "lease_seconds": 4.0}
    run = make_game(SLOW, buffer=buffer, curriculum={"longest_first": True})
    launcher = start_tba("run", run.file)
    killed = []
    for number, victim in enumerate(("worker", "search", "buffer serve", "train")):
        wait_until(partial(steps_done, run, 2 * number + 1))
        # Some of its episodes are not over.
        wait_until(partial(run.query, "SELECT 1 FROM visits WHERE done_at IS NULL"))
        searcher = children_of(launcher, " search ")[0]
        workers = [child for child in searcher.children() if is_worker(child)]
        killed += kill(workers[:1] if victim == "worker" else children_of(launcher, f" {victim} ")[:1])
        if victim != "worker":
            wait_until(partial(started_again, run, victim), what=f"start of {victim}")
    assert launcher.wait(400) == 0
    check_history(run, killed=killed, prompts=_PROMPTS)
    check_that_long_episodes_were_leased_first(run)
    rows = run.query(
        """SELECT t.stop_reason, t.error IS NULL, t.turns, p.loss_mask, p.logprobs
           FROM trajectory_rows t JOIN payloads p ON p.trajectory = t.id"""
    )
    assert {"completed", "max_turns", "parse_error"} <= {reason for reason, *_ in rows}
    # At most the episode that a killed worker was stepping, and what is left of its group.
    assert sum(not good for _, good, *_ in rows) <= 4
    for _, _, turns, mask, logprobs in rows:
        sampled = np.frombuffer(mask, bool)
        spans = [(turn["start"], turn["start"] + turn["tokens"]) for turn in json.loads(turns)]
        assert np.array_equal(np.flatnonzero(sampled), np.concatenate([np.arange(*span) for span in spans]))
        assert not np.frombuffer(logprobs, "<f4")[~sampled].any()
    assert len(run.lines()) == STEPS


def processes_of(run) -> list[psutil.Process]:
    mark = str(run.directory)
    return [one for one in psutil.process_iter(["environ"]) if mark in (one.info["environ"] or {}).values()]


def test_an_environment_that_fails_closes_its_groups_with_errors_and_the_run_goes_on(make_game, start_tba):
    run = make_game(HOSTILE, buffer={"max_staleness": 2}, task={"reward_seconds": 5.0}, train={"steps": 100_000})
    environment = {"PYTHONPATH": str(ROOT / "tests/helpers"), "HOSTILE_MARK": str(run.directory)}
    launcher = start_tba("run", run.file, **environment)
    answered = """SELECT p.key, COUNT(t.error), MIN(t.error), MIN(t.error_kind) FROM visits v
                  JOIN prompts p ON p.id = v.prompt JOIN trajectory_rows t ON t.visit = v.id
                  WHERE v.done_at IS NOT NULL AND p.key IN ('0', '1', '2', '3') GROUP BY v.id ORDER BY p.key, v.id"""
    expected = {
        "0": (4, "environment of guess: step(): ValueError: no such move", "environment"),
        "1": (4, "environment of guess: step(): the worker died with exit code 3", "worker"),
        "2": (4, "environment of guess: step(): timed out after 5 s", "turn_timeout"),
        "3": (0, None, None),
    }
    wait_until(run.steps_trained)
    # An episode may end with the worker that another one kills.
    wait_until(lambda: {*expected.items()} <= {(key, tuple(row)) for key, *row in run.query(answered)})
    steps = run.steps_trained()
    wait_until(lambda: run.steps_trained() >= steps + 3)
    assert len(processes_of(run)) > 5
    launcher.terminate()
    assert launcher.wait(120) == 0
    wait_until(lambda: not processes_of(run), seconds=20, what="the end of what an environment has started")
    found = {(key, tuple(row)) for key, *row in run.query(answered)}
    assert {*expected.items()} <= found
    assert {errors for key, (errors, *_) in found if key != "3"} == {4}
    rows_of = (
        "SELECT DISTINCT v.done_at IS NULL, (SELECT COUNT(*) FROM trajectory_rows WHERE visit = v.id) FROM visits v"
    )
    assert {*run.query(rows_of)} <= {(0, 4), (1, 0)}
    assert [row["step"] for row in run.lines()] == [*range(run.steps_trained())]


def test_the_demo_of_the_game_gains_by_what_it_is_told(start, tba, tba_here, tmp_path):
    """In full size it gains 30 points, and loses most of them without hints. Small, every stage runs."""
    directory = tmp_path / "demo"
    small = ("train.steps=3", "train.prompts_per_step=4", "task.options={held_out=16}")
    address = f"buffer.address=tcp://127.0.0.1:{free_port()}"
    settings = (f"run.dir={directory}", f"model.path={start}", address, *size(small, ()))
    arguments = changed(*settings)
    result = tba("run", CONFIG, *arguments, timeout=900, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    (told,) = tba_here("eval", "--config", ROOT / CONFIG, *arguments, "--json").json
    assert {"turns", "accuracy"} <= told.keys()
    assert sum(share for name, share in told.items() if name.startswith("stopped_")) == pytest.approx(1)
    check_that_a_replay_has_the_same_losses(tba_here, directory, arguments, tmp_path)
    newest = max((directory / "snapshots").glob("v*"))
    hidden = (f"task.options={{hints=false, held_out={size(16, 300)}}}", f"run.dir={tmp_path / 'hidden'}")
    changes = changed(f"model.path={start}", *hidden)
    (blind,) = tba_here("eval", "--snapshot", newest, "--config", ROOT / CONFIG, *changes, "--json").json
    if FULL_SIZE:
        check_gain(result, directory, points=30)
        assert blind["accuracy"] < told["accuracy"] - 0.3
    played = tba_here("generate", "--play", "held-out-3", "--config", directory).output
    assert re.match(r"user: guess 1 to 7 :\nassistant: ", played)
    assert re.search(r"\nend: (completed|max_turns|parse_error) after [123] turns?: reward [01]\n$", played)
    shown = tba_here("buffer", "show", "1", "--config", directory).output
    assert "turn 0, 1 token by v0" in shown
    checked = tba_here("task", "check", "--config", ROOT / CONFIG, "--set", f"model.path={start}")
    assert checked.exit_code == 0, checked.output


def test_the_commands_of_your_own_environment_train_on_its_episodes(start, tba, tba_here, tmp_path):
    """As docs/episodes.md prints them; small, the last one is a dry run: the other tests have runs of such files."""
    page = (ROOT / "docs/episodes.md").read_text()
    code, commands = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "bash"))
    (tmp_path / "hotter.py").write_text(code)
    *first, run = (shlex.split(line, comments=True)[1:] for line in commands.replace("DIR", str(start)).splitlines())
    assert [command[0] for command in (*first, run)] == ["task", "init", "generate", "run"]
    checked, made, played = (tba_here(*command) for command in first)
    assert (checked.exit_code, made.exit_code, played.exit_code) == (0, 0, 0), checked.message + made.message
    assert "turns per second" in checked.output
    assert re.search(r"\nend: (completed|max_turns|parse_error) after [123] turns?: reward [01]\n", played.output)
    if not FULL_SIZE:
        assert "this run would start" in tba_here(*run, "--dry-run").output
        return
    result = tba(*run, timeout=900)
    assert result.returncode == 0, result.stderr
    assert re.search(r"held-out greedy accuracy: \S+% before, \S+% after", result.stdout)
    (database,) = tmp_path.glob("runs/*/buffer.sqlite")
    assert ask(database, "SELECT MAX(turns), COUNT(error) FROM trajectories") == [(3, 0)]
