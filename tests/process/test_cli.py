"""The command line, as a user runs it: real processes, exit codes, one sentence for each mistake."""

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

from tba.common import wire
from tba.common.client import BufferClient
from tba.common.devices import list_gpus
from tba.common.errors import EXIT_INTERRUPTED
from tba.tests.classifiers import make_classifier

from .conftest import clean_environment

NO_GPU = pytest.mark.skipif(bool(list_gpus()), reason="this machine has a GPU")


def refused(result: subprocess.CompletedProcess[str], exit_code: int, *words: str) -> None:
    """One sentence on standard error with the given words, no traceback, the given exit code."""
    assert result.returncode == exit_code, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_help_loads_only_what_prints_it():
    """Half a second is what a person bears, and each of these packages takes longer than all the rest."""
    command = [sys.executable, "-X", "importtime", "-m", "tba", "--help"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"torch", "vllm", "transformers", "numpy", "pydantic", "zmq", "msgpack", "sqlite_utils"}


@pytest.mark.parametrize("command", [[], ["buffer"], ["config"], ["run"], ["search"], ["train"], ["eval"], ["status"]])
def test_every_command_has_help(tba, command):
    result = tba(*command, "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize(
    "command", ["serve", "stats", "query", "show", "tail", "export", "import", "compact", "check", "backup", "migrate"]
)
def test_every_buffer_command_has_help_and_takes_a_file(tba, command):
    result = tba("buffer", command, "--help")
    assert result.returncode == 0
    assert "--buffer" in result.stdout


def test_output_into_a_closed_pipe_is_no_traceback(tba, run_config, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt_ids": [1], "response_ids": [2]}\n')
    assert tba("buffer", "import", "one.jsonl", "--config", run_config.file).returncode == 0
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 200000) SELECT i FROM n"
    for option in ("--csv", "--json"):
        command = [sys.executable, "-m", "tba", "buffer", "query", many, option, "--config", run_config.file]
        with subprocess.Popen(
            command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            process.stdout.readline()
            process.stdout.close()
            errors = process.stderr.read()
        assert process.returncode == 1
        assert errors == b""


def test_version(tba):
    assert tba("--version").stdout.startswith("tba ")


def test_an_unknown_option_is_wrong_usage(tba):
    refused(tba("train", "--frobnicate"), 2, "No such option")


def test_an_unknown_key_in_the_file_is_exit_78(tba, make_config):
    file = make_config(train={"stepz": 3}).file
    refused(tba("train", "--config", file), 78, "unknown key train.stepz", "did you mean train.steps?")


def test_a_missing_file_is_exit_78(tba):
    refused(tba("run", "nowhere.toml"), 78, "nowhere.toml does not exist")


@NO_GPU
@pytest.mark.parametrize(
    ("command", "way_out"),
    [
        (["search", "--gpus", "0-6"], 'pass --cpu 1, or set search.gpus = "cpu"'),
        (["train", "--gpu", "7"], 'pass --cpu, or set train.gpu = "cpu"'),
        (["sft", "pairs.jsonl", "--out", "warm"], 'pass --cpu, or set train.gpu = "cpu"'),
        (["eval"], 'pass --cpu, or set search.gpus = "cpu"'),
        (["run"], 'installed): set search.gpus = "cpu"'),
        (["run", "--set", "search.gpus=cpu"], 'installed): set train.gpu = "cpu"'),
    ],
)
def test_a_machine_without_a_gpu_says_so_and_names_what_the_command_has(
    tba, make_config, example_model, command, way_out
):
    file = make_config(model={"path": str(example_model)}).file
    refused(tba(*command, "--config", file), 2, "this machine shows no GPU", way_out)


@NO_GPU
def test_doctor_names_the_setting_that_asks_for_a_gpu(tba, make_config, example_model):
    file = make_config(model={"path": str(example_model)}, search={"gpus": "cpu"}).file
    result = tba("doctor", file)
    assert result.returncode == 1
    assert 'installed): set train.gpu = "cpu"' in result.stdout


def test_a_missing_model_is_exit_78(tba, make_config):
    file = make_config(search={"engine": "transformers"}, model={"path": "/nowhere"}).file
    result = tba("search", "--cpu", "1", "--config", file, timeout=120)
    refused(result, 78, "/nowhere")


def test_a_missing_extra_is_one_sentence(tmp_path):
    """As on a buffer host: torch is hidden from this process."""
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


def test_config_check(tba, make_config, example_model):
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
        ({"run.dir": "TMP/run.toml/run"}, "run.toml is no directory"),
    ],
)
def test_config_check_names_the_key_and_the_path_of_what_is_not_there(
    tba, make_config, example_model, tmp_path, settings, sentence
):
    for name, removed in (("no-tokenizer", "tokenizer*"), ("no-weights", "*.safetensors"), ("half", "nothing")):
        shutil.copytree(example_model, tmp_path / name, ignore=shutil.ignore_patterns(removed))
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "half/model.safetensors.index.json").write_text(json.dumps(index))
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
def test_a_model_that_is_not_set_is_told_once_and_nothing_is_made(tba, tmp_path, command):
    result = tba(*command, "--set", f"run.dir={tmp_path / 'run'}")
    refused(result, 78, "model.path is not set")
    assert result.stderr.count("model.path") == 1
    assert not (tmp_path / "run").exists()


def test_config_check_says_what_will_come_from_the_hub_and_loads_no_torch(make_config, tmp_path):
    file = make_config(model={"path": "some/model"}).file
    command = [sys.executable, "-X", "importtime", "-m", "tba", "config", "check", file]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=clean_environment())
    assert "model.path some/model is no directory here: it will be taken from the hub" in result.stderr
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "pydantic" in loaded
    assert not loaded & {"torch", "vllm", "transformers"}


ALONE = ("run", "search", "train", "eval", "plot", "status", "doctor")
OF_THE_BUFFER = ("serve", "stats", "tail", "compact", "check", "migrate")


@pytest.mark.parametrize("command", [*([one] for one in ALONE), *(["buffer", one] for one in OF_THE_BUFFER)])
def test_the_configuration_is_an_argument_or_an_option(tba, command):
    for way in (["nowhere.toml"], ["--config", "nowhere.toml"], ["-c", "nowhere.toml"]):
        refused(tba(*command, *way), 78, "nowhere.toml does not exist")


def test_a_configuration_given_in_both_ways_is_wrong_usage(tba):
    refused(tba("config", "show", "one.toml", "--config", "two.toml"), 2, "FILE one.toml and --config two.toml exclude")


def test_doctor_reports_every_check(tba, make_config, example_model):
    file = make_config(model={"path": str(example_model)}, search={"gpus": "cpu"}, train={"gpu": "cpu"}).file
    result = tba("doctor", "--json", "--config", file)
    findings = {row["check"]: row["result"] for row in json.loads(result.stdout)}
    assert findings["model"] == findings["gpus"] == findings["python"] == "ok"
    assert result.returncode == 0


def test_doctor_tells_who_has_the_address_of_the_buffer(tba, start_tba, run_config):
    def found(*sets: str) -> tuple[str, str]:
        result = tba(
            "doctor", "--json", "--config", run_config.file, *(part for one in sets for part in ("--set", one))
        )
        (row,) = (row for row in json.loads(result.stdout) if row["check"] == "buffer address")
        return row["result"], row["detail"]

    address = run_config.address
    with socket.create_server(("127.0.0.1", 0)) as other:
        result, detail = found(f"buffer.address=tcp://127.0.0.1:{other.getsockname()[1]}")
    assert (result, "does not answer as a buffer does" in detail) == ("fail", True)
    assert found() == ("ok", f"{address}: nothing listens there")
    start_tba("buffer", "serve", "--config", run_config.file)
    with closing(BufferClient(address, role="monitor", name="test")) as client:
        client.call(wire.GetStatus(), wire.Status, deadline_seconds=20)
    assert found() == ("ok", f"{address}: the buffer of run test answers")
    result, detail = found("run.name=other")
    assert (result, "is taken by the buffer of run test" in detail) == ("fail", True)


def test_doctor_looks_into_the_reward_model(tba, make_config, example_model, tmp_path):
    classifier = make_classifier(tmp_path / "classifier")
    model, reward_model = {"path": str(example_model)}, {"path": str(classifier), "template": "chat"}
    roles = {"search": {"gpus": "cpu"}, "train": {"gpu": "cpu"}}
    result = tba("doctor", "--json", "--config", make_config(model=model, reward_model=reward_model, **roles).file)
    (finding,) = [row for row in json.loads(result.stdout) if row["check"] == "reward model"]
    assert finding["result"] == "fail"
    assert "has no chat template" in finding["detail"]
    assert result.returncode == 1


@pytest.mark.parametrize("command", [("config", "check", "--config"), ("doctor", "--config"), ("run",)])
def test_a_task_of_ones_own_that_does_not_load_is_told_before_anything_starts(
    tba, make_config, example_model, tmp_path, command
):
    run = make_config(
        model={"path": str(example_model)},
        task={"name": "my_task:Missing"},
        search={"gpus": "cpu"},
        train={"gpu": "cpu"},
    )
    (tmp_path / "my_task.py").write_text("")
    result = tba(*command, run.file)
    assert result.returncode == (1 if command[0] == "doctor" else 78)
    assert "my_task:Missing cannot be loaded: AttributeError" in result.stderr + result.stdout
    assert not run.directory.exists()


@pytest.fixture
def own_task(make_config, example_model, tmp_path):
    """A configuration whose task is this source code."""

    def make(source: str):
        (tmp_path / "my_task.py").write_text(source)
        sections = {"model": {"path": str(example_model)}, "search": {"gpus": "cpu"}, "train": {"gpu": "cpu"}}
        return make_config(task={"name": "my_task:Mine"}, **sections)

    return make


@pytest.mark.parametrize("raised", ["raise MemoryError", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_task_that_finds_too_little_memory_is_no_wrong_configuration(tba, own_task, raised):
    refused(tba("run", own_task(raised).file), 1, "task.name my_task:Mine")


def test_a_real_time_signal_that_ends_what_loads_a_task_is_named_by_its_number(tba, own_task):
    ended = "import os; os.kill(os.getpid(), 40)"
    refused(tba("run", own_task(ended).file), 1, "was ended by signal 40: it said nothing")


def test_what_a_task_prints_does_not_hide_why_it_does_not_load(tba, own_task):
    refused(tba("run", own_task("print('loading\\n' * 50)\nraise KeyError('split')").file), 78, "KeyError: 'split'")


LOADS_FOR_EVER = """
import os, subprocess, time
worker = subprocess.Popen(["sleep", "600"])
open("pids", "w").write(f"{os.getpid()} {worker.pid}\\n")
time.sleep(600)
"""


def loaders(pids: Path, launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process that loads a task, and the one that the task started, as soon as both are there."""
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert launcher.poll() is None
        time.sleep(0.05)
    return [psutil.Process(int(pid)) for pid in pids.read_text().split()]


def test_ctrl_c_while_a_task_is_loaded_is_an_interrupt_and_ends_what_loads_it(own_task, start_tba, tmp_path):
    run = own_task(LOADS_FOR_EVER)
    launcher = start_tba("run", run.file)
    started = loaders(tmp_path / "pids", launcher)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == EXIT_INTERRUPTED
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert not run.directory.exists()


@pytest.mark.parametrize("end", [signal.SIGHUP, signal.SIGKILL])
def test_nothing_of_a_task_outlives_a_launcher_that_is_ended_while_it_loads(own_task, start_tba, tmp_path, end):
    launcher = start_tba("run", own_task(LOADS_FOR_EVER).file)
    started = loaders(tmp_path / "pids", launcher)
    launcher.send_signal(end)
    assert launcher.wait(60) == -end
    assert psutil.wait_procs(started, timeout=60)[1] == []


def test_what_a_task_has_started_ends_with_its_check(own_task, tba, tmp_path):
    loads = LOADS_FOR_EVER.replace("time.sleep(600)", "raise KeyError('split')")
    refused(tba("run", own_task(loads).file), 78, "KeyError: 'split'")
    _, worker = (tmp_path / "pids").read_text().split()
    assert not psutil.pid_exists(int(worker))


def test_a_busy_address_is_told_before_a_task_is_loaded_and_leaves_no_directory(own_task, tba, tmp_path):
    run = own_task("open('loaded', 'w').close()")
    with socket.create_server(("127.0.0.1", int(run.address.rpartition(":")[2]))):
        refused(tba("run", run.file), 1, f"buffer.address {run.address} is in use")
        assert not (tmp_path / "loaded").exists()
        of_ours = ("--set", "task.name=arithmetic", "--set", f"run.dir={tmp_path}/new/folder/run")
        refused(tba("run", run.file, *of_ours), 1, f"buffer.address {run.address} is in use")
    assert not (tmp_path / "new").exists()


def test_status_without_a_buffer_says_what_to_start(tba, run_config):
    refused(tba("status", "--config", run_config.file), 1, "is `tba buffer serve` running?")


def test_stats_without_a_database_say_so(tba, run_config):
    refused(tba("buffer", "stats", "--config", run_config.file), 2, "does not exist")


def test_debug_shows_the_traceback(tba):
    result = tba("--debug", "run", "nowhere.toml")
    assert "Traceback" in result.stderr


def test_output_into_a_pipe_has_no_colours(tba, run_config):
    assert "\033" not in tba("config", "show", "--config", run_config.file).stdout
