"""The pool of weights files: no thread waits for a file, made or deleted by another one, that it does not need."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tba.common.weights.node_store import pin_path
from tba.common.weights.snapshot import Canary, Manifest
from tba.common.weights.tensor_file import layout_of
from tba.tests.helpers.checks import not_none
from tba.trainer.publishing import weights_files
from tba.trainer.publishing.weights_files import WeightsFile, WeightsFilePool


class Gate:
    """Holds the first call of a function until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not self.reached.is_set():
                self.reached.set()
                assert self.opened.wait(60)
            return real(*arguments, **named)

        return call


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WeightsFilePool]:
    layout = layout_of({"a": ("F32", (4, 8))})
    made = WeightsFilePool(tmp_path / "weights", layout, torch.device("cpu"), floor=0)
    yield made
    made.close()


@pytest.fixture
def other_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def seal(pool: WeightsFilePool, version: int) -> Path:
    """Fill and publish a file. Returns its directory."""
    file = not_none(pool.acquire())
    pool.seal(file, Manifest("r", version, version, 0.0, {}, Canary([], [])))
    return file.path


def finish(gate: Gate, *calls: Future[Any]) -> None:
    gate.opened.set()
    for call in calls:
        call.result(60)


def test_a_free_file_is_acquired_while_another_thread_makes_one(pool, other_thread, monkeypatch):
    held = not_none(pin_path(seal(pool, 0)))
    pool.announced()
    seal(pool, 1)
    gate = Gate()
    monkeypatch.setattr(weights_files, "_map", gate.before(weights_files._map))
    # The searcher's hold leaves no file free, so one is made.
    announced = other_thread.submit(pool.announced)
    assert gate.reached.wait(60)
    held.release()
    acquired = other_thread.submit(pool.acquire)
    try:
        assert acquired.result(20) is not None
        assert not announced.done()
    finally:
        finish(gate, announced, acquired)


def test_a_file_is_acquired_while_another_thread_deletes_one(pool, other_thread, monkeypatch):
    held = [not_none(pin_path(seal(pool, version))) for version in (0, 1)]
    pool.announced()
    seal(pool, 2)
    for one in held:
        one.release()
    gate = Gate()
    monkeypatch.setattr(WeightsFile, "delete", gate.before(WeightsFile.delete))
    announced = other_thread.submit(pool.announced)
    assert gate.reached.wait(60)
    acquired = other_thread.submit(pool.acquire)
    try:
        assert acquired.result(20) is not None
    finally:
        finish(gate, announced, acquired)


def test_without_a_free_file_the_one_that_another_thread_makes_is_waited_for(pool, other_thread, monkeypatch):
    seal(pool, 0)
    gate = Gate()
    monkeypatch.setattr(weights_files, "_map", gate.before(weights_files._map))
    announced = other_thread.submit(pool.announced)
    assert gate.reached.wait(60)
    acquired = other_thread.submit(pool.acquire)
    finish(gate, announced, acquired)
    made = [path for path in pool.directory.iterdir() if path.name.endswith(".part")]
    assert made == [not_none(acquired.result()).path]


def test_a_failure_to_make_a_file_is_not_waited_for(pool, other_thread, monkeypatch):
    gate = Gate()

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(weights_files, "_map", gate.before(fail))
    first = other_thread.submit(pool.acquire)
    assert gate.reached.wait(60)
    second = other_thread.submit(pool.acquire)
    gate.opened.set()
    for call in (first, second):
        with pytest.raises(OSError, match="Input/output"):
            call.result(60)
    assert not any(path.name.endswith(".part") for path in pool.directory.iterdir())
