"""Models of the hub, downloaded by the real client from a hub on this machine."""

import os
import shutil
import signal
from typing import Any

import pytest

from tba.common.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.hub import COMMIT, Hub, serve_hub
from tba.tests.process.conftest import arithmetic, merged

SMALL_RUN: dict[str, dict[str, Any]] = {
    "task": {"limit": 64},
    "search": {"samples_per_prompt": 4},
    "train": {"steps": 2},
    "launch": {"drain_seconds": 10.0},
}
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def hub(tmp_path):
    without = {}
    for missing in ("model.safetensors", "tokenizer.json"):
        without[missing] = tmp_path / "models" / missing
        shutil.copytree(EXAMPLE_MODEL, without[missing], ignore=shutil.ignore_patterns(f"{missing.partition('.')[0]}*"))
    models = {
        "org/tiny": EXAMPLE_MODEL,
        "org/closed": EXAMPLE_MODEL,
        "org/no-weights": without["model.safetensors"],
        "org/no-tokenizer": without["tokenizer.json"],
    }
    with serve_hub(Hub(models, gated={"org/closed"})) as served:
        yield served


@pytest.fixture
def start_with(hub, tmp_path, make_config, start_tba):
    """Starts a command on a configuration whose model is `name`; the cache of the hub is empty at first.

    Returns the process, and a function that waits for its end and returns its exit code and output.
    """

    def start(name, *arguments, sections=None, **variables):
        file = make_config(**merged(arithmetic(**SMALL_RUN), {"model": {"path": name}} | (sections or {}))).file
        of_hub = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "COLUMNS": "400"}
        log = tmp_path / f"tba{len(list(tmp_path.glob('tba*.log')))}.log"
        process = start_tba(*arguments, "--config", str(file), **of_hub | variables)
        return process, lambda: (process.wait(120), log.read_text())

    return start


@pytest.fixture
def tba_with(start_with):
    """Runs a command like `start_with` to its end, and returns its exit code and output."""
    return lambda name, *arguments, **keywords: start_with(name, *arguments, **keywords)[1]()


@pytest.fixture
def begin_with(start_with, tmp_path):
    """Starts a run like `start_with`, and ends it when its processes start: all downloads come before."""

    def databases() -> int:
        # Not `rglob`, which fails at a directory that disappears meanwhile.
        return sum("buffer.sqlite" in names for _, _, names in os.walk(tmp_path))

    def begin(name, **keywords):
        before = databases()
        run, ended = start_with(name, "run", **keywords)
        wait_until(lambda: run.poll() is not None or databases() > before)
        run.terminate()
        code, output = ended()
        assert code == 0, output

    return begin


def finding(output, check):
    return next(line for line in output.splitlines() if line.startswith(f"{check} "))


def test_a_dry_run_reads_the_configuration_of_a_model_and_a_run_downloads_it(tba_with, begin_with, hub):
    code, output = tba_with("org/tiny", "run", "--dry-run")
    assert code == 0, output
    assert "org/tiny is not a local directory: it will be downloaded from the hub" in finding(output, "model")
    assert " fits: " in finding(output, "trainer memory")
    assert "this run would start; not checked: weights directory" in output
    assert hub.served == ["config.json"]

    begin_with("org/tiny")
    # The cache is complete: no process asks the hub again.
    hub.requests.clear()
    again = {"run": {"name": "other", "dir": "runs/other"}}
    code, output = tba_with("org/tiny", "run", "--dry-run", sections=again)
    assert (code, "org/tiny is in the cache of the hub" in finding(output, "model")) == (0, True), output
    code, output = tba_with("org/tiny", "run", sections=again)
    assert (code, [path for path in hub.requests if "tiny" in path]) == (0, []), output


def test_a_cache_that_lacks_a_file_is_completed(begin_with, hub, tmp_path):
    """As transformers leaves one that it filled file by file: without a list of the files."""
    cached = tmp_path / "hf/hub/models--org--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(COMMIT)
    without = shutil.ignore_patterns("generation_config.json")
    shutil.copytree(EXAMPLE_MODEL, cached / "snapshots" / COMMIT, ignore=without)
    begin_with("org/tiny")
    assert hub.served == ["generation_config.json"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("models/nope", "model.path 'models/nope' is neither a directory nor a model the hub gives: 404"),
        ("org/closed", "a model the hub gives: accept its licence on the hub, then `hf auth login`"),
        ("org/no-weights", "model.path org/no-weights has no safetensors files on the hub"),
        ("org/no-tokenizer", "model.path org/no-tokenizer has no tokenizer: no file is called"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_refused_before_anything_starts(tba_with, tmp_path, name, sentence):
    before = {path.name for path in tmp_path.iterdir()}
    for arguments in [("run",)] if name != "models/nope" else [("doctor", "--only", "model"), ("run",)]:
        code, output = tba_with(name, *arguments)
        assert (code, sentence in output) == (EXIT_CONFIG, True), output
    created = {path.name for path in tmp_path.iterdir() if path.suffix not in {".toml", ".log"}} - before
    assert created <= {"hf"}, "no run directory"


@pytest.mark.parametrize("fault", ["nothing listens", "503", "no network, and a dry run before"])
def test_a_hub_that_does_not_answer_is_told_at_once(tba_with, hub, fault, tmp_path):
    if fault == "503":
        hub.status = 503
    elif fault == "nothing listens":
        hub.address = NOWHERE
    else:
        # It leaves a cache with the configuration alone.
        assert tba_with("org/tiny", "run", "--dry-run")[0] == 0
    variables = {"HF_HUB_OFFLINE": "1"} if fault.startswith("no network") else {}
    sentence = "'org/tiny' is not a local directory, and it cannot be downloaded from the hub ("
    code, output = tba_with("org/tiny", "run", **variables)
    assert (code, sentence in output) == (EXIT_FAILED, True), output
    assert not list(tmp_path.rglob("buffer.sqlite"))
    if fault == "503":
        code, output = tba_with("org/tiny", "doctor", "--only", "model")
        assert (code, f"model.path {sentence}" in output) == (0, True), output


def test_models_that_only_evaluations_use_are_asked_for_only_if_there_is_one(tba_with, begin_with, hub):
    embedder = {"embedder": "org/none", "samples": 4}
    code, output = tba_with("org/tiny", "run", sections={"eval": embedder | {"at_end": True}})
    assert (code, "eval.embedder 'org/none' is neither a directory nor" in output) == (EXIT_CONFIG, True), output
    assert hub.served == ["config.json"], "all names are asked for before weights are downloaded"
    begin_with("org/tiny", sections={"eval": embedder | {"at_end": False}})


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, 0)])
def test_a_signal_during_the_download_ends_the_run_that_has_not_started(start_with, hub, tmp_path, number, code):
    hub.sends_weights.clear()
    run, _ = start_with("org/tiny", "run")
    wait_until(lambda: "model.safetensors" in hub.served)
    assert not list(tmp_path.rglob("buffer.sqlite")), "no process starts before the download is complete"
    run.send_signal(number)
    assert run.wait(60) == code
