"""metrics.jsonl and TensorBoard hold every step once, also after a resume."""

import json
import os
import threading

import pytest

from tba.common.config import Config
from tba.trainer.metrics.metrics_log import MetricsLog
from tba.trainer.metrics.sinks import open_sinks


def config(directory, **metrics) -> Config:
    return Config.model_validate({"run": {"dir": str(directory)}, "metrics": metrics})


def record(directory, first: int, last: int, value: float) -> None:
    log = MetricsLog(directory, first_step=first, sinks=open_sinks(config(directory), first))
    for step in range(first, last):
        log.record(step, 1000.0 + step, {"loss": value + step})
    log.sync()
    log.close()


def lines(directory) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_resume_drops_the_steps_it_repeats(tmp_path):
    record(tmp_path, 0, 5, 0.0)
    record(tmp_path, 3, 6, 100.0)
    assert [line["loss"] for line in lines(tmp_path)] == [0, 1, 2, 103, 104, 105]


def test_a_line_that_was_cut_off_by_a_crash_is_dropped(tmp_path):
    record(tmp_path, 0, 3, 0.0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-5])
    record(tmp_path, 3, 4, 0.0)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 3]


@pytest.mark.slow
def test_tensorboard_shows_the_repeated_steps_once(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of the same second are read in the order of this number as text: 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    record(tmp_path, 0, 5, 0.0)
    record(tmp_path, 3, 6, 100.0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(0, 0), (1, 1), (2, 2), (3, 103), (4, 104), (5, 105)]


def test_a_line_is_added_while_the_disk_is_waited_for(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path, first_step=0)
    log.record(0, 0.0, {})
    adding, to_disk = threading.Thread(target=log.record, args=[1, 0.0, {}]), os.fsync
    ended = []

    def slow(descriptor: int) -> None:
        adding.start()
        adding.join(timeout=60)
        ended.append(not adding.is_alive())
        to_disk(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    log.sync()
    adding.join()
    log.close()
    assert ended == [True]
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
