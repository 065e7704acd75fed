"""The whole loop as real processes: it ends, whatever is killed on the way, and nothing is lost."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tba.common.errors import EXIT_INTERRUPTED

STEPS = 12
SAMPLES = 4
PROMPTS = 96


@pytest.fixture
def small_run(make_config, example_model):
    """A run of a few steps on the arithmetic example, two searchers with the Transformers engine."""

    def make(**sections):
        defaults = {
            "model": {"path": str(example_model), "dtype": "float32"},
            "task": {"name": "arithmetic", "limit": PROMPTS, "held_out_limit": 32},
            "buffer": {"recency_window": 8, "lease_seconds": 4.0},
            "search": {
                "engine": "transformers",
                "gpus": "cpu",
                "cpu_searchers": 2,
                "samples_per_prompt": SAMPLES,
                "max_in_flight": 32,
                "max_tokens": 6,
            },
            "train": {
                "gpu": "cpu",
                "steps": STEPS,
                "prompts_per_step": 8,
                "samples_per_prompt": SAMPLES,
                "learning_rate": 1e-4,
                "schedule": "constant",
                "warmup_steps": 2,
                "publish_every": 1,
                "checkpoint_every": 3,
                "keep_snapshot_every": 6,
            },
            "launch": {"restart_delay_seconds": 0.1, "drain_seconds": 10.0},
        }
        return make_config(
            **{name: defaults.get(name, {}) | sections.get(name, {}) for name in {**defaults, **sections}}
        )

    return make


def query(run, sql: str) -> list[tuple]:
    with sqlite3.connect(f"file:{run.database}?mode=ro", uri=True) as database:
        return database.execute(sql).fetchall()


def wait_until(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def steps_trained(run) -> int:
    try:
        return query(run, "SELECT COUNT(trained_at) FROM batches")[0][0]
    except sqlite3.OperationalError:
        return 0


def children_of(process: subprocess.Popen[bytes], command: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if command in " ".join(child.cmdline()):
                found.append(child)
    return found


def kill_child(launcher: subprocess.Popen[bytes], role: str) -> int:
    """SIGKILL to one child of a role. Returns its process id."""
    child = children_of(launcher, f" {role} ")[0]
    child.kill()
    return child.pid


def metrics_of(run) -> list[dict]:
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


def check_history(run, steps: int = STEPS, killed: Sequence[int] = ()) -> None:
    """Nothing lost, nothing twice: trajectories, prompts, steps. `killed`: processes that got a SIGKILL."""
    assert query(run, "PRAGMA integrity_check") == [("ok",)]
    # Each sender numbers its rows from 0: without a gap, nothing between the first and the last was lost. One
    # that was killed may leave a gap: puts that the buffer's own end interrupted, and that it had no time to repeat.
    numbered = query(
        run,
        """SELECT s.pid, COUNT(*), MAX(t.sequence) FROM trajectory_rows t JOIN senders s ON s.id = t.sender
           GROUP BY s.id ORDER BY s.id""",
    )
    assert [(pid, rows, last) for pid, rows, last in numbered if rows != last + 1 and pid not in killed] == []
    # Every visit that is done has its S trajectories, and no other visit has any.
    visits = query(
        run,
        """SELECT v.epoch, v.prompt, v.done_at IS NOT NULL, COUNT(t.id)
           FROM visits v LEFT JOIN trajectory_rows t ON t.visit = v.id GROUP BY v.id""",
    )
    # What a killed searcher left in its spool is delivered, also where its prompt went to another one meanwhile.
    twice = {(1, 2 * SAMPLES)} if killed else set()
    assert {(done, rows) for _, _, done, rows in visits} <= {(1, SAMPLES), (0, 0)} | twice
    # An epoch that is over visited every prompt once, and every visit was answered.
    answered = [(epoch, prompt) for epoch, prompt, done, _ in visits if done]
    assert len(answered) == len(set(answered))
    # The newest two epochs may have open visits: the run ended while they were under way.
    for epoch in range(max(epoch for epoch, *_ in visits) - 1):
        assert sum(answered_epoch == epoch for answered_epoch, _ in answered) == PROMPTS
    # Every step was made once and is told once.
    assert query(run, "SELECT step FROM batches WHERE trained_at IS NOT NULL ORDER BY step") == [
        (s,) for s in range(steps)
    ]
    assert [row["step"] for row in metrics_of(run)] == list(range(steps))


def log_of(tmp_path: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("**/*.log")))


def test_a_run_ends_and_its_history_is_complete(small_run, start_tba, tba, tmp_path):
    run = small_run(eval={"at_end": True})
    launcher = start_tba("run", run.file)
    wait_until(lambda: children_of(launcher, " eval "))
    evaluation = children_of(launcher, " eval ")[0]
    evaluation.suspend()
    second = tba("run", run.file, "--resume")
    evaluation.resume()
    assert (second.returncode, "is being run already" in second.stderr) == (1, True), "it evaluates: it is not ending"
    assert launcher.wait(200) == 0
    check_history(run)
    assert "held-out greedy accuracy:" in log_of(tmp_path)
    assert (run.directory / "run.png").stat().st_size > 10_000
    assert next(json.loads(line)["step"] for line in (run.directory / "eval.jsonl").read_text().splitlines()) == 0
    assert list(run.directory.glob("tensorboard/events*"))


def check_served_and_evaluated(run, tba, change: str, node: Path) -> None:
    """Searchers have used snapshots with a file of this name, all snapshots can be evaluated, and the node is clean."""
    manifests = [json.loads(path.read_text()) for path in run.directory.glob("snapshots/v*/manifest.json")]
    changes = {manifest["version"] for manifest in manifests if change in manifest["files"]}
    used = {version for (version,) in query(run, "SELECT DISTINCT policy_version FROM trajectories")}
    assert changes & used
    assert not node.exists(), "a finished run leaves no weights on the node"
    evaluated = tba("eval", "--config", run.file, "--all", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert len(json.loads(evaluated.stdout)) == len(manifests)
    assert not node.exists(), "nor does an evaluation"


def test_weights_go_through_the_socket_as_deltas_where_no_file_system_is_shared(small_run, tba, tmp_path):
    train = {"serve_snapshots": "tcp://127.0.0.1:*", "learning_rate": 2e-6, "keep_snapshots": 99, "steps": 6}
    run = small_run(model={"dtype": "bfloat16"}, search={"weights_from": "trainer"}, train=train)
    result = tba("run", run.file, timeout=200)
    assert result.returncode == 0, result.stderr
    check_history(run, steps=6)
    check_served_and_evaluated(run, tba, "delta.safetensors", tmp_path / "weights/test")


def test_adapters_go_through_the_socket_and_the_run_is_evaluated(small_run, tba, tmp_path):
    train = {"serve_snapshots": "tcp://127.0.0.1:*", "keep_snapshots": 99, "steps": 6}
    run = small_run(
        model={"dtype": "bfloat16"},
        search={"weights_from": "trainer"},
        train=train,
        lora={"rank": 4, "publish": "adapter"},
    )
    result = tba("run", run.file, timeout=200)
    assert result.returncode == 0, result.stderr
    check_history(run, steps=6)
    check_served_and_evaluated(run, tba, "adapter.safetensors", tmp_path / "weights/test")


def starts_of(run, role: str) -> int:
    """How often processes of a role have started."""
    if role == "buffer serve":
        return query(run, "SELECT COUNT(*) FROM starts")[0][0]
    name = {"search": "searcher", "train": "trainer"}[role]
    return query(run, f"SELECT COUNT(*) FROM senders WHERE role = '{name}'")[0][0]


STARTS = {"buffer serve": 1, "search": 2, "train": 1}
# Long enough for what the killed one had leased to be noticed, leased again and answered.
LONG = 80


@pytest.mark.parametrize("role", list(STARTS))
def test_a_run_survives_sigkill_of_a_role(small_run, start_tba, tmp_path, role):
    run = small_run(train={"steps": LONG})
    launcher = start_tba("run", run.file)
    wait_until(lambda: steps_trained(run) >= 4)
    killed = kill_child(launcher, role)
    assert launcher.wait(200) == 0, log_of(tmp_path)
    assert starts_of(run, role) > STARTS[role]
    check_history(run, steps=LONG, killed=[killed])


def test_a_run_survives_sigkill_of_every_role_in_turn(small_run, start_tba, tmp_path):
    run = small_run(train={"steps": LONG})
    launcher = start_tba("run", run.file)
    killed = []
    # The searcher first: to start again it has the time that the others take for it, and the other searcher goes on.
    for step, role in ((3, "search"), (9, "train"), (15, "buffer serve")):
        wait_until(lambda step=step: steps_trained(run) >= step)
        killed.append(kill_child(launcher, role))
    assert launcher.wait(200) == 0, log_of(tmp_path)
    assert all(starts_of(run, role) > least for role, least in STARTS.items())
    check_history(run, steps=LONG, killed=killed)


def test_a_finished_run_goes_on_for_more_steps(small_run, tba):
    run = small_run(train={"steps": 4})
    assert tba("run", run.file, timeout=100).returncode == 0
    result = tba("run", run.file, "--resume", "--set", "train.steps=9", timeout=100)
    assert result.returncode == 0, result.stderr
    assert "finished after 9 steps" in result.stdout or "step 9/9" in result.stdout
    check_history(run, steps=9)


def test_a_trainer_that_is_stopped_does_not_finish_the_run(small_run, start_tba, tmp_path):
    run = small_run(train={"steps": LONG})
    launcher = start_tba("run", run.file)
    wait_until(lambda: steps_trained(run) >= 4)
    children_of(launcher, " train ")[0].terminate()
    assert launcher.wait(60) == 0, log_of(tmp_path)
    assert query(run, "SELECT finished_step FROM runs") == [(None,)]
    assert "--resume" in (tmp_path / "tba0.log").read_text()


def test_a_second_run_neither_joins_nor_harms_the_first(small_run, start_tba, tba):
    run = small_run(train={"steps": 100_000})
    first = start_tba("run", run.file)
    wait_until(lambda: steps_trained(run) >= 2)
    other = tba("run", run.file, "--set", f"run.dir={run.directory}-other", "--set", "run.name=other")
    assert (other.returncode, "is in use: a buffer serves run test" in other.stderr) == (1, True)
    assert not run.directory.with_name(f"{run.directory.name}-other").exists(), "a refused start leaves nothing"
    same = tba("run", run.file, "--resume")
    assert (same.returncode, f"another `tba run` (pid {first.pid} on " in same.stderr) == (1, True)
    trainer = tba("train", "--cpu", "--config", run.file, "--set", f"run.dir={run.directory}-other", timeout=120)
    assert (trainer.returncode, "is at work on run test" in trainer.stderr) == (78, True)


def test_of_two_runs_that_start_at_once_the_second_starts_nothing_but_its_buffer(small_run, start_tba):
    """Both find the address free. The buffer that has it says so to its own launcher alone."""
    run = small_run(
        train={"steps": 100_000}, launch={"restart_delay_seconds": 0.1, "max_restarts": 1, "drain_seconds": 1.0}
    )
    folders = [run.directory.with_name(name) for name in ("one", "two")]
    launchers = [start_tba("run", run.file, "--set", f"run.dir={folder}") for folder in folders]
    wait_until(lambda: any(launcher.poll() is not None for launcher in launchers))
    assert sorted(launcher.poll() is None for launcher in launchers) == [False, True]
    refused = [launcher.poll() for launcher in launchers].index(1)
    assert {path.name for path in folders[refused].glob("logs/*")} <= {"buffer.log"}
    assert "is in use" in (folders[0].parent / f"tba{refused}.log").read_text()


def test_ctrl_c_ends_every_child_and_the_run_goes_on_with_resume(small_run, start_tba, tba, tmp_path):
    run = small_run(train={"steps": LONG})
    launcher = start_tba("run", run.file)
    wait_until(lambda: steps_trained(run) >= 4)
    children = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == EXIT_INTERRUPTED, log_of(tmp_path)
    assert [child for child in children if child.is_running()] == []
    made = steps_trained(run)
    assert 4 <= made < LONG
    result = tba("run", run.file, "--resume", timeout=200)
    assert result.returncode == 0, result.stderr
    check_history(run, steps=LONG)


def test_a_run_waits_for_the_former_one_that_is_still_ending(small_run, start_tba, tba, tmp_path):
    run = small_run(launch={"restart_delay_seconds": 0.1, "drain_seconds": 8.0}, train={"steps": 100_000})
    former = start_tba("run", run.file)
    wait_until(lambda: steps_trained(run) >= 4)
    children_of(former, " train ")[0].suspend()  # it cannot save: the launcher gives it all its time
    former.terminate()
    wait_until(lambda: "ending" in (run.directory / "launcher.lock").read_text())
    steps = steps_trained(run) + 5
    result = tba("run", "--config", run.file, "--resume", "--set", f"train.steps={steps}", timeout=200)
    assert result.returncode == 0, result.stderr
    assert f"the former `tba run` (pid {former.pid} on " in result.stderr
    assert former.wait(60) == 0
    check_history(run, steps=steps)


def test_ctrl_c_before_the_trainer_is_there_ends_at_once_and_promises_no_checkpoint(small_run, start_tba, tmp_path):
    run = small_run(launch={"drain_seconds": 600.0})
    launcher = start_tba("run", run.file)
    wait_until(lambda: children_of(launcher, " train "))
    children_of(launcher, " train ")[0].suspend()  # it would not end by itself: nobody may wait for it
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == EXIT_INTERRUPTED, log_of(tmp_path)
    said = (tmp_path / "tba0.log").read_text()
    assert "stopping: nothing was trained yet" in said
    assert f"stopped; start again with: tba run {run.file}\n" in said
    assert "checkpoint" not in said


def test_no_child_outlives_a_launcher_that_is_killed(small_run, start_tba):
    run = small_run(train={"steps": LONG})
    launcher = start_tba("run", run.file)
    wait_until(lambda: steps_trained(run) >= 1)
    roles = psutil.Process(launcher.pid).children()
    assert len(roles) == 5, "four roles and the guard"
    children = psutil.Process(launcher.pid).children(recursive=True)  # and whatever those have started
    os.kill(launcher.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_max_staleness_0_trains_on_nothing_stale(small_run, tba):
    run = small_run(buffer={"max_staleness": 0}, train={"steps": 6})
    result = tba("run", run.file, timeout=200)
    assert result.returncode == 0, result.stderr
    check_history(run, steps=6)
    assert query(run, "SELECT DISTINCT staleness FROM consumption_rows") == [(0,)]
    # And the record is true: each trajectory was generated by the weights of the step that trained on it.
    sql = """SELECT COUNT(*) FROM consumption_rows c JOIN trajectory_rows t ON t.id = c.trajectory
             JOIN snapshots s ON s.version = t.policy_version WHERE s.step != c.step"""
    assert query(run, sql) == [(0,)]


def test_max_staleness_bounds_what_is_trained_on(small_run, tba):
    run = small_run(buffer={"max_staleness": 2, "recency_fraction": 0.5}, train={"steps": 10})
    result = tba("run", run.file, timeout=200)
    assert result.returncode == 0, result.stderr
    ((largest,),) = query(run, "SELECT MAX(staleness) FROM consumption_rows")
    assert 0 < largest <= 2


def test_a_new_run_never_overwrites_an_old_one(small_run, tba):
    run = small_run()
    run.directory.mkdir()
    (run.directory / "metrics.jsonl").write_text('{"step": 0}\n')
    result = tba("run", run.file)
    assert result.returncode == 2
    assert "add --resume" in result.stderr


def test_a_path_that_is_not_there_is_told_before_anything_starts(small_run, tba):
    run = small_run(model={"path": "/nowhere"})
    result = tba("run", run.file)
    assert (result.returncode, result.stderr) == (78, "error: model.path /nowhere does not exist\n")
    assert not run.directory.exists()


def test_a_child_with_a_wrong_configuration_ends_the_run_with_its_sentence(small_run, tba, example_model, tmp_path):
    strange = shutil.copytree(example_model, tmp_path / "strange")
    (strange / "config.json").write_text('{"model_type": "unheard-of"}')
    run = small_run(model={"path": str(strange)})
    result = tba("run", run.file, timeout=120)
    assert result.returncode == 78
    assert "unheard-of" in result.stderr
    assert "Traceback" not in result.stderr


def test_roles_started_by_hand_in_any_order_find_each_other(small_run, start_tba):
    run = small_run(train={"steps": 3})
    trainer = start_tba("train", "--cpu", "--config", run.file)
    searcher = start_tba("search", "--cpu", "2", "--config", run.file)
    buffer = start_tba("buffer", "serve", "--config", run.file)
    assert trainer.wait(120) == 0
    # One that joins after the end waits a minute for a trainer that goes on.
    assert searcher.wait(120) == 0, "searchers leave when the run is finished"
    buffer.terminate()
    assert buffer.wait(60) == 0
    check_history(run, steps=3)
