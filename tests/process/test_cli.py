"""The command line as a user runs it, where processes are the subject; tests/unit/test_cli.py has the rest."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tba.common.errors import EXIT_INTERRUPTED
from tba.tests.helpers.checks import not_none, wait_until
from tba.tests.helpers.puts import status_of
from tba.tests.process.conftest import arithmetic, changed, clean_environment, merged


def refused(result: subprocess.CompletedProcess[str], exit_code: int, *words: str) -> None:
    """Check that a command failed with this exit code and these words in its message, and without a traceback."""
    assert result.returncode == exit_code, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_help_imports_no_slow_package():
    """`tba --help` must take under half a second, and each of these packages takes longer than everything else."""
    command = [sys.executable, "-X", "importtime", "-m", "tba", "--help"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"torch", "vllm", "transformers", "numpy", "pydantic", "zmq", "msgpack"}


def test_a_closed_pipe_causes_no_traceback(tba, run_config, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt_ids": [1], "response_ids": [2]}\n')
    assert tba("buffer", "import", "one.jsonl", "--config", run_config.file).returncode == 0
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 200000) SELECT i FROM n"
    for option in ("--csv", "--json"):
        command = [sys.executable, "-m", "tba", "buffer", "query", many, option, "--config", run_config.file]
        with subprocess.Popen(
            command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            not_none(process.stdout).readline()
            not_none(process.stdout).close()
            errors = not_none(process.stderr).read()
        assert process.returncode == 1
        assert errors == b""


def test_a_check_alone_names_models_to_download_and_loads_no_torch(make_config, tmp_path):
    file = make_config(model={"path": "some/model"}).file
    command = [sys.executable, "-X", "importtime", "-m", "tba", "doctor", "--only", "model", file]
    offline = clean_environment() | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=offline)
    assert result.returncode == 0
    assert "model.path 'some/model' is not a local directory, and it cannot be downloaded" in result.stdout
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "pydantic" in loaded
    assert not loaded & {"torch", "vllm", "transformers"}


def test_doctor_names_the_program_at_the_address_of_the_buffer(tba_here, start_tba, run_config):
    def found(*sets: str) -> tuple[str, str]:
        rows = tba_here("doctor", "--json", "--config", run_config.file, *changed(*sets)).json
        (row,) = (row for row in rows if row["check"] == "buffer address")
        return row["result"], row["detail"]

    address = run_config.address
    with socket.create_server(("127.0.0.1", 0)) as other:
        result, detail = found(f"buffer.address=tcp://127.0.0.1:{other.getsockname()[1]}")
    assert (result, "does not answer like a buffer" in detail) == ("fail", True)
    assert found() == ("ok", f"{address}: nothing listens there")
    start_tba("buffer", "serve", "--config", run_config.file)
    status_of(address)
    assert found() == ("ok", f"{address}: the buffer of run test answers")
    result, detail = found("run.name=other")
    assert (result, "is in use by the buffer of run test" in detail) == ("fail", True)


@pytest.mark.parametrize(
    "command", [("run",), ("run", "--dry-run"), ("doctor", "--only", "settings", "--only", "task")]
)
@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"task": {"limit": 5}, "train": {"prompts_per_step": 8}},
            "task arithmetic: the task has 5 prompts and a batch",
        ),
        ({"task": {"limit": 9}, "buffer": {"min_fill": 10, "prompt_cap": 1}}, "buffer.min_fill = 10 is never reached"),
        ({"search": {"weights_from": "trainer"}}, "set train.serve_snapshots"),
    ],
)
def test_what_can_never_train_is_refused_by_every_command_before_anything_starts(
    tba_here, make_config, command, sections, sentence
):
    run = make_config(**arithmetic(**merged({"train": {"prompts_per_step": 1}}, sections)))
    result = tba_here(*command, run.file)
    assert (result.exit_code, sentence in " ".join((result.message + result.output).split())) == (78, True)
    assert not run.directory.exists()


@pytest.fixture
def own_task(make_config, example_model, tmp_path):
    """Return a function that makes a configuration whose task has this source code."""

    def make(source: str):
        (tmp_path / "my_task.py").write_text(source)
        sections = {"model": {"path": str(example_model)}, "search": {"gpus": "cpu"}, "train": {"gpu": "cpu"}}
        return make_config(task={"name": "my_task:Mine"}, **sections)

    return make


@pytest.mark.parametrize(
    ("source", "exit_code", "sentence"),
    [
        ("raise MemoryError", 1, "task.name my_task:Mine"),
        ("import os; os.kill(os.getpid(), 40)", 1, "was ended by signal 40: it wrote nothing"),
        ("print('loading\\n' * 50)\nraise KeyError('split')", 78, "KeyError: 'split'"),
    ],
)
def test_what_ended_the_check_of_a_task_is_named_and_only_its_own_error_is_one_of_the_configuration(
    tba, own_task, source, exit_code, sentence
):
    # `tba run` starts `tba doctor --only task --strict` for it, before anything else.
    run = own_task(source)
    refused(tba("run", run.file), exit_code, sentence)
    assert not run.directory.exists()


HANGING_TASK = """
import os, subprocess, time
worker = subprocess.Popen(["sleep", "600"])
open("pids", "w").write(f"{os.getpid()} {worker.pid}\\n")
time.sleep(600)
"""


def loading_processes(pids: Path, launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Wait for the process that loads a task and for the one that the task started, and return both."""
    wait_until(lambda: launcher.poll() is not None or (pids.exists() and pids.read_text().endswith("\n")))
    return [psutil.Process(int(pid)) for pid in pids.read_text().split()]


@pytest.mark.parametrize(("end", "exit_code"), [(signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_process_of_a_task_outlives_a_launcher_that_ends_while_it_loads(
    own_task, start_tba, tmp_path, end, exit_code
):
    run = own_task(HANGING_TASK)
    launcher = start_tba("run", run.file)
    started = loading_processes(tmp_path / "pids", launcher)
    launcher.send_signal(end)
    assert launcher.wait(60) == exit_code
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert not run.directory.exists()


def test_processes_that_a_task_started_end_with_its_check(own_task, tba, tmp_path):
    loads = HANGING_TASK.replace("time.sleep(600)", "raise KeyError('split')")
    refused(tba("run", own_task(loads).file), 78, "KeyError: 'split'")
    _, worker = (tmp_path / "pids").read_text().split()
    assert not psutil.pid_exists(int(worker))


def test_an_address_in_use_is_reported_before_a_task_loads_and_leaves_no_directory(own_task, tba_here, tmp_path):
    run = own_task("open('loaded', 'w').close()")
    with socket.create_server(("127.0.0.1", int(run.address.rpartition(":")[2]))):
        for options in ((), ("--set", "task.name=arithmetic", "--set", f"run.dir={tmp_path}/new/folder/run")):
            done = tba_here("run", run.file, *options)
            assert (done.exit_code, f"buffer.address {run.address} is in use" in done.message) == (1, True)
            assert not (tmp_path / "loaded").exists()
    assert not (tmp_path / "new").exists()


def test_status_without_a_buffer_names_the_command_to_start_one(tba_here, run_config):
    done = tba_here("status", "--config", run_config.file)
    assert (done.exit_code, "is `tba buffer serve` running?" in done.message) == (1, True)


def test_debug_shows_the_traceback(tba):
    result = tba("--debug", "run", "nowhere.toml")
    assert "Traceback" in result.stderr
