"""Fixtures that several test folders use. A fixture ends only processes that it started."""

import functools
import itertools
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.tests.helpers.puts import make_trajectory

# Torch reads it at import. On a busy machine, two OpenMP threads are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import typer.testing
from typer.main import get_command

from tba.cli import app
from tba.common import run_snapshots
from tba.common.config import Config
from tba.common.errors import TbaError
from tba.common.wire.trajectory import Trajectory
from tba.tests.helpers.buffer import ServiceHarness
from tba.tests.optional_packages import missing_package

ROOT = Path(__file__).parent.parent
EXAMPLE_MODEL = ROOT / "examples/arithmetic/model"


_numbers = itertools.count()
# The tree of commands is the same in each test, and takes longer to make than most commands take to run.
_command_of = functools.cache(get_command)


@pytest.fixture(autouse=True)
def memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers in this process publish below a directory of the test, not in the machine's memory."""
    # Not `mktemp`, which lists the directories of all tests before this one.
    directory = tmp_path_factory.getbasetemp() / f"memory/{next(_numbers)}"
    directory.mkdir(parents=True)
    monkeypatch.setattr(run_snapshots, "MEMORY", directory)


@pytest.fixture
def example_model() -> Path:
    """The checkpoint of examples/arithmetic."""
    return EXAMPLE_MODEL


@pytest.fixture
def test_data() -> Path:
    """The folder with gsm8k and math500. Skips the test without it, because users do not have it."""
    folder = os.environ.get("TBA_TEST_DATA")
    if not folder or not Path(folder, "gsm8k").is_dir():
        pytest.skip("TBA_TEST_DATA does not name a folder with gsm8k/")
    return Path(folder)


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    """Makes trajectories."""
    return make_trajectory


@dataclass(frozen=True)
class Outcome:
    """The exit code, the output, and the error sentence or standard error of a command."""

    exit_code: int
    output: str
    message: str

    @property
    def json(self) -> Any:
        return json.loads(self.output)


@contextmanager
def own_process_state() -> Iterator[None]:
    """Restore what a command sets up for its process: signal handlers and logs."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    log = logging.getLogger("tba")
    kept = log.handlers[:], log.level, log.propagate
    try:
        yield
    finally:
        log.handlers[:], log.level, log.propagate = kept
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture
def tba_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs `tba ...` in this process and in `tmp_path`. A process of its own would import for a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(typer.testing, "_get_command", _command_of)

    def run(*arguments: object) -> Outcome:
        with own_process_state():
            result = typer.testing.CliRunner().invoke(app, [*map(str, arguments)])
        if package := missing_package(result.exception):
            pytest.skip(f"{package} is not installed")
        if isinstance(result.exception, TbaError):
            return Outcome(result.exception.exit_code, result.stdout, str(result.exception))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Callable[..., ServiceHarness]]:
    """Makes service harnesses; `harness(buffer={...}, train={...})` sets configuration keys.

    `fill` has the arguments of `ServiceHarness.fill`: prompts, responses to each, and a snapshot that is announced.
    """
    made: list[ServiceHarness] = []

    def make(
        path: Path | None = None, *, fill: tuple[int, int] | None = None, **sections: dict[str, Any]
    ) -> ServiceHarness:
        config = Config.model_validate({"train": {"prompts_per_step": 1}} | sections)
        made.append(ServiceHarness(path or tmp_path / f"buffer{len(made)}.sqlite", config))
        if fill is not None:
            made[-1].fill(*fill)
        return made[-1]

    yield make
    for harness in made:
        harness.store.close()
