"""Real `tba` processes, each ended by the test that started it."""

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from tba.common.system.process import PARENT_VARIABLE
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import Scored
from tba.searcher.tasks.task import Prompt
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.announcer import Announcer
from tba.tests.helpers.buffer import ask, steps_trained

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RunConfig:
    """A run in a temporary directory."""

    file: str
    address: str
    directory: Path

    @property
    def database(self) -> Path:
        return self.directory / "buffer.sqlite"

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query of the database, which a buffer may be writing to."""
        return ask(self.database, sql, *values)

    def steps_trained(self) -> int:
        """Return the number of trained steps, 0 as long as there is no database."""
        return steps_trained(self.database)

    def lines(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """Return the complete lines of a file of the run: the last one may still be being written."""
        path = self.directory / file
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def clean_environment() -> dict[str, str]:
    """Return the environment without tba's variables, except the one that makes processes end with this one."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TBA_")}
    return inherited | {"OMP_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid())}


def submit(rewards: Rewards, asked: Iterable[tuple[Prompt, str]], first: int = 0) -> None:
    """Submit responses to prompts, under the numbers from `first`."""
    for ticket, (prompt, text) in enumerate(asked, first):
        rewards.submit(ticket, prompt, text, True)


def collect(rewards: Rewards) -> list[Scored]:
    """Wait until all that was submitted is scored. Returns it in the order of its numbers."""
    found: dict[int, Scored] = {}
    while rewards.waiting:
        for scored in rewards.wait(1.0):
            assert scored.ticket not in found
            found[scored.ticket] = scored
    return [found[ticket] for ticket in sorted(found)]


def run_example(file: str, *arguments: object) -> None:
    """Run a program of examples/ in this process, which has torch already."""
    path = ROOT / "examples" / file
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [str(path.parent), *sys.path])
        patched.setattr(sys, "argv", [file, *map(str, arguments)])
        runpy.run_path(str(path), run_name="__main__")


def changed(*changes: str) -> list[str]:
    """Return the options that change the configuration of a command."""
    return [part for change in changes for part in ("--set", change)]


@pytest.fixture
def make_config_in() -> Callable[..., RunConfig]:
    """A function that writes a configuration into a directory; keyword arguments are sections."""

    def make(folder: Path, **sections: dict[str, Any]) -> RunConfig:
        address = sections.get("buffer", {}).get("address") or f"tcp://127.0.0.1:{free_port()}"
        directory = folder / "run"
        defaults = {
            "run": {"name": "test", "dir": str(directory)},
            "buffer": {"address": address},
            "search": {"weights_dir": str(folder / "weights")},
        }
        file = folder / "run.toml"
        file.write_text("\n".join(toml(name, values) for name, values in merged(defaults, sections).items()))
        return RunConfig(str(file), address, directory)

    return make


@pytest.fixture
def make_config(make_config_in, tmp_path: Path) -> Callable[..., RunConfig]:
    """A function that writes a configuration into `tmp_path`; keyword arguments are sections."""
    return partial(make_config_in, tmp_path)


def arithmetic(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of a small run of the arithmetic example on the CPU, with changes."""
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": str(EXAMPLE_MODEL), "dtype": "float32"},
        "task": {"name": "arithmetic", "limit": 96, "held_out_limit": 32},
        "search": {
            "engine": "transformers",
            "gpus": "cpu",
            "samples_per_prompt": 4,
            "max_in_flight": 32,
            "max_tokens": 6,
        },
        "train": {
            "gpu": "cpu",
            "steps": 12,
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "learning_rate": 1e-4,
            "schedule": "constant",
            "warmup_steps": 2,
            "publish_every": 1,
        },
    }
    return merged(defaults, sections)


def merged(defaults: dict[str, dict[str, Any]], sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return sections with defaults for the keys that they lack."""
    return {name: defaults.get(name, {}) | sections.get(name, {}) for name in {**defaults, **sections}}


def toml(section: str, values: dict[str, Any]) -> str:
    """Return a section as TOML."""
    return "\n".join([f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in values.items())])


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    # Texts and numbers are written the same in JSON and TOML.
    return json.dumps(value)


@pytest.fixture
def run_config(make_config: Callable[..., RunConfig]) -> RunConfig:
    """A minimal configuration, with one prompt per batch."""
    return make_config(train={"prompts_per_step": 1})


@pytest.fixture
def raw(config: RunConfig) -> Iterator[Any]:
    """A socket that sends arbitrary frames to the buffer of the fixture `config`."""
    socket: Any = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(config.address)
    yield socket
    socket.close()


@pytest.fixture
def start_tba(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A function that starts `tba ...` in the background, with its output in a file of `tmp_path`.

    `patch` is Python code to run first, to simulate faults of the system, and `inside` a command that starts it
    elsewhere; keyword arguments are environment variables.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(
        *arguments: str, patch: str = "", inside: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        program = ["-c", f"{patch}\nfrom tba.cli import main\nmain()"] if patch else ["-m", "tba"]
        command = [*inside, sys.executable, *program, *arguments]
        env = clean_environment() | environment
        with (tmp_path / f"tba{len(started)}.log").open("wb") as output:
            process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=output, stderr=output)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
    for process in started:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def start_script() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts Python code with pipes of text; `inside` is a command that starts it elsewhere."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str, inside: Sequence[str] = ()) -> subprocess.Popen[str]:
        command, pipe = [*inside, sys.executable, "-c", code, *arguments], subprocess.PIPE
        started.append(subprocess.Popen(command, env=clean_environment(), stdin=pipe, stdout=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def serve_weights(start_tba, example_model) -> Iterator[Callable[[RunConfig], Announcer]]:
    """A function that starts the buffer of a run, and announces weights as version 0. Returns the announcer."""
    made: list[Announcer] = []

    def serve(run: RunConfig) -> Announcer:
        start_tba("buffer", "serve", "--config", run.file)
        made.append(Announcer(run.address, example_model, run.directory / "snapshots"))
        made[-1].announce(0)
        return made[-1]

    yield serve
    for announcer in made:
        announcer.client.close()


@pytest.fixture
def tba(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs `tba ...` and returns when it has ended."""

    def run(*arguments: str, timeout: float = 300, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tba", *arguments]
        return subprocess.run(
            command, cwd=cwd or tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=timeout
        )

    return run
