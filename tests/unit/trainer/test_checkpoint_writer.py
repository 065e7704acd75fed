"""Asynchronous checkpoints: each holds the learner at the time of the call, and a full disk does not stop training."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tba.common.config import Config
from tba.common.errors import CheckpointError
from tba.common.run_files import CHECKPOINTS
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.trainer import make_learner, random_batch
from tba.trainer import checkpoint
from tba.trainer.checkpoint import CheckpointWriter
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.step.learner import Learner


def make_writer(directory: Path, sync: Any = lambda: None, **train: Any) -> CheckpointWriter:
    """Return a writer to DIRECTORY/checkpoints; `sync` makes the metrics durable."""
    config = Config.model_validate({"run": {"dir": str(directory), "name": "r"}, "train": train})
    metrics: Any = SimpleNamespace(sync=sync)
    return CheckpointWriter(config, HostBuffers(torch.device("cpu")), metrics)


def train(learner: Learner, steps: int = 1) -> None:
    for _ in range(steps):
        learner.step(random_batch(learner.steps_done))


def steps(directory: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoint.list_checkpoints(directory / CHECKPOINTS)]


class Gate:
    """Holds the checkpoint thread until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


def test_a_checkpoint_has_the_learner_at_the_time_of_the_call(tmp_path):
    gate, learner, straight = Gate(), make_learner(), make_learner()
    writer = make_writer(tmp_path, gate)
    train(learner, 2)
    writer.begin(learner)
    train(learner, 2)
    gate.opened.set()
    writer.wait()
    train(straight, 2)
    resumed = make_learner()
    checkpoint.restore(not_none(checkpoint.newest(tmp_path / CHECKPOINTS)), resumed)
    assert resumed.steps_done == 2
    assert [resumed.step(random_batch(n)).metrics for n in (2, 3)] == [
        straight.step(random_batch(n)).metrics for n in (2, 3)
    ]


def test_a_checkpoint_due_during_another_is_skipped_but_the_last_one_is_saved(tmp_path):
    gate, learner = Gate(), make_learner()
    writer = make_writer(tmp_path, gate)
    train(learner)
    writer.begin(learner)
    assert gate.reached.wait(60)
    train(learner)
    writer.begin(learner)
    train(learner)
    last = threading.Thread(target=writer.save, args=[learner])
    last.start()
    assert steps(tmp_path) == []
    gate.opened.set()
    last.join(60)
    assert steps(tmp_path) == [1, 3]


def test_a_failed_write_is_a_warning_except_for_the_last_checkpoint(tmp_path):
    """Writing fails because a file has the name of the checkpoint's directory."""
    learner = make_learner()
    writer = make_writer(tmp_path)
    train(learner)
    writer.save(learner)
    obstacle = tmp_path / CHECKPOINTS / ".step_00000002.tmp"
    obstacle.write_text("")
    train(learner)
    writer.begin(learner)
    with pytest.raises(CheckpointError, match=r"step_00000002 cannot be written"):
        writer.save(learner)
    assert steps(tmp_path) == [1]
    obstacle.unlink()
    writer.save(learner)
    assert steps(tmp_path) == [1, 2]


def test_unfinished_checkpoints_of_a_killed_trainer_are_none_and_are_deleted(tmp_path):
    unfinished = tmp_path / CHECKPOINTS / ".step_00000004.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert checkpoint.newest(tmp_path / CHECKPOINTS) is None
    make_writer(tmp_path)
    assert not unfinished.exists()


def test_metrics_are_durable_before_a_checkpoint_has_its_name(tmp_path):
    seen: list[list[int]] = []
    learner = make_learner()
    writer = make_writer(tmp_path, lambda: seen.append(steps(tmp_path)))
    train(learner)
    writer.save(learner)
    assert seen == [[]]
    assert steps(tmp_path) == [1]


def test_too_little_disk_space_is_a_warning_before_anything_is_written(tmp_path):
    writer = make_writer(tmp_path, min_free_mib=1 << 42)
    learner = make_learner()
    train(learner)
    writer.begin(learner)
    writer.close()
    assert list((tmp_path / CHECKPOINTS).iterdir()) == []
    with pytest.raises(CheckpointError, match=r"must leave train\.min_free_mib"):
        writer.save(learner)
