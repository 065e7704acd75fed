"""The command line up to the start of a role: help, first arguments, imports, and one sentence per mistake."""

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from tba.cli import app
from tba.common.config.layers import removed
from tba.common.system.devices import list_gpus

NO_GPU = pytest.mark.skipif(bool(list_gpus()), reason="this machine has a GPU")


def refused(outcome, exit_code: int, *words: str) -> None:
    """Check that a command failed with this exit code and these words in its message."""
    assert outcome.exit_code == exit_code
    for word in words:
        assert word in outcome.message


def settings(**values: object) -> list[str]:
    """Options of a command that set keys of the configuration; a dot is written as two underscores."""
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


def test_a_removed_command_is_refused_with_what_is_in_its_place(tba_here):
    for command, instead in removed()["commands"].items():
        # An option has a value, or is followed by one.
        written = [f"{command}=x"] if " --" in command else []
        for line in [f"{command} x", *written]:
            done = tba_here(*line.split())
            assert (done.exit_code, done.message) == (2, f"there is no `tba {command}` any more: {instead}")


def test_what_is_wrong_with_arguments_is_named_first(tba_here, filled):
    assert tba_here("--version").output.startswith("tba ")
    refused(tba_here("sft", "nope.jsonl", "--out", "x"), 2, "nope.jsonl does not exist: name a jsonl file")
    refused(tba_here("sft", "/dev/null", "--held-out", "no.jsonl", "--out", "x"), 2, "no.jsonl does not exist")
    twice = ("config", "show", "one.toml", "--config", "two.toml")
    refused(tba_here(*twice), 2, "FILE one.toml and --config two.toml exclude")
    refused(tba_here("buffer", "query", filled), 2, f"pass it as --buffer {filled}")
    refused(tba_here("run", "--assume", "8x80"), 2, "--assume is for --dry-run")


@NO_GPU
@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (["search", "--gpus", "0-6"], 'pass --cpu 1, or set search.gpus = "cpu"'),
        (["train", "--gpu", "7"], 'pass --cpu, or set train.gpu = "cpu"'),
        (["sft", "/dev/null", "--out", "warm"], 'pass --cpu, or set train.gpu = "cpu"'),
        (["eval", "--snapshot", "v1"], 'pass --cpu, or set search.gpus = "cpu"'),
        (["run"], 'installed): set search.gpus = "cpu"'),
        (["run", "--set", "search.gpus=cpu"], 'installed): set train.gpu = "cpu"'),
    ],
)
def test_an_error_without_a_gpu_names_the_options_of_the_command(tba_here, example_model, command, remedy):
    refused(tba_here(*command, *settings(model__path=example_model)), 2, "this machine shows no GPU", remedy)


@pytest.mark.parametrize(
    ("address", "exit_code"), [("", 0), ("tcp://127.0.0.1:99999", 1), ("tcp://no-such-host.invalid:5757", 1)]
)
def test_doctor_reports_every_check_and_an_address_to_which_nothing_can_connect(
    tba_here, example_model, tmp_path, address, exit_code
):
    keys = {"model__path": example_model, "search__gpus": "cpu", "train__gpu": "cpu"}
    done = tba_here("doctor", "--json", *settings(**keys, buffer__address=address or f"ipc://{tmp_path}/buffer"))
    findings = {row["check"]: (row["result"], row["detail"]) for row in done.json}
    assert [findings[check][0] for check in ("model", "gpus", "python")] == ["ok"] * 3
    assert (done.exit_code, findings["buffer address"][0]) == (exit_code, "fail" if exit_code else "ok")
    assert findings["buffer address"][1].startswith(address)


def test_config_show_names_the_origin_of_each_value_and_writes_it_as_it_can_be_set(tba_here, tmp_path):
    phases = [{"until": 9, "weights": {"a b": 0.5, "reward": 1.0}}]
    parts = [{"name": "arithmetic", "options": {"most": float("inf")}}, {"name": "gsm8k", "train": "x.jsonl"}]
    (tmp_path / "run.toml").write_text(
        """[run]\nname = "test"
        [task]\nname = "mixture"\n[[task.phases]]\nuntil = 9\nweights = { "a b" = 0.5, reward = 1.0 }
        [[task.mixture]]\nname = "arithmetic"\noptions = { most = inf }
        [[task.mixture]]\nname = "gsm8k"\ntrain = "x.jsonl\""""
    )
    show = ("config", "show", "--config", "run.toml", "--set", "train.steps=5")
    rows = {row["key"]: row for row in tba_here(*show, "--json").json}
    assert rows["train.steps"] == {"key": "train.steps", "value": 5, "origin": "--set"}
    assert (rows["run.name"]["origin"], rows["train.beta"]["origin"]) == ("run.toml", "default")
    lines = tba_here(*show).output.splitlines()
    values: dict[str, Any] = {"train.adam_betas": [0.9, 0.99], "buffer.dedup": True}
    for key, value in {**values, "task.phases": phases, "task.mixture": parts}.items():
        (shown,) = (line for line in lines if line.startswith(f"{key} "))
        text = shown.removeprefix(key).strip().removesuffix("run.toml").removesuffix("default")
        assert tomllib.loads(f"x = {text}") == {"x": value}


SETTINGS = ("doctor", "--only", "settings")


def test_a_check_alone_has_the_exit_code_of_its_error(tba_here, example_model):
    assert tba_here(*SETTINGS, *settings(model__path=example_model)).exit_code == 0
    refused(tba_here(*SETTINGS, *settings(train__steps=3)), 78, "model.path is not set")
    failed = tba_here(*SETTINGS, "--json", *settings(train__steps=3))
    assert (failed.exit_code, failed.json[0]["check"], failed.json[0]["detail"]) == (78, "settings", failed.message)
    refused(tba_here("doctor", "--only", "setings"), 2, "there is no check setings: the checks are python, settings")
    refused(tba_here("doctor", "--only", "run directory"), 2, "there is no check run directory: ")
    elsewhere = tba_here("doctor", "--only", "compiler", "--assume", "8x80")
    refused(elsewhere, 2, "there is no check compiler with --assume: the checks are settings, gpus")


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A directory with incomplete copies of the example's model, a file, and a weights directory that is not one."""
    from tba.tests.conftest import EXAMPLE_MODEL

    folder = tmp_path_factory.mktemp("broken")
    for name, missing in (("no-tokenizer", "tokenizer*"), ("no-weights", "*.safetensors"), ("half", "nothing"),
                          ("no-index", "nothing")):  # fmt: skip
        shutil.copytree(EXAMPLE_MODEL, folder / name, ignore=shutil.ignore_patterns(missing))
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "half/model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "no-index/model.safetensors.index.json").write_text("<html>")
    (folder / "taken").mkdir()
    (folder / "taken/run").touch()
    (folder / "file").touch()
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model.path": "/nowhere"}, "model.path /nowhere does not exist"),
        ({"model.path": "TMP"}, "has no config.json: it is not a Hugging Face model directory"),
        ({"model.path": "TMP/no-tokenizer"}, "no-tokenizer has no tokenizer"),
        ({"model.path": "TMP/no-weights"}, "has no safetensors files"),
        ({"model.path": "TMP/half"}, "half lacks model-2.safetensors, which its index names"),
        ({"model.path": "TMP/no-index"}, "no-index/model.safetensors.index.json is malformed"),
        ({"reward_model.path": "./nothing"}, "reward_model.path ./nothing does not exist"),
        ({"task.name": "gsm8k", "task.train": "missing.jsonl"}, "task.train missing.jsonl does not exist"),
        ({"run.dir": "TMP/file/run"}, "file is not a directory"),
        ({"run.dir": "/proc/x"}, "/proc/x "),
        ({"search.weights_dir": "TMP/file"}, "file is not a directory"),
        ({"search.weights_dir": "/proc/self"}, "/proc/self is not writable"),
        ({"search.weights_dir": "TMP/taken"}, "is not a directory of this user"),
        (
            {"search.engine": "vllm", "train.gpu": "7", "search.gpus": "0-7"},
            "search.gpus = 0-7 and train.gpu = 7 both name GPU 7: name different ones",
        ),
    ],
)
def test_the_check_of_settings_names_the_key_and_the_path(tba_here, example_model, broken, changes, sentence):
    sets = [f"--set={key}={value.replace('TMP', str(broken))}" for key, value in changes.items()]
    result = tba_here(*SETTINGS, *settings(model__path=example_model), *sets)
    refused(result, 78, sentence, next(reversed(changes)))


@pytest.mark.parametrize("command", ["search --cpu 2", "train --cpu --processes 2"])
def test_a_missing_model_setting_is_refused_before_anything_is_created(tba_here, tmp_path, command):
    refused(tba_here(*command.split(), *settings(run__dir=tmp_path / "run")), 78, "model.path is not set")
    assert list(tmp_path.iterdir()) == []


def test_a_command_asks_for_its_configuration(tba_here, tmp_path):
    many = ("status", "eval", "generate 47+38=", "report", "run", "run --dry-run", "train --cpu", "search --cpu 1")
    of_buffer = ("stats", "tail", "check", "serve")
    for command in (*many, "sft /dev/null --out x", *(f"buffer {one}" for one in of_buffer)):
        done = tba_here(*command.split())
        refused(done, 2, "no ./tba.toml here: pass the configuration of the run with -c FILE", "`tba init`")
        assert list(tmp_path.iterdir()) == [], command


@pytest.mark.slow
def test_doctor_says_first_that_it_has_no_configuration(tba_here, example_model):
    start = "no ./tba.toml here: pass the configuration of the run with -c FILE. These are checks of this machine"
    only = ("doctor", "--only", "python")
    assert tba_here(*only).message.startswith(start)
    whole = tba_here("doctor")
    assert (whole.exit_code, "fail" in whole.output, "no GPU is configured" in whole.output) == (0, False, False)
    assert max(len(line) - len(line.rstrip()) for line in whole.output.splitlines()) == 0
    lines = [line.strip() for line in tba_here("buffer", "prune", "--help").output.splitlines()]
    assert "rewards, texts and history stay, and the settings that the run was last served" not in lines
    assert "no ./tba.toml" not in tba_here(*only, *settings(model__path=example_model)).message


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with the words that call it."""
    if not hasattr(group, "commands"):
        yield path, group
        return
    for name, command in group.commands.items():
        yield from commands(command, *path, name)


ALL = [pytest.param(*found, id=" ".join(found[0])) for found in commands(typer.main.get_command(app))]


def required(command: Any) -> list[str]:
    """Return values for what a command requires besides its first argument."""
    arguments = [one for one in command.params if one.required and one.param_type_name == "argument"]
    options = [one for one in command.params if one.required and one.param_type_name == "option"]
    what = ["--run", "other", "--yes"] if command.name == "prune" else []
    return [*what, *("other" for _ in arguments[1:]), *(part for one in options for part in (one.opts[0], "other"))]


@pytest.mark.parametrize(("path", "command"), ALL)
def test_a_configuration_is_understood_or_refused(tba_here, tmp_path, path, command):
    # A command that reads it stops at the unknown key.
    (tmp_path / "run.toml").write_text('[run]\nnam = "x"\n')
    found = tba_here(*path, "run.toml", *required(command))
    assert found.exit_code != 0, found.output
    # An argument that is a number is refused by typer, in a box.
    assert "run.toml" in found.message or "Invalid value" in found.message
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.toml"]
    names = {one.name for one in command.params if not one.required}
    if {"file", "config"} <= names:
        assert "run.nam" in found.message


HEAVY = {"torch", "transformers", "vllm", "safetensors", "matplotlib"}
# What a host of the buffer, or a command that only reads, imports.
CORE = (
    "tba.cli",
    "tba.buffer.server.start",
    "tba.buffer.tools.stats",
    "tba.buffer.tools.import_file",
    "tba.common.wire.client",
    "tba.deploy.launcher",
)


@pytest.mark.slow
def test_importing_the_core_loads_nothing_heavy():
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name); print(name, *sys.modules)"
    command = [sys.executable, "-c", code, *CORE]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    loaded = {name: HEAVY.intersection(modules) for name, *modules in map(str.split, lines)}
    assert {name: heavy for name, heavy in loaded.items() if heavy} == {}
    assert list(loaded) == list(CORE)
