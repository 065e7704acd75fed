"""A second trainer is started while the first one is in a long step; real processes and sockets.

The long step reads from a FIFO, the gate. The gate can be opened for writing once the step has begun, and closing it
ends the step.
"""

import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tba.common.config.layers import resolve
from tba.common.errors import EXIT_CONFIG
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.trainer import BufferThread, FakeSearcher, save_tiny_model

STEPS = 3
LONG_STEP = """
from tba.trainer.step.learner import Learner
make_step = Learner.step
def step(self, batch):
    if self.steps_done == 1:
        open({gate!r}).read()
    return make_step(self, batch)
Learner.step = step
"""


class System:
    """A buffer, data for all steps, and a first trainer whose second step lasts until `end_step`."""

    def __init__(self, folder: Path, make_config: Callable[..., Any], start_tba: Callable[..., Any]) -> None:
        train = {"steps": STEPS, "prompts_per_step": 2, "samples_per_prompt": 3, "warmup_steps": 0, "decay_steps": 1}
        model = {"path": str(save_tiny_model(folder / "model")), "dtype": "float32"}
        made = make_config(model=model, train=train)
        self._file, self._database, self._folder, self._start = made.file, made.database, folder, start_tba
        self._started = 0
        self._address = made.address
        self.buffer = BufferThread(resolve(Path(made.file)).config, address=made.address)
        os.mkfifo(folder / "gate")

    def start(self) -> None:
        """Start the first trainer, and wait until it is in its long step."""
        self.first = self.train(patch=LONG_STEP.format(gate=str(self._folder / "gate")))
        searcher = FakeSearcher(self._address, prompts=4)
        searcher.wait_for_weights(seconds=60)
        searcher.put_groups(8)
        searcher.close()
        wait_until(self._is_in_step)

    def _is_in_step(self) -> bool:
        """Whether the first trainer reads from the gate. If so, the gate stays open."""
        try:
            self._gate = os.open(self._folder / "gate", os.O_WRONLY | os.O_NONBLOCK)
        # No process reads from the gate.
        except OSError:
            assert self.first.poll() is None, self.log(0)
            return False
        return True

    def end_step(self) -> None:
        """Let the first trainer continue."""
        os.close(self._gate)

    def train(self, *arguments: str, patch: str = "") -> subprocess.Popen[bytes]:
        self._started += 1
        return self._start("train", "--cpu", "--config", self._file, *arguments, patch=patch)

    def train_elsewhere(self, tba_here: Callable[..., Any]) -> Any:
        """Run a second trainer with another run.dir, in this process, to its end."""
        return tba_here("train", "--cpu", "--config", self._file, "--set", f"run.dir={self._folder / 'other'}")

    def log(self, number: int) -> str:
        return (self._folder / f"tba{number}.log").read_text()

    def steps(self) -> list[int]:
        """Return the reported steps."""
        with closing(sqlite3.connect(self._database)) as database, database:
            return [row[0] for row in database.execute("SELECT step FROM batches WHERE trained_at IS NOT NULL")]


@pytest.fixture
def system(tmp_path: Path, make_config: Callable[..., Any], start_tba: Callable[..., Any]) -> Iterator[System]:
    made = System(tmp_path, make_config, start_tba)
    try:
        made.start()
        yield made
    finally:
        made.buffer.stop()


def test_a_trainer_in_a_long_step_is_not_replaced_by_a_second_one(system, tba_here):
    # It retries for 13 seconds, while the first one is in its step.
    second = system.train_elsewhere(tba_here)
    assert (second.exit_code, "is at work on run test" in second.message) == (EXIT_CONFIG, True)
    assert system.first.poll() is None
    assert system.steps() == [0]
    system.end_step()
    assert system.first.wait(60) == 0, system.log(0)
    assert system.steps() == list(range(STEPS))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_killed_or_stopped_in_a_long_step_is_replaced(system, tba_here, how):
    system.first.send_signal(how)
    second = system.train_elsewhere(tba_here)
    assert second.exit_code == 0, second.message
    assert system.steps() == list(range(STEPS))
    if how == signal.SIGSTOP:
        system.first.send_signal(signal.SIGCONT)
        system.end_step()
        assert system.first.wait(60) == EXIT_CONFIG
        assert "took over run test" in system.log(0)
