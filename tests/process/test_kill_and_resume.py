"""A trainer that is stopped many times, about half of them with SIGKILL, leaves the history of one unbroken run."""

import json
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tba.common.config import Config
from tba.common.wire import messages
from tba.tests.helpers.puts import connected
from tba.tests.helpers.trainer import FakeSearcher, run_with_buffer
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

    def __init__(self, root: Path, **sections: dict[str, Any]) -> None:
        # With this rule the choice of prompts depends on which ones have been trained on.
        buffer = {"prompt_priority": "recency", "recency_fraction": 0.5}
        self.config, self.buffer = run_with_buffer(root, train={"steps": STEPS}, buffer=buffer, **sections)
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
        assert ready.wait(60)
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
        process.join(300)
        assert process.exitcode == 0

    def end_at(self, step: int, how: signal.Signals) -> None:
        """Start the trainer, and signal it when `step` steps are recorded."""
        process = self.start()
        while process.is_alive() and len(self.lines()) < step:
            process.join(0.005)
        os.kill(process.pid, how)
        process.join(60)
        assert process.exitcode == (0 if how == signal.SIGTERM else -signal.SIGKILL)

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.config.checkpoints / f"step_{STEPS:08d}" / "model.safetensors")

    def close(self) -> None:
        self.buffer.stop()


@pytest.fixture
def two_runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[KillableRun, KillableRun]]:
    runs = KillableRun(tmp_path / "a", **request.param), KillableRun(tmp_path / "b", **request.param)
    yield runs
    for run in runs:
        run.close()


MOVING = {"reference": {"kind": "ema", "every": 4, "decay": 0.5}}


@pytest.mark.parametrize("two_runs", [MOVING], indirect=True)
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
