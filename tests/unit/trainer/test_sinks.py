"""Sinks with the real packages, and sinks that fail."""

import importlib.util
import json
import sqlite3
import struct
import time
import urllib.request
from contextlib import closing

import pytest

from tba.common.config import Config
from tba.common.errors import MissingExtra
from tba.tests.helpers.clock import ManualClock
from tba.trainer.metrics.sinks import stalled
from tba.trainer.metrics.sinks.background import BackgroundSink
from tba.trainer.metrics.sinks.stalled import StallGauge
from tba.trainer.metrics.sinks.trackers import PrometheusSink, TrackioSink, WandbSink, open_sinks


class Failing:
    """A sink whose network is unreachable."""

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None:
        raise ConnectionError("no route to host")

    def close(self) -> None:
        pass


def test_a_sink_that_fails_is_logged_once_and_counted(caplog):
    sink = BackgroundSink("remote", Failing)
    for step in range(3):
        sink.record(step, 0.0, {"loss": 1.0})
    sink.close()
    assert sink.lost == 3
    assert sum("a metrics sink failed" in message for message in caplog.messages) == 1


def test_a_sink_that_cannot_be_opened_loses_its_records_and_does_not_block_the_trainer():
    def refuse():
        raise OSError("address in use")

    sink = BackgroundSink("port", refuse)
    sink.record(0, 0.0, {})
    sink.close()
    assert sink.lost >= 2


def test_prometheus_scrapes_the_last_step():
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink("127.0.0.1:0", "my run", "tcp://127.0.0.1:1")
    try:
        for step in range(2):
            sink.record(step, 1000.0, {"loss": step + 0.5, "reward_part_a-b": 1.0})
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=60) as reply:
            text = reply.read().decode()
    finally:
        sink.close()
    assert 'tba_trainer_loss{run="my run"} 1.5' in text
    assert 'tba_trainer_step{run="my run"} 1.0' in text
    assert 'tba_trainer_reward_part_a_b{run="my run"} 1.0' in text
    assert 'tba_stalled{reason="searcher_silent",run="my run"} 0.0' in text


def test_the_gauge_of_a_stall_is_1_for_its_reason(monkeypatch):
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(stalled, "_DEADLINE_SECONDS", 0.1)
    clock = ManualClock()
    gauge = StallGauge("tcp://127.0.0.1:1", "r", clock)

    def reasons() -> list[str]:
        (family,) = gauge.collect()
        return [sample.labels["reason"] for sample in family.samples if sample.value == 1]

    assert reasons() == []
    clock.advance(30)
    assert reasons() == ["buffer_silent"]


def wandb_steps(directory) -> list[int]:
    """The steps in the files of all offline runs, in their order.

    Such a file is a LevelDB log: 7 bytes, then blocks of 32 KiB of records with headers (checksum, length, type).
    """
    from wandb.proto import wandb_internal_pb2

    steps = []
    for file in sorted(directory.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        data, position, message = file.read_bytes(), 7, b""
        while position + 7 <= len(data):
            if 32768 - position % 32768 < 7:
                position += 32768 - position % 32768
                continue
            _, length, kind = struct.unpack_from("<IHB", data, position)
            message += data[position + 7 : position + 7 + length]
            position += 7 + length
            # A whole record, or the last piece of one.
            if kind in (1, 4):
                record = wandb_internal_pb2.Record.FromString(message)
                message = b""
                if record.WhichOneof("record_type") == "history":
                    steps.append(record.history.step.num)
    return steps


def wait_for_another_second() -> None:
    """W&B names its folders by the second; a trainer takes longer than that to start again."""
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.01)


@pytest.mark.slow
def test_weights_and_biases_offline_has_one_run_over_two_starts_and_no_step_twice(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for first, last in ((0, 3), (2, 5)):
        sink = WandbSink(tmp_path, "project", "run", {"train": {"beta": 0.1}})
        for step in range(first, last):
            sink.record(step, 1000.0 + step, {"loss": float(step)})
        sink.close()
        wait_for_another_second()
    names = {file.name for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}
    state = json.loads((tmp_path / "wandb.json").read_text())
    assert names == {f"run-{state['id']}.wandb"}
    assert wandb_steps(tmp_path) == [0, 1, 2, 3, 4]


def test_trackio_has_one_run_over_two_starts_and_no_step_twice(tmp_path, monkeypatch):
    # Before the import, which reads it.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    for first, last in ((0, 3), (2, 5)):
        sink = TrackioSink(tmp_path, "project", "run", {"train": {"beta": 0.1}})
        for step in range(first, last):
            sink.record(step, 1000.0 + step, {"loss": float(step)})
        sink.close()
    (database,) = (tmp_path / "trackio").glob("*.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    state = json.loads((tmp_path / "trackio.json").read_text())
    assert {name for name, _, _ in rows} == {f"run-{state['id']}"}
    assert [step for _, step, _ in rows] == [0, 1, 2, 3, 4]
    assert json.loads(rows[3][2]) == {"loss": 3.0, "wall_time": 1003.0}


def test_a_missing_package_of_a_sink_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = Config.model_validate(
        {"run": {"dir": str(tmp_path)}, "metrics": {"tensorboard": False, "wandb": "project"}}
    )
    with pytest.raises(MissingExtra, match="wandb is not installed: install tba with the extra wandb"):
        open_sinks(config, 0)
