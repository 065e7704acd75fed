"""Real `tba` processes, each ended by the test that started it."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tba.common.process import PARENT_VARIABLE

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def clean_environment() -> dict[str, str]:
    """The environment without tba's own variables; but a process that asks for its parent ends with this one."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TBA_")}
    return inherited | {"OMP_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid())}


@pytest.fixture
def make_config_in() -> Callable[..., RunConfig]:
    """Writes a configuration into a directory; keyword arguments are sections."""

    def make(folder: Path, **sections: dict[str, Any]) -> RunConfig:
        address = f"tcp://127.0.0.1:{free_port()}"
        directory = folder / "run"
        defaults = {
            "run": {"name": "test", "dir": str(directory)},
            "buffer": {"address": address},
            "search": {"weights_dir": str(folder / "weights")},
        }
        file = folder / "run.toml"
        file.write_text(
            "\n".join(toml(name, defaults.get(name, {}) | sections.get(name, {})) for name in {**defaults, **sections})
        )
        return RunConfig(str(file), address, directory)

    return make


@pytest.fixture
def make_config(make_config_in, tmp_path: Path) -> Callable[..., RunConfig]:
    """Writes a configuration; keyword arguments are sections."""
    return partial(make_config_in, tmp_path)


def toml(section: str, values: dict[str, Any]) -> str:
    """A section of TOML; JSON literals are TOML literals for what is used here."""
    import json

    return "\n".join([f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())])


@pytest.fixture
def run_config(make_config: Callable[..., RunConfig]) -> RunConfig:
    """The plainest configuration; one prompt is enough for a batch."""
    return make_config(train={"prompts_per_step": 1})


@pytest.fixture
def start_tba(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `tba ...` in the background; output goes to a file that a failing test can show.

    `patch` is Python that runs first, for faults of the system; keywords are more of the environment.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, patch: str = "", **environment: str) -> subprocess.Popen[bytes]:
        output = (tmp_path / f"tba{len(started)}.log").open("wb")
        program = ["-c", f"{patch}\nfrom tba.cli import main\nmain()"] if patch else ["-m", "tba"]
        command = [sys.executable, *program, *arguments]
        env = clean_environment() | environment
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
def tba(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `tba ...` to its end."""

    def run(*arguments: str, timeout: float = 120, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tba", *arguments]
        return subprocess.run(
            command, cwd=cwd or tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=timeout
        )

    return run
