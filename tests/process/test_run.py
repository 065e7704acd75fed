"""Whole runs as real processes: they finish although processes are killed, and no data is lost."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tba.common.errors import EXIT_CONFIG, EXIT_INTERRUPTED
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.token_log_ratios import check_token_log_ratios
from tba.tests.process.conftest import arithmetic, merged
from tba.tests.runner import FULL_SIZE

STEPS = 12
SAMPLES = 4
PROMPTS = 96


@pytest.fixture
def small_run(make_config):
    """Return a function that makes a run of a few steps on the arithmetic example, with one Transformers searcher."""

    def make(**sections: dict[str, Any]):
        defaults: dict[str, dict[str, Any]] = {
            "buffer": {"recency_window": 8, "lease_seconds": 4.0},
            "launch": {"drain_seconds": 10.0},
            "task": {"limit": PROMPTS},
            "search": {"samples_per_prompt": SAMPLES},
            "train": {"steps": STEPS, "checkpoint_every": 3, "keep_snapshot_every": 6},
        }
        return make_config(**arithmetic(**merged(defaults, sections)))

    return make


def query(run, sql: str) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(f"file:{run.database}?mode=ro", uri=True)) as database, database:
        return database.execute(sql).fetchall()


def steps_trained(run) -> int:
    try:
        return query(run, "SELECT COUNT(trained_at) FROM batches")[0][0]
    except sqlite3.OperationalError:
        return 0


def children_of(process: subprocess.Popen[bytes], command: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children():
        # The process may have just ended.
        with contextlib.suppress(psutil.NoSuchProcess):
            if command in " ".join(child.cmdline()):
                found.append(child)
    return found


def kill_child(launcher: subprocess.Popen[bytes], role: str) -> int:
    """Send SIGKILL to one child of a role, and return its process id."""
    child = children_of(launcher, f" {role} ")[0]
    child.kill()
    return child.pid


def metrics_of(run) -> list[dict]:
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


def check_history(run, steps: int = STEPS, killed: Sequence[int] = ()) -> None:
    """Check that no trajectory, visit or step is missing or duplicated. `killed`: processes that received SIGKILL."""
    assert query(run, "PRAGMA integrity_check") == [("ok",)]
    # Each sender numbers its rows from 0, so a gap is a lost row. A killed sender may leave a gap: puts that a crash of
    # the buffer interrupted, and that the sender did not live to repeat.
    numbered = query(
        run,
        """SELECT s.pid, COUNT(*), MAX(t.sequence) FROM trajectory_rows t JOIN senders s ON s.id = t.sender
           GROUP BY s.id ORDER BY s.id""",
    )
    assert [(pid, rows, last) for pid, rows, last in numbered if rows != last + 1 and pid not in killed] == []
    # A finished visit has S trajectories, an unfinished one has none.
    visits = query(
        run,
        """SELECT v.epoch, v.prompt, v.done_at IS NOT NULL, COUNT(t.id)
           FROM visits v LEFT JOIN trajectory_rows t ON t.visit = v.id GROUP BY v.id""",
    )
    # The spool of a killed searcher is delivered, even if another searcher has answered its visit since.
    twice = {(1, 2 * SAMPLES)} if killed else set()
    assert {(done, rows) for _, _, done, rows in visits} <= {(1, SAMPLES), (0, 0)} | twice
    # A finished epoch has one answered visit per prompt.
    answered = [(epoch, prompt) for epoch, prompt, done, _ in visits if done]
    assert len(answered) == len(set(answered))
    # The newest two epochs may have unfinished visits when the run ends.
    for epoch in range(max(epoch for epoch, *_ in visits) - 1):
        assert sum(answered_epoch == epoch for answered_epoch, _ in answered) == PROMPTS
    # Every step was trained once and is logged once.
    assert query(run, "SELECT step FROM batches WHERE trained_at IS NOT NULL ORDER BY step") == [
        (s,) for s in range(steps)
    ]
    assert [row["step"] for row in metrics_of(run)] == list(range(steps))
    check_numbers_of_rows(run)


def check_rewards(run, steps: int) -> None:
    """Check that every step was trained, on rows whose mean reward is the metric of the step."""
    sql = "SELECT step, AVG(reward) FROM consumption WHERE trained_at IS NOT NULL GROUP BY step ORDER BY step"
    found = [(row["step"], pytest.approx(row["reward_mean"], abs=1e-6)) for row in metrics_of(run)]
    assert query(run, sql) == found
    assert len(found) == steps


def check_numbers_of_rows(run) -> None:
    """Check that every trained row has numbers, and that their means are the metrics of the step."""
    sql = """SELECT c.step, COUNT(*), COUNT(c.logprob + log_ratio + advantage + weight + skipped),
             AVG(log_ratio), AVG(c.logprob - r.logprob),
             SUM(mismatch * t.response_tokens) / SUM(CASE WHEN mismatch IS NOT NULL THEN t.response_tokens END)
             FROM consumption c JOIN trajectory_rows t ON t.id = c.trajectory
             JOIN reference_logprobs r ON r.trajectory = t.id
             WHERE c.trained_at IS NOT NULL GROUP BY c.step ORDER BY c.step"""
    for (step, rows, complete, *means), metrics in zip(query(run, sql), metrics_of(run), strict=True):
        assert (step, complete) == (metrics["step"], rows)
        known = [metrics.get(name, math.nan) for name in ("log_ratio_mean", "kl", "mismatch_mean")]
        found = [math.nan if mean is None else mean for mean in means]
        assert found == pytest.approx(known, rel=1e-4, abs=1e-6, nan_ok=True)
    check_token_log_ratios(run.database)


def log_of(tmp_path: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("**/*.log")))


def test_a_run_ends_with_a_complete_history_and_can_be_moved_and_resumed(small_run, start_tba, tba, tmp_path):
    run = small_run(eval={"at_end": True})
    launcher = start_tba("run", run.file)
    wait_until(lambda: children_of(launcher, " eval "))
    evaluation = children_of(launcher, " eval ")[0]
    evaluation.suspend()
    second = tba("run", run.file, "--resume")
    evaluation.resume()
    # A launcher that still evaluates is not about to end, so the second one does not wait.
    assert (second.returncode, "is in use by another `tba run`" in second.stderr) == (1, True)
    assert launcher.wait(400) == 0
    check_history(run)
    assert "held-out greedy accuracy:" in log_of(tmp_path)
    assert (run.directory / "run.png").stat().st_size > 10_000
    assert next(json.loads(line)["step"] for line in (run.directory / "eval.jsonl").read_text().splitlines()) == 0
    assert list(run.directory.glob("tensorboard/events*"))
    moved = run.directory.rename(tmp_path / "moved")
    (listed,) = json.loads(tba("runs", str(tmp_path), "--json").stdout)
    found = (listed["state"], listed["steps"], listed["directory"], listed["accuracy"] is not None)
    assert found == ("finished", f"{STEPS}/{STEPS}", str(moved), True)
    run = dataclasses.replace(run, directory=moved)
    changes = (f"run.dir={moved}", f"train.steps={STEPS + 3}", "eval.at_end=false")
    more = tba("run", run.file, "--resume", *(part for change in changes for part in ("--set", change)))
    assert more.returncode == 0, more.stderr
    check_history(run, steps=STEPS + 3)


def test_a_run_continues_with_its_own_task_and_model_only(small_run, tba, tmp_path):
    model = shutil.copytree(EXAMPLE_MODEL, tmp_path / "model")
    run = small_run(model={"path": str(model), "dtype": "float32"}, train={"steps": 3})
    assert tba("run", run.file).returncode == 0
    before = query(run, "SELECT COUNT(*) FROM starts"), (run.directory / "metrics.jsonl").read_bytes()
    other = ("--set", "task.options={ digits = 1 }", "--set", "train.steps=6")
    for command in (
        ("run", "--resume"),
        ("train", "--resume"),
        ("buffer", "serve"),
        ("eval",),
        ("run", "--resume", "--dry-run"),
    ):
        refused = tba(*command, "--config", run.file, *other)
        assert refused.returncode == EXIT_CONFIG, command
        assert "task.options was {} and is" in refused.stderr + refused.stdout, command
    assert (query(run, "SELECT COUNT(*) FROM starts"), (run.directory / "metrics.jsonl").read_bytes()) == before
    assert not (run.directory / "eval.jsonl").exists()
    # Without a file, a command on a run takes its recorded configuration: no --cpu.
    for command in (("generate", "1+2="), ("eval",)):
        done = tba(*command, "--set", f"run.dir={run.directory}")
        assert done.returncode == 0, done.stderr
    moved = model.rename(tmp_path / "moved")
    changes = (f"model.path={moved}", "train.steps=6", "train.learning_rate=2e-4")
    more = tba("run", run.file, "--resume", *(part for change in changes for part in ("--set", change)))
    assert more.returncode == 0, more.stderr
    check_history(run, steps=6)


def check_served_and_evaluated(run, tba, is_change: Callable[[dict[str, Any]], bool], node: Path) -> None:
    """Check that searchers used snapshots of this kind, all snapshots can be evaluated, and the node is clean."""
    manifests = [json.loads(path.read_text()) for path in run.directory.glob("snapshots/v*/manifest.json")]
    changes = {manifest["version"] for manifest in manifests if is_change(manifest)}
    used = {version for (version,) in query(run, "SELECT DISTINCT policy_version FROM trajectories")}
    assert changes & used
    assert not node.exists(), "a finished run leaves no weights on the node"
    evaluated = tba("eval", "--config", run.file, "--all", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert len(json.loads(evaluated.stdout)) == len(manifests)
    assert not node.exists(), "an evaluation leaves no weights on the node"


JUDGED = """import os
from tba.searcher.tasks.arithmetic import ArithmeticTask
class Judged(ArithmeticTask):
    def score(self, prompt, response, finished):
        if os.path.exists("down") and prompt in self.held_out()[:32]:
            raise ConnectionError("the judge does not answer")
        return super().score(prompt, response, finished)
"""


def test_a_judge_that_is_down_in_the_last_evaluation_is_no_accuracy_and_is_asked_again(small_run, tba, tmp_path):
    """A few of its answers have no score, which is more than 2 %."""
    (tmp_path / "judged.py").write_text(JUDGED)
    (tmp_path / "down").touch()
    task = {"name": "judged:Judged", "held_out_limit": 40}
    run = small_run(task=task, train={"steps": 1}, eval={"at_end": True, "samples": 1})
    done = tba("run", run.file)
    reason = "32 of 40 answers could not be scored: reward of arithmetic: ConnectionError: the judge does not answer"
    assert (done.returncode, f"not measured: {reason}" in done.stderr) == (1, True), done.stderr
    assert f"not measured ({reason}" in done.stdout
    stored = "SELECT accuracy, not_measured, json_extract(metrics, '$.failed') FROM evaluations ORDER BY version"
    for accuracy, why, failed in query(run, stored):
        assert (accuracy, why.startswith(reason), failed) == (None, True, 0.8)
    assert f"last evaluation not measured: {reason}" in tba("runs", tmp_path, "--json").stdout
    (tmp_path / "down").unlink()
    again = tba("eval", "--config", run.file, "--all", "--json")
    assert again.returncode == 0, again.stderr
    assert all(accuracy is not None and why is None for accuracy, why, _ in query(run, stored))
    assert query(run, "SELECT answer FROM trajectories WHERE answer IS NULL") == []
    wrong = tba("eval", "--config", run.file, "--wrong", "--json")
    rows, last = json.loads(wrong.stdout), max(json.loads(again.stdout), key=lambda row: row["step"])
    assert len(rows) == round(40 * (1 - last["accuracy"])) > 0
    for row in rows:
        assert row["prompt"].endswith("=")
        assert row["answer"] != row["response"]


@pytest.mark.parametrize(
    ("is_change", "learning_rate", "lora"),
    [
        pytest.param(lambda manifest: bool(manifest.get("delta")), 2e-6, {}, id="deltas"),
        pytest.param(
            lambda manifest: "adapter_model.safetensors" in manifest["files"],
            1e-4,
            {"rank": 4, "publish": "adapter"},
            id="adapters",
            marks=pytest.mark.needs("peft"),
        ),
    ],
)
def test_deltas_and_adapters_are_served_through_the_socket(small_run, tba, tmp_path, is_change, learning_rate, lora):
    """No file system is shared, and every snapshot of the run can be evaluated."""
    serve = {"serve_snapshots": "tcp://127.0.0.1:*", "snapshots_in": "disk", "keep_snapshots": 99}
    train = serve | {"steps": 6, "learning_rate": learning_rate}
    # Limited, so that the trainer waits for responses by weights that it has published.
    buffer = {"max_staleness": 2}
    search = {"weights_from": "trainer"}
    run = small_run(model={"dtype": "bfloat16"}, buffer=buffer, search=search, train=train, lora=lora)
    result = tba("run", run.file, timeout=400)
    assert result.returncode == 0, result.stderr
    check_history(run, steps=6)
    check_served_and_evaluated(run, tba, is_change, tmp_path / "weights/test")


def starts_of(run, role: str) -> int:
    """Return how often processes of a role have started."""
    if role == "buffer serve":
        return query(run, "SELECT COUNT(*) FROM starts")[0][0]
    name = {"search": "searcher", "train": "trainer"}[role]
    return query(run, f"SELECT COUNT(*) FROM senders WHERE role = '{name}'")[0][0]


STARTS = {"buffer serve": 1, "search": 2, "train": 1}
# Enough steps for the leases of a killed searcher to expire and to be answered by another one.
LONG = 80


@pytest.mark.skipif(not FULL_SIZE, reason="the next test kills all roles in one run")
@pytest.mark.parametrize("role", STARTS)
def test_a_run_survives_sigkill_of_a_role(small_run, start_tba, tmp_path, role):
    run = small_run(train={"steps": LONG}, search={"cpu_searchers": 2})
    launcher = start_tba("run", run.file)
    wait_until(lambda: steps_trained(run) >= 4 and starts_of(run, role) >= STARTS[role])
    killed = kill_child(launcher, role)
    assert launcher.wait(400) == 0, log_of(tmp_path)
    assert starts_of(run, role) > STARTS[role]
    check_history(run, steps=LONG, killed=[killed])


def test_a_run_survives_sigkill_of_one_role_after_the_other(small_run, start_tba, tmp_path):
    # It is stopped when all roles work again: how long their restarts take depends on the machine.
    run = small_run(train={"steps": 100_000}, search={"cpu_searchers": 2})
    launcher = start_tba("run", run.file)
    killed = []
    # The searcher first: it restarts while the other roles restart, and the other searcher continues.
    for step, role in ((3, "search"), (9, "train"), (15, "buffer serve")):
        wait_until(functools.partial(lambda step: steps_trained(run) >= step, step))
        # One that is still loading is not in the database: its restart would not be seen.
        wait_until(functools.partial(lambda role: starts_of(run, role) >= STARTS[role], role))
        killed.append(kill_child(launcher, role))
    for role, least in STARTS.items():
        wait_until(functools.partial(lambda role, least: starts_of(run, role) > least, role, least), what=role)
    reached = steps_trained(run)
    wait_until(lambda: steps_trained(run) >= reached + 10)
    launcher.terminate()
    assert launcher.wait(400) == 0, log_of(tmp_path)
    check_history(run, steps=steps_trained(run), killed=killed)


def test_a_trainer_that_is_stopped_does_not_finish_the_run(small_run, start_tba, tmp_path):
    run = small_run(train={"steps": LONG})
    launcher = start_tba("run", run.file)
    wait_until(lambda: steps_trained(run) >= 4)
    children_of(launcher, " train ")[0].terminate()
    assert launcher.wait(60) == 0, log_of(tmp_path)
    assert query(run, "SELECT finished_step FROM runs") == [(None,)]
    assert "--resume" in (tmp_path / "tba0.log").read_text()


def check_no_child_outlives(launcher) -> None:
    """Kill a launcher, and check that its children end."""
    roles = psutil.Process(launcher.pid).children()
    assert len(roles) == 4, "three roles and the guard"
    # These include the processes that the roles have started.
    children = psutil.Process(launcher.pid).children(recursive=True)
    os.kill(launcher.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_a_second_run_neither_joins_nor_harms_the_first_which_when_killed_leaves_no_child(small_run, start_tba, tba):
    run = small_run(train={"steps": 100_000})
    first = start_tba("run", run.file)
    wait_until(lambda: steps_trained(run) >= 2)
    other = tba("run", run.file, "--set", f"run.dir={run.directory}-other", "--set", "run.name=other")
    assert (other.returncode, "is in use: a buffer serves run test" in other.stderr) == (1, True)
    assert not run.directory.with_name(f"{run.directory.name}-other").exists(), "a refused start leaves nothing"
    same = tba("run", run.file, "--resume")
    assert (same.returncode, f"another `tba run` (pid {first.pid} on " in same.stderr) == (1, True)
    trainer = tba("train", "--cpu", "--config", run.file, "--set", f"run.dir={run.directory}-other", timeout=300)
    assert (trainer.returncode, "is at work on run test" in trainer.stderr) == (78, True)
    check_no_child_outlives(first)


def test_of_two_runs_that_start_together_one_starts_only_its_buffer(small_run, start_tba):
    """Both find the address free. Only the launcher whose buffer binds it starts the other roles."""
    run = small_run(train={"steps": 100_000}, launch={"max_restarts": 1, "drain_seconds": 1.0})
    folders = [run.directory.with_name(name) for name in ("one", "two")]
    launchers = [start_tba("run", run.file, "--set", f"run.dir={folder}") for folder in folders]
    wait_until(lambda: any(launcher.poll() is not None for launcher in launchers))
    assert sorted(launcher.poll() is None for launcher in launchers) == [False, True]
    refused = [launcher.poll() for launcher in launchers].index(1)
    assert {path.name for path in folders[refused].glob("logs/*")} <= {"buffer.log"}
    assert "is in use" in (folders[0].parent / f"tba{refused}.log").read_text()


def test_ctrl_c_ends_every_child_and_resume_continues_the_run(small_run, start_tba, tba, tmp_path):
    run = small_run(train={"steps": LONG})
    launcher = start_tba("run", run.file)
    wait_until(lambda: steps_trained(run) >= 4)
    children = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == EXIT_INTERRUPTED, log_of(tmp_path)
    assert [child for child in children if child.is_running()] == []
    assert 4 <= steps_trained(run) < LONG
    result = tba("run", run.file, "--resume", timeout=400)
    assert result.returncode == 0, result.stderr
    check_history(run, steps=LONG)


def test_a_run_waits_for_the_previous_one_to_end(small_run, start_tba, tba, tmp_path):
    run = small_run(launch={"drain_seconds": 8.0}, train={"steps": 100_000})
    previous = start_tba("run", run.file)
    wait_until(lambda: steps_trained(run) >= 4)
    # It cannot save, so the launcher waits for its whole drain time.
    children_of(previous, " train ")[0].suspend()
    previous.terminate()
    wait_until(lambda: "ending" in (run.directory / "launcher.lock").read_text())
    steps = steps_trained(run) + 5
    result = tba("run", "--config", run.file, "--resume", "--set", f"train.steps={steps}", timeout=400)
    assert result.returncode == 0, result.stderr
    assert f"the previous `tba run` (pid {previous.pid} on " in result.stderr
    assert previous.wait(60) == 0
    check_history(run, steps=steps)


def test_ctrl_c_while_the_trainer_loads_ends_immediately_and_announces_no_checkpoint(small_run, start_tba, tmp_path):
    run = small_run(launch={"drain_seconds": 600.0})
    launcher = start_tba("run", run.file)
    wait_until(lambda: children_of(launcher, " train "))
    # It does not end by itself, so a launcher that waits for it would time out.
    children_of(launcher, " train ")[0].suspend()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == EXIT_INTERRUPTED, log_of(tmp_path)
    output = (tmp_path / "tba0.log").read_text()
    assert "stopping: nothing was trained yet" in output
    assert f"stopped; start again with: {sys.executable} -m tba run {run.file}\n" in output
    assert "checkpoint" not in output


def test_max_staleness_0_trains_on_nothing_stale(small_run, tba):
    run = small_run(buffer={"max_staleness": 0}, train={"steps": 6})
    result = tba("run", run.file, timeout=400)
    assert result.returncode == 0, result.stderr
    check_history(run, steps=6)
    assert query(run, "SELECT DISTINCT staleness FROM consumption_rows") == [(0,)]
    # The recorded staleness is right: each trajectory was generated by the weights of the step that trained on it.
    sql = """SELECT COUNT(*) FROM consumption c
             JOIN snapshots s ON s.version = c.policy_version WHERE s.step != c.step"""
    assert query(run, sql) == [(0,)]


def test_a_new_run_never_overwrites_an_old_one(small_run, tba):
    run = small_run()
    run.directory.mkdir()
    (run.directory / "metrics.jsonl").write_text('{"step": 0}\n')
    result = tba("run", run.file)
    assert result.returncode == 2
    assert "add --resume" in result.stderr


def test_a_child_with_a_wrong_configuration_ends_the_run_with_its_sentence(small_run, tba, example_model, tmp_path):
    strange = shutil.copytree(example_model, tmp_path / "strange")
    (strange / "config.json").write_text('{"model_type": "unheard-of"}')
    run = small_run(model={"path": str(strange)})
    result = tba("run", run.file, timeout=300)
    assert result.returncode == 78
    assert "unheard-of" in result.stderr
    assert "Traceback" not in result.stderr


def test_roles_started_by_hand_in_any_order_find_each_other(small_run, start_tba):
    run = small_run(train={"steps": 3})
    trainer = start_tba("train", "--cpu", "--config", run.file)
    searcher = start_tba("search", "--cpu", "2", "--config", run.file)
    buffer = start_tba("buffer", "serve", "--config", run.file)
    assert trainer.wait(300) == 0
    # A searcher that joins after the end waits a minute for a trainer to continue.
    assert searcher.wait(300) == 0, "searchers leave when the run is finished"
    buffer.terminate()
    assert buffer.wait(60) == 0
    check_history(run, steps=3)
