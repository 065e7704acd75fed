"""The command line as a user runs it: real processes, exit codes, one sentence per mistake."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tba.common.errors import EXIT_INTERRUPTED
from tba.common.system.devices import list_gpus
from tba.common.wire.client import BufferClient
from tba.common.wire.status_messages import GetStatus, Status
from tba.tests.helpers.checks import not_none
from tba.tests.process.conftest import clean_environment

# Commands that take the configuration as an argument.
TOP_LEVEL = ("run", "search", "train", "eval", "plot", "status", "doctor")
BUFFER_COMMANDS = ("serve", "stats", "tail", "compact", "check", "migrate")
NO_GPU = pytest.mark.skipif(bool(list_gpus()), reason="this machine has a GPU")


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
    assert not loaded & {"torch", "vllm", "transformers", "numpy", "pydantic", "zmq", "msgpack", "sqlite_utils"}


@pytest.mark.parametrize("command", [[], ["buffer"], *([name] for name in ("config", *TOP_LEVEL))])
def test_every_command_has_help(tba, command):
    result = tba(*command, "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize("command", [*BUFFER_COMMANDS, "query", "show", "export", "import", "backup"])
def test_every_buffer_command_has_help_and_accepts_a_database(tba, command):
    result = tba("buffer", command, "--help")
    assert result.returncode == 0
    assert "--buffer" in result.stdout


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


def test_version_is_printed(tba):
    assert tba("--version").stdout.startswith("tba ")


def test_an_unknown_key_in_the_file_exits_with_78(tba, make_config):
    file = make_config(train={"stepz": 3}).file
    refused(tba("train", "--config", file), 78, "unknown key train.stepz", "did you mean train.steps?")


@NO_GPU
@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (["search", "--gpus", "0-6"], 'pass --cpu 1, or set search.gpus = "cpu"'),
        (["train", "--gpu", "7"], 'pass --cpu, or set train.gpu = "cpu"'),
        (["sft", "pairs.jsonl", "--out", "warm"], 'pass --cpu, or set train.gpu = "cpu"'),
        (["eval"], 'pass --cpu, or set search.gpus = "cpu"'),
        (["run"], 'installed): set search.gpus = "cpu"'),
        (["run", "--set", "search.gpus=cpu"], 'installed): set train.gpu = "cpu"'),
    ],
)
def test_an_error_without_a_gpu_names_the_options_of_the_command(tba, make_config, example_model, command, remedy):
    file = make_config(model={"path": str(example_model)}).file
    refused(tba(*command, "--config", file), 2, "this machine shows no GPU", remedy)


@NO_GPU
def test_doctor_names_the_setting_that_asks_for_a_gpu(tba, make_config, example_model):
    file = make_config(model={"path": str(example_model)}, search={"gpus": "cpu"}).file
    result = tba("doctor", file)
    assert result.returncode == 1
    assert 'installed): set train.gpu = "cpu"' in result.stdout


def test_a_missing_extra_is_reported_in_one_sentence(tmp_path):
    """torch is hidden from this process, as on a host of the buffer."""
    hidden = "import sys; sys.modules['torch'] = None; sys.argv = ['tba', 'train', '--cpu']; "
    code = hidden + "import importlib.util as u; f = u.find_spec; "
    code += "u.find_spec = lambda name, *a: None if name == 'torch' else f(name, *a); import tba.cli; tba.cli.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    refused(result, 78, "torch is not installed: install tba with the extra train, by pip install 'tba[train]'")


def test_config_show_names_the_origin_of_each_value(tba, run_config):
    result = tba("config", "show", "--json", "--config", run_config.file, "--set", "train.steps=5")
    rows = {row["key"]: row for row in json.loads(result.stdout)}
    assert rows["train.steps"] == {"key": "train.steps", "value": 5, "origin": "--set"}
    assert rows["run.name"]["origin"] == run_config.file
    assert rows["train.beta"]["origin"] == "default"


def test_config_check_requires_a_model(tba, make_config, example_model):
    assert tba("config", "check", "--config", make_config(model={"path": str(example_model)}).file).returncode == 0
    refused(tba("config", "check", "--config", make_config().file), 78, "model.path is not set")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model.path": "/nowhere"}, "model.path /nowhere does not exist"),
        ({"model.path": "TMP"}, "has no config.json: it is not a Hugging Face model directory"),
        ({"model.path": "TMP/no-tokenizer"}, "no-tokenizer has no tokenizer"),
        ({"model.path": "TMP/no-weights"}, "has no safetensors files"),
        ({"model.path": "TMP/half"}, "half lacks model-2.safetensors, which its index names"),
        ({"reward_model.path": "./nothing"}, "reward_model.path ./nothing does not exist"),
        ({"task.name": "gsm8k", "task.train": "missing.jsonl"}, "task.train missing.jsonl does not exist"),
        ({"run.dir": "TMP/run.toml/run"}, "run.toml is not a directory"),
        ({"search.weights_dir": "TMP/run.toml"}, "run.toml is not a directory"),
        ({"search.weights_dir": "/proc/self"}, "/proc/self is not writable"),
        ({"search.weights_dir": "TMP/taken"}, "is no directory of this user"),
        (
            {"search.engine": "vllm", "train.gpu": "7", "search.gpus": "0-7"},
            "search.gpus = 0-7 and train.gpu = 7 both name GPU 7: name different ones",
        ),
    ],
)
def test_config_check_names_the_key_and_the_path_of_missing_files(
    tba, make_config, example_model, tmp_path, settings, sentence
):
    for name, removed in (("no-tokenizer", "tokenizer*"), ("no-weights", "*.safetensors"), ("half", "nothing")):
        shutil.copytree(example_model, tmp_path / name, ignore=shutil.ignore_patterns(removed))
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "half/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/test").touch()
    file = make_config(model={"path": str(example_model)}).file
    sets = [f"--set={key}={value.replace('TMP', str(tmp_path))}" for key, value in settings.items()]
    refused(tba("config", "check", file, *sets), 78, sentence, next(reversed(settings)))


WITHOUT_PEFT = """
import importlib.metadata, importlib.util
find, version = importlib.util.find_spec, importlib.metadata.version
importlib.util.find_spec = lambda name, *rest: None if name == "peft" else find(name, *rest)
importlib.metadata.version = lambda name: version("no-such-package" if name == "peft" else name)
"""


@pytest.mark.parametrize(
    ("command", "code", "sentence"),
    [("run", 78, "peft is not installed"), ("doctor", 1, "peft missing: lora.rank needs the extra lora")],
)
def test_adapters_without_peft_are_refused_before_anything_starts(
    start_tba, make_config, example_model, tmp_path, command, code, sentence
):
    keys = {"search": {"gpus": "cpu"}, "train": {"gpu": "cpu"}, "lora": {"rank": 2}}
    config = make_config(model={"path": str(example_model)}, **keys)
    assert start_tba(command, str(config.file), patch=WITHOUT_PEFT).wait(60) == code
    assert sentence in (tmp_path / "tba0.log").read_text()
    assert not list(tmp_path.rglob("logs"))


@pytest.mark.parametrize("command", [["search", "--cpu", "2"], ["train", "--cpu", "--processes", "2"]])
def test_a_missing_model_setting_is_reported_once_and_nothing_is_created(tba, tmp_path, command):
    result = tba(*command, "--set", f"run.dir={tmp_path / 'run'}")
    refused(result, 78, "model.path is not set")
    assert result.stderr.count("model.path") == 1
    assert not (tmp_path / "run").exists()


def test_config_check_names_models_to_download_and_loads_no_torch(make_config, tmp_path):
    file = make_config(model={"path": "some/model"}).file
    command = [sys.executable, "-X", "importtime", "-m", "tba", "config", "check", file]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=clean_environment())
    assert "model.path some/model is not a local directory: it will be downloaded from the hub" in result.stderr
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "pydantic" in loaded
    assert not loaded & {"torch", "vllm", "transformers"}


@pytest.mark.parametrize("command", [*([one] for one in TOP_LEVEL), *(["buffer", one] for one in BUFFER_COMMANDS)])
def test_the_configuration_is_an_argument_or_an_option(tba, command):
    for way in (["nowhere.toml"], ["--config", "nowhere.toml"], ["-c", "nowhere.toml"]):
        refused(tba(*command, *way), 78, "nowhere.toml does not exist")


def test_a_configuration_given_twice_is_a_usage_error(tba):
    refused(tba("config", "show", "one.toml", "--config", "two.toml"), 2, "FILE one.toml and --config two.toml exclude")


def test_doctor_reports_every_check(tba, make_config, example_model):
    file = make_config(model={"path": str(example_model)}, search={"gpus": "cpu"}, train={"gpu": "cpu"}).file
    result = tba("doctor", "--json", "--config", file)
    findings = {row["check"]: row["result"] for row in json.loads(result.stdout)}
    assert findings["model"] == findings["gpus"] == findings["python"] == "ok"
    assert result.returncode == 0


def test_doctor_names_the_program_at_the_address_of_the_buffer(tba, start_tba, run_config):
    def found(*sets: str) -> tuple[str, str]:
        result = tba(
            "doctor", "--json", "--config", run_config.file, *(part for one in sets for part in ("--set", one))
        )
        (row,) = (row for row in json.loads(result.stdout) if row["check"] == "buffer address")
        return row["result"], row["detail"]

    address = run_config.address
    with socket.create_server(("127.0.0.1", 0)) as other:
        result, detail = found(f"buffer.address=tcp://127.0.0.1:{other.getsockname()[1]}")
    assert (result, "does not answer like a buffer" in detail) == ("fail", True)
    assert found() == ("ok", f"{address}: nothing listens there")
    start_tba("buffer", "serve", "--config", run_config.file)
    with closing(BufferClient(address, role="monitor", name="test")) as client:
        client.call(GetStatus(), Status, deadline_seconds=20)
    assert found() == ("ok", f"{address}: the buffer of run test answers")
    result, detail = found("run.name=other")
    assert (result, "is in use by the buffer of run test" in detail) == ("fail", True)


TWO_EQUAL_KEYS = """
from types import SimpleNamespace
from tba.searcher.tasks.task import Prompt
prompts = [Prompt(key, "question", "answer") for key in ("a", "b", "a")]
Mine = lambda: SimpleNamespace(name="mine", prompts=lambda: prompts, held_out=list, score=None)
"""


@pytest.mark.parametrize("command", [("config", "check", "--config"), ("doctor", "--config"), ("run",)])
@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("", "my_task:Mine cannot be loaded: AttributeError"),
        (TWO_EQUAL_KEYS, "task mine: the prompts 1 and 3 have the same key 'a'"),
    ],
)
def test_a_user_task_that_cannot_be_used_is_reported_before_anything_starts(
    tba, make_config, example_model, tmp_path, command, source, sentence
):
    run = make_config(
        model={"path": str(example_model)},
        task={"name": "my_task:Mine"},
        search={"gpus": "cpu"},
        train={"gpu": "cpu"},
    )
    (tmp_path / "my_task.py").write_text(source)
    result = tba(*command, run.file)
    assert result.returncode == (1 if command[0] == "doctor" else 78)
    assert sentence in " ".join((result.stderr + result.stdout).split())
    assert not run.directory.exists()


@pytest.fixture
def own_task(make_config, example_model, tmp_path):
    """Return a function that makes a configuration whose task has this source code."""

    def make(source: str):
        (tmp_path / "my_task.py").write_text(source)
        sections = {"model": {"path": str(example_model)}, "search": {"gpus": "cpu"}, "train": {"gpu": "cpu"}}
        return make_config(task={"name": "my_task:Mine"}, **sections)

    return make


@pytest.mark.parametrize("raised", ["raise MemoryError", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_task_that_runs_out_of_memory_is_not_a_configuration_error(tba, own_task, raised):
    refused(tba("run", own_task(raised).file), 1, "task.name my_task:Mine")


def test_a_real_time_signal_that_ends_the_check_of_a_task_is_named_by_its_number(tba, own_task):
    ended = "import os; os.kill(os.getpid(), 40)"
    refused(tba("run", own_task(ended).file), 1, "was ended by signal 40: it wrote nothing")


def test_the_output_of_a_task_does_not_hide_its_load_error(tba, own_task):
    refused(tba("run", own_task("print('loading\\n' * 50)\nraise KeyError('split')").file), 78, "KeyError: 'split'")


HANGING_TASK = """
import os, subprocess, time
worker = subprocess.Popen(["sleep", "600"])
open("pids", "w").write(f"{os.getpid()} {worker.pid}\\n")
time.sleep(600)
"""


def loading_processes(pids: Path, launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Wait for the process that loads a task and for the one that the task started, and return both."""
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert launcher.poll() is None
        time.sleep(0.05)
    return [psutil.Process(int(pid)) for pid in pids.read_text().split()]


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        (signal.SIGINT, EXIT_INTERRUPTED),
        (signal.SIGHUP, -signal.SIGHUP),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
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


def test_an_address_in_use_is_reported_before_a_task_loads_and_leaves_no_directory(own_task, tba, tmp_path):
    run = own_task("open('loaded', 'w').close()")
    with socket.create_server(("127.0.0.1", int(run.address.rpartition(":")[2]))):
        refused(tba("run", run.file), 1, f"buffer.address {run.address} is in use")
        assert not (tmp_path / "loaded").exists()
        own_options = ("--set", "task.name=arithmetic", "--set", f"run.dir={tmp_path}/new/folder/run")
        refused(tba("run", run.file, *own_options), 1, f"buffer.address {run.address} is in use")
    assert not (tmp_path / "new").exists()


def test_status_without_a_buffer_names_the_command_to_start_one(tba, run_config):
    refused(tba("status", "--config", run_config.file), 1, "is `tba buffer serve` running?")


def test_debug_shows_the_traceback(tba):
    result = tba("--debug", "run", "nowhere.toml")
    assert "Traceback" in result.stderr


def test_output_into_a_pipe_has_no_colours(tba, run_config):
    assert "\033" not in tba("config", "show", "--config", run_config.file).stdout
