"""Episodes in whole runs: the demo of the game, and a run whose processes are killed in the middle of episodes."""

import contextlib
import json
import re
import runpy
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pytest

from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.whole_run import STEPS, check_history, children_of, small_sections, starts_of
from tba.tests.process.conftest import ROOT, free_port
from tba.tests.process.test_demo import check_gain
from tba.tests.runner import size

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


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The untrained model of the game."""
    directory = tmp_path_factory.mktemp("game") / "start"
    # In this process, which has torch already.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [*sys.path])
        patched.setattr(sys, "argv", ["prepare.py", "--out", str(directory)])
        runpy.run_path(str(ROOT / "examples/game/prepare.py"), run_name="__main__")
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


def test_processes_killed_in_the_middle_of_episodes_lose_nothing(start, make_config, start_tba, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    game: dict[str, dict[str, Any]] = {
        "model": {"path": str(start), "dtype": "float32"},
        "task": {"name": "slow.py", "options": {"prompts": _PROMPTS}, "limit": 0, "held_out_limit": 0},
        "search": {"max_turns": 3, "turn_tokens": 2, "max_tokens": 12, "samples_per_prompt": 4},
        # Without a searcher no step is made, so the run does not end before the last kill.
        "buffer": {"max_staleness": 2, "lease_seconds": 4.0},
        "curriculum": {"longest_first": True},
    }
    run = make_config(**small_sections(**game))
    launcher = start_tba("run", run.file)
    killed = []
    for number, victim in enumerate(("worker", "search", "buffer serve", "train")):
        wait_until(partial(steps_done, run, 2 * number + 1))
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


def test_the_demo_of_the_game_gains_by_what_it_is_told(start, tba, tba_here, tmp_path):
    """In full size it gains 30 points, and loses most of them without hints. Small, every stage runs."""
    directory = tmp_path / "demo"
    small = ("train.steps=3", "train.prompts_per_step=4", "task.options={held_out=16}")
    address = f"buffer.address=tcp://127.0.0.1:{free_port()}"
    settings = (f"run.dir={directory}", f"model.path={start}", address, *size(small, ()))
    arguments = [part for value in settings for part in ("--set", value)]
    result = tba("run", CONFIG, *arguments, timeout=900, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    (told,) = tba_here("eval", "--config", ROOT / CONFIG, *arguments, "--json").json
    assert {"turns", "accuracy"} <= told.keys()
    assert sum(share for name, share in told.items() if name.startswith("stopped_")) == pytest.approx(1)
    newest = max((directory / "snapshots").glob("v*"))
    hidden = (f"task.options={{hints=false, held_out={size(16, 300)}}}", f"run.dir={tmp_path / 'hidden'}")
    changes = [part for value in (f"model.path={start}", *hidden) for part in ("--set", value)]
    (blind,) = tba_here("eval", "--snapshot", newest, "--config", ROOT / CONFIG, *changes, "--json").json
    if size(False, True):
        check_gain(result, directory, points=30)
        assert blind["accuracy"] < told["accuracy"] - 0.3
    played = tba_here("generate", "--play", "held-out-3", "--config", directory).output
    assert re.match(r"user: guess 1 to 7 :\nassistant: ", played)
    assert re.search(r"\nend: (completed|max_turns|parse_error) after [123] turns?: reward [01]\n$", played)
    shown = tba_here("buffer", "show", "1", "--config", directory).output
    assert "turn 0, 1 token by v0" in shown
    checked = tba_here("task", "check", "--config", ROOT / CONFIG, "--set", f"model.path={start}")
    assert checked.exit_code == 0, checked.output
