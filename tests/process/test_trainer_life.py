"""A second trainer is started while the first one is in a long step; real processes and sockets.

The long step reads from a FIFO, the gate. The gate can be opened for writing once the step has begun, and closing it
ends the step.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tba.common.errors import EXIT_CONFIG
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.trainer import TrainRun

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


class LongStep:
    """A run whose first trainer is in its second step until `end_step`."""

    def __init__(self, run: TrainRun, folder: Path) -> None:
        self.run, self._folder = run, folder
        os.mkfifo(folder / "gate")
        self.first = run.start(patch=LONG_STEP.format(gate=str(folder / "gate")))
        run.feed()
        wait_until(self._is_in_step)

    def _is_in_step(self) -> bool:
        """Whether the first trainer reads from the gate. If so, the gate stays open."""
        try:
            self._gate = os.open(self._folder / "gate", os.O_WRONLY | os.O_NONBLOCK)
        # No process reads from the gate.
        except OSError:
            assert self.first.poll() is None, self.log()
            return False
        return True

    def end_step(self) -> None:
        """Let the first trainer continue."""
        os.close(self._gate)

    def train_elsewhere(self, tba_here: Callable[..., Any]) -> Any:
        """Run a second trainer with another run.dir, in this process, to its end."""
        return tba_here("train", "--cpu", "--config", self.run.file, "--set", f"run.dir={self._folder / 'other'}")

    def log(self) -> str:
        return (self._folder / "tba0.log").read_text()

    def steps(self) -> list[int]:
        """Return the reported steps."""
        return [step for (step,) in self.run.query("SELECT step FROM batches WHERE trained_at IS NOT NULL")]


@pytest.fixture
def system(tmp_path: Path, make_config_in: Any, start_tba: Any) -> Iterator[LongStep]:
    run = TrainRun(tmp_path, make_config_in, start_tba, steps=STEPS)
    try:
        yield LongStep(run, tmp_path)
    finally:
        run.buffer.stop()


def test_a_trainer_in_a_long_step_is_not_replaced_by_a_second_one(system, tba_here):
    # It retries for 13 seconds, while the first one is in its step.
    second = system.train_elsewhere(tba_here)
    assert (second.exit_code, "is at work on run test" in second.message) == (EXIT_CONFIG, True)
    assert system.first.poll() is None
    assert system.steps() == [0]
    system.end_step()
    assert system.first.wait(60) == 0, system.log()
    assert system.steps() == list(range(STEPS))


def test_a_trainer_that_was_stopped_in_a_long_step_is_replaced(system, tba_here):
    system.first.send_signal(signal.SIGSTOP)
    second = system.train_elsewhere(tba_here)
    assert second.exit_code == 0, second.message
    assert system.steps() == list(range(STEPS))
    system.first.send_signal(signal.SIGCONT)
    system.end_step()
    assert system.first.wait(60) == EXIT_CONFIG
    assert "took over run test" in system.log()
