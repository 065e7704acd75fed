"""A trainer that is killed many times leaves the history of one unbroken run; one in a long step is not replaced."""

import json
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tba.common.config import Config
from tba.common.errors import EXIT_CONFIG
from tba.common.wire import messages
from tba.tests.helpers.checks import PATIENCE_SECONDS, wait_until
from tba.tests.helpers.puts import connected
from tba.tests.helpers.trainer import FakeSearcher, TrainRun, run_with_buffer
from tba.tests.runner import size
from tba.trainer.loop import train

STEPS = size(12, 40)
ENDS = size(4, 20)
PROMPTS = 6
SAMPLES = 5
# A repeated step finds the reference values stored that it computed the first time.
_NOT_THE_SAME = {"time", "reference_computed", "tokens_per_second"}

# Children are forked from a process that has already imported torch, so they start fast.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tba.trainer.loop", "tba.tests.helpers.trainer"])


def train_in_child(config: Config, ready: Any) -> None:
    """Do what `tba train --cpu --resume` does after its imports."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ready.set()
    train(config, resume=True, device="cpu", stop=stop.is_set)


class KillableRun:
    """A run whose database is filled before the first batch, so that all such runs have the same history."""

    def __init__(self, root: Path) -> None:
        # With this rule the choice of prompts depends on which ones have been trained on.
        buffer = {"prompt_priority": "recency", "recency_fraction": 0.5}
        moving = {"kind": "ema", "every": 4, "decay": 0.5}
        self.config, self.buffer = run_with_buffer(root, train={"steps": STEPS}, buffer=buffer, reference=moving)
        searcher = FakeSearcher(self.buffer.address, prompts=PROMPTS)
        weights = messages.WeightsRef(version=0, step=0, path="/the/first", manifest_sha256="0" * 64)
        with connected(self.buffer.address, "publisher") as publisher:
            publisher.call(messages.AnnounceSnapshot(weights=weights, bytes=1), messages.Done, deadline_seconds=120)
        searcher.put_groups(SAMPLES)
        searcher.close()

    def start(self) -> Any:
        ready = FORKS.Event()
        process = FORKS.Process(target=train_in_child, args=(self.config, ready))
        process.start()
        assert ready.wait(PATIENCE_SECONDS)
        return process

    def lines(self) -> list[dict[str, Any]]:
        """Return metrics.jsonl without times, and without a line that is still being written."""
        path = self.config.run.dir / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [
            {k: v for k, v in json.loads(line).items() if k not in _NOT_THE_SAME and not k.startswith("seconds_")}
            for line in whole
        ]

    def train_to_the_end(self) -> None:
        process = self.start()
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0

    def end_at(self, step: int, how: signal.Signals) -> None:
        """Start the trainer, and signal it when `step` steps are recorded."""
        process = self.start()
        while process.is_alive() and len(self.lines()) < step:
            process.join(0.005)
        os.kill(process.pid, how)
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == (0 if how == signal.SIGTERM else -signal.SIGKILL)

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.config.checkpoints / f"step_{STEPS:08d}" / "model.safetensors")


@pytest.fixture
def two_runs(tmp_path: Path) -> Iterator[tuple[KillableRun, KillableRun]]:
    runs = KillableRun(tmp_path / "a"), KillableRun(tmp_path / "b")
    yield runs
    for run in runs:
        run.buffer.stop()


def test_a_run_stopped_at_random_steps_equals_the_uninterrupted_run_bit_for_bit(two_runs):
    straight, ended = two_runs
    straight.train_to_the_end()
    chance = random.Random(5)
    for step in sorted(chance.choices(range(1, STEPS), k=ENDS)):
        ended.end_at(step, chance.choice([signal.SIGKILL, signal.SIGTERM]))
    ended.train_to_the_end()
    assert [line["step"] for line in ended.lines()] == list(range(STEPS))
    assert ended.lines() == straight.lines()
    left, right = ended.weights(), straight.weights()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


# The long step reads from a FIFO, the gate. The gate can be opened for writing once the step has begun, and closing it
# ends the step.
FEW_STEPS = 3
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
    run = TrainRun(tmp_path, make_config_in, start_tba, steps=FEW_STEPS)
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
    assert system.first.wait(PATIENCE_SECONDS) == 0, system.log()
    assert system.steps() == list(range(FEW_STEPS))


def test_a_trainer_that_was_stopped_in_a_long_step_is_replaced(system, tba_here):
    system.first.send_signal(signal.SIGSTOP)
    second = system.train_elsewhere(tba_here)
    assert second.exit_code == 0, second.message
    assert system.steps() == list(range(FEW_STEPS))
    system.first.send_signal(signal.SIGCONT)
    system.end_step()
    assert system.first.wait(PATIENCE_SECONDS) == EXIT_CONFIG
    assert "took over run test" in system.log()
