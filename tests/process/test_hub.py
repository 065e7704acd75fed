"""Models of the hub, downloaded by the real client from a hub on this machine."""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tba.common.errors import EXIT_CONFIG
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.hub import Hub, serve_hub
from tba.tests.process.conftest import arithmetic, clean_environment, merged

SMALL_RUN: dict[str, dict[str, Any]] = {
    "task": {"limit": 64},
    "search": {"samples_per_prompt": 4},
    "train": {"steps": 2},
    "launch": {"drain_seconds": 10.0},
}


@pytest.fixture
def hub(tmp_path):
    with serve_hub(Hub({"org/tiny": EXAMPLE_MODEL, "org/closed": EXAMPLE_MODEL}, gated={"org/closed"})) as served:
        yield served


@pytest.fixture
def tba_with(hub, tmp_path, make_config):
    """Runs a command on a configuration whose model is `name`, with an empty cache of the hub at first."""

    def run(name, *arguments, **environment):
        file = make_config(**merged(arithmetic(**SMALL_RUN), {"model": {"path": name}})).file
        variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "COLUMNS": "400"} | environment
        command = [sys.executable, "-m", "tba", *arguments, "--config", str(file)]
        environment = clean_environment() | variables
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return run


def finding(outcome, check):
    return next(line for line in outcome.stdout.splitlines() if line.startswith(f"{check} "))


def test_a_dry_run_reads_the_configuration_of_a_model_and_a_run_downloads_it_once(tba_with, hub, tmp_path):
    dry = tba_with("org/tiny", "run", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "org/tiny is not a local directory: it will be downloaded from the hub" in finding(dry, "model")
    assert " fits: " in finding(dry, "trainer memory")
    assert "this run would start; not checked: weights directory" in dry.stdout
    assert hub.served == ["config.json"]

    run = tba_with("org/tiny", "run")
    assert run.returncode == 0, run.stdout + run.stderr
    assert hub.served.count("model.safetensors") == 1, "a searcher and a trainer of one machine share a download"

    hub.address = "http://127.0.0.1:9"
    again = tba_with("org/tiny", "doctor", "--json")
    model = next(row for row in json.loads(again.stdout) if row["check"] == "model")
    assert (model["result"], model["detail"]) == ("ok", "org/tiny is in the cache of the hub")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("models/nope", "model.path 'models/nope' is neither a directory nor a model the hub gives: 404"),
        ("org/closed", "model.path 'org/closed' is neither a directory nor a model the hub gives: 403"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_refused_before_anything_starts(tba_with, tmp_path, name, sentence):
    before = sorted(tmp_path.iterdir())
    for arguments in (("run", "--dry-run"), ("config", "check"), ("run",)):
        refused = tba_with(name, *arguments)
        assert refused.returncode == EXIT_CONFIG
        assert sentence in refused.stdout + refused.stderr
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".toml") == [
        path.name for path in before if path.suffix != ".toml"
    ]


def test_a_hub_that_does_not_answer_is_told_at_once(tba_with, hub):
    hub.address = "http://127.0.0.1:9"
    refused = tba_with("org/tiny", "run")
    assert refused.returncode == EXIT_CONFIG
    assert "'org/tiny' is not a local directory, and it cannot be downloaded from the hub (" in refused.stderr
    checked = tba_with("org/tiny", "config", "check")
    assert (checked.returncode, "cannot be downloaded from the hub" in checked.stderr) == (0, True)
