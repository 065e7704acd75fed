"""Whole runs as real processes: they finish, end and go on, and no data is lost.

test_game.py kills each role, and test_hang.py the launcher.
"""

import dataclasses
import json
import re
import shlex
import shutil
import signal
import sys

import numpy as np
import psutil
import pytest

from tba.common.errors import EXIT_CONFIG, EXIT_INTERRUPTED
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.whole_run import STEPS, check_history, children_of, log_of, small_sections
from tba.tests.process.conftest import changed


@pytest.fixture
def small_run(make_config):
    """Return a function that makes a run of a few steps on the arithmetic example, with one Transformers searcher."""
    return lambda **sections: make_config(**small_sections(**sections))


JUDGED = """import os
from tba.searcher.tasks.arithmetic import ArithmeticTask
class Judged(ArithmeticTask):
    def score(self, prompt, response, finished):
        if os.path.exists("down") and prompt in self.held_out()[:32]:
            raise ConnectionError("the judge does not answer")
        return super().score(prompt, response, finished)
"""


def test_a_run_whose_judge_is_down_at_its_end_is_evaluated_later_and_goes_on_elsewhere_with_its_own_task_only(
    small_run, start_tba, tba, tba_here, tmp_path
):
    model = shutil.copytree(EXAMPLE_MODEL, tmp_path / "model")
    (tmp_path / "judged.py").write_text(JUDGED)
    task = {"name": "judged:Judged", "held_out_limit": 40}
    evaluated = {"at_end": True, "samples": 1}
    run = small_run(model={"path": str(model), "dtype": "float32"}, task=task, eval=evaluated)
    launcher = start_tba("run", run.file)
    wait_until(lambda: children_of(launcher, " eval "))
    evaluation = children_of(launcher, " eval ")[0]
    evaluation.suspend()
    second = tba_here("run", run.file, "--resume")
    # A launcher that still evaluates is not about to end, so the second one does not wait.
    assert (second.exit_code, "is in use by another `tba run`" in second.message) == (1, True)
    (tmp_path / "down").touch()
    evaluation.resume()
    assert launcher.wait(400) == 1
    check_history(run)
    # A few of its answers have no score, which is more than 2 %.
    reason = "32 of 40 responses could not be scored: reward of arithmetic: ConnectionError: the judge does not answer"
    log = log_of(tmp_path)
    assert all(
        said in log for said in (f"not measured: {reason}", f"not measured ({reason}", "evaluates snapshot 2 of")
    )
    stored = "SELECT accuracy, not_measured, json_extract(metrics, '$.failed') FROM evaluations ORDER BY version"
    for accuracy, why, failed in run.query(stored):
        assert (accuracy, why.startswith(reason), failed) == (None, True, 0.8)
    assert f"last evaluation not measured: {reason}" in tba_here("runs", tmp_path, "--json").output
    (tmp_path / "down").unlink()
    again = tba_here("eval", "--config", run.file, "--all", "--json")
    assert again.exit_code == 0, again.message
    assert all(accuracy is not None and why is None for accuracy, why, _ in run.query(stored))
    check_wrong_answers(run, tba_here, max(again.json, key=lambda row: row["step"])["accuracy"])
    assert list(run.directory.glob("tensorboard/events*"))
    check_references(run)
    check_that_another_task_is_refused(run, tba_here)
    # Without a file, a command on a run takes its recorded configuration: no --cpu.
    assert tba_here("generate", "1+2=", "--set", f"run.dir={run.directory}").exit_code == 0

    moved = run.directory.rename(tmp_path / "moved")
    (listed,) = tba_here("runs", str(tmp_path), "--json").json
    found = (listed["state"], listed["steps"], listed["directory"], listed["accuracy"] is not None)
    assert found == ("finished", f"{STEPS}/{STEPS}", str(moved), True)
    run = dataclasses.replace(run, directory=moved)
    changes = (f"train.steps={STEPS + 3}", "eval.at_end=false", "train.learning_rate=2e-4")
    more = tba("run", moved, "--resume", *changed(*changes, f"model.path={model.rename(tmp_path / 'elsewhere')}"))
    assert more.returncode == 0, more.stderr
    assert re.search(rf"train.steps +{STEPS} +{STEPS + 3}\n", more.stdout), "what differs from the last start"
    assert "learning_rate" in more.stdout
    check_history(run, steps=STEPS + 3)


def check_wrong_answers(run, tba_here, accuracy: float) -> None:
    """Check that the wrong answers of the last evaluation are shown with their prompts and the right ones."""
    rows = tba_here("eval", "--config", run.file, "--wrong", "--json").json
    assert len(rows) == round(40 * (1 - accuracy)) > 0
    assert all(row["prompt"].endswith("=") and row["answer"] != row["response"] for row in rows)
    assert run.query("SELECT answer FROM trajectories WHERE answer IS NULL") == []


def check_references(run) -> None:
    """Check that the trainer's references are right."""
    # The weights of the first snapshot are the reference, and sampling is unmodified: the engine's own
    # log-probabilities add up to the same. The trainer's do too (tests/unit/searcher/test_references.py). A response
    # that later weights have continued has two version runs.
    stored = run.query(
        """SELECT r.logprob, p.logprobs FROM trajectory_rows t JOIN payloads p ON p.trajectory = t.id
           JOIN reference_logprobs r ON r.trajectory = t.id AND r.reference = 'initial'
           WHERE t.policy_version = 0 AND LENGTH(p.version_runs) = 8"""
    )
    assert len(stored) > 8
    sampled = [float(np.frombuffer(logprobs, "<f4").sum(dtype=np.float64)) for _, logprobs in stored]
    assert [reference for reference, _ in stored] == pytest.approx(sampled, abs=1e-4)


def check_that_another_task_is_refused(run, tba_here) -> None:
    """Check that every command that works on a run refuses another task, and leaves everything as it was."""
    before = run.query("SELECT COUNT(*) FROM starts"), run.lines(), run.lines("eval.jsonl")
    resume, other = "--resume", changed("task.options={ digits = 1 }", "train.steps=99")
    for command in (("run", resume), ("train", resume), ("buffer", "serve"), ("eval",), ("run", resume, "--dry-run")):
        refused = tba_here(*command, "--config", run.file, *other)
        assert refused.exit_code == EXIT_CONFIG, command
        assert "task.options was {} and is" in refused.message + refused.output, command
    assert (run.query("SELECT COUNT(*) FROM starts"), run.lines(), run.lines("eval.jsonl")) == before


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
def test_deltas_and_adapters_are_served_through_the_socket_to_searchers_of_which_nothing_stale_is_trained_on(
    small_run, tba, tba_here, tmp_path, is_change, learning_rate, lora
):
    """No file system is shared, and every snapshot of the run can be evaluated."""
    serve = {"serve_snapshots": "tcp://127.0.0.1:*", "snapshots_in": "disk", "keep_snapshots": 99}
    train = serve | {"steps": 5, "learning_rate": learning_rate}
    search = {"weights_from": "trainer"}
    run = small_run(model={"dtype": "bfloat16"}, buffer={"max_staleness": 0}, search=search, train=train, lora=lora)
    result = tba("run", run.file, timeout=400)
    assert result.returncode == 0, result.stderr
    check_history(run, steps=5)
    manifests = [json.loads(path.read_text()) for path in run.directory.glob("snapshots/v*/manifest.json")]
    changes = {manifest["version"] for manifest in manifests if is_change(manifest)}
    assert changes & {version for (version,) in run.query("SELECT DISTINCT policy_version FROM trajectories")}
    assert run.query("SELECT DISTINCT staleness FROM consumption_rows") == [(0,)]
    # The recorded staleness is right: each trajectory was generated by the weights of the step that trained on it.
    sql = """SELECT COUNT(*) FROM consumption c
             JOIN snapshots s ON s.version = c.policy_version WHERE s.step != c.step"""
    assert run.query(sql) == [(0,)]
    node = tmp_path / "weights/test"
    assert not node.exists(), "a finished run leaves no weights on the node"
    evaluated = tba_here("eval", "--config", run.file, "--all", "--json")
    assert evaluated.exit_code == 0, evaluated.message
    assert len(evaluated.json) == len(manifests)
    assert not node.exists(), "an evaluation leaves no weights on the node"


def test_of_runs_at_one_address_one_trains_and_the_next_one_of_its_directory_waits_for_its_end(
    small_run, start_tba, tba, tba_here, tmp_path
):
    run = small_run(train={"steps": 100_000}, launch={"max_restarts": 1, "drain_seconds": 8.0})
    # Both find the address free. Only the launcher whose buffer binds it starts the other roles.
    folders = [run.directory.with_name(name) for name in ("one", "two")]
    launchers = [start_tba("run", run.file, "--set", f"run.dir={folder}") for folder in folders]
    wait_until(lambda: any(launcher.poll() is not None for launcher in launchers))
    assert sorted(launcher.poll() is None for launcher in launchers) == [False, True]
    refused = [launcher.poll() for launcher in launchers].index(1)
    assert {path.name for path in folders[refused].glob("logs/*")} <= {"buffer.log"}
    assert "is in use" in (tmp_path / f"tba{refused}.log").read_text()

    first, run = launchers[1 - refused], dataclasses.replace(run, directory=folders[1 - refused])
    wait_until(lambda: run.steps_trained() >= 4)
    own, elsewhere = changed(f"run.dir={run.directory}"), changed(f"run.dir={run.directory}-other")
    other = tba_here("run", run.file, *elsewhere, *changed("run.name=other"))
    assert (other.exit_code, "is in use: a buffer serves run test" in other.message) == (1, True)
    assert not run.directory.with_name(f"{run.directory.name}-other").exists(), "a refused start leaves nothing"
    same = tba_here("run", run.file, "--resume", *own)
    assert (same.exit_code, f"another `tba run` (pid {first.pid} on " in same.message) == (1, True)

    # It cannot save, so the launcher waits for its whole drain time.
    children_of(first, " train ")[0].suspend()
    first.terminate()
    wait_until(lambda: "ending" in (run.directory / "launcher.lock").read_text())
    launcher = start_tba("run", "--config", run.file, "--resume", *own)
    assert first.wait(60) == 0
    reached = run.steps_trained()
    wait_until(lambda: run.steps_trained() > reached)
    # A stopped trainer does not finish the run.
    children_of(launcher, " train ")[0].terminate()
    assert launcher.wait(60) == 0, log_of(tmp_path)
    output = (tmp_path / "tba2.log").read_text()
    assert f"the previous `tba run` (pid {first.pid} on " in output
    assert "--resume" in output
    assert run.query("SELECT finished_step FROM runs") == [(None,)]
    check_history(run, steps=run.steps_trained())


def test_ctrl_c_while_the_trainer_loads_ends_immediately_and_announces_no_checkpoint(small_run, start_tba, tmp_path):
    run = small_run(launch={"drain_seconds": 600.0})
    launcher = start_tba("run", run.file)
    wait_until(lambda: children_of(launcher, " train "))
    # It does not end by itself, so a launcher that waits for it would time out.
    children_of(launcher, " train ")[0].suspend()
    children = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == EXIT_INTERRUPTED, log_of(tmp_path)
    assert [child for child in children if child.is_running()] == []
    output = (tmp_path / "tba0.log").read_text()
    assert "stopping: nothing was trained yet" in output
    again = shlex.join([sys.executable, "-m", "tba", "run", run.file])
    assert f"stopped; start again with: {again}\n" in output
    assert "checkpoint" not in output


def test_a_child_with_a_wrong_configuration_ends_the_run_with_its_sentence(small_run, tba, example_model, tmp_path):
    strange = shutil.copytree(example_model, tmp_path / "strange")
    (strange / "config.json").write_text('{"model_type": "unheard-of"}')
    run = small_run(model={"path": str(strange)})
    result = tba("run", run.file, timeout=300)
    assert result.returncode == 78
    assert "unheard-of" in result.stderr
    assert "Traceback" not in result.stderr
