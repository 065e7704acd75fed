"""Metrics on a full disk: training continues, no line is torn, and all are written when there is space."""

import json
import os
from typing import Any

import pytest

from tba.common.errors import CheckpointError, TbaError
from tba.tests.process.test_storage_faults import small_disk  # noqa: F401
from tba.trainer.metrics.metrics_log import MetricsLog

# No divisor of a page, so that the disk is full in the middle of a line.
NUMBERS: Any = {"text": "x" * 301}


@pytest.fixture
def metrics(small_disk):  # noqa: F811
    log = MetricsLog(small_disk.path, first_step=0)
    yield log
    log.close()


def fill(disk) -> None:
    """Fill the remaining space."""
    with disk.ballast.open("wb") as file:
        free = os.statvfs(disk.path).f_bavail * os.statvfs(disk.path).f_frsize
        os.posix_fallocate(file.fileno(), 0, free)


def record_until_lines_wait(log, first: int, waiting: int) -> int:
    """Record steps. Returns the next one."""
    step = first
    while log.waiting < waiting:
        log.record(step, 0.0, NUMBERS)
        step += 1
        assert step < first + 1000
    return step


def steps(disk) -> list[int]:
    return [json.loads(line)["step"] for line in (disk.path / "metrics.jsonl").read_text().splitlines()]


def test_lines_wait_for_space_and_are_then_written_whole_and_in_order(metrics, small_disk, caplog):  # noqa: F811
    caplog.set_level("INFO")
    metrics.record(0, 0.0, NUMBERS)
    fill(small_disk)
    step = record_until_lines_wait(metrics, 1, 20)
    with pytest.raises(CheckpointError, match=r"20 lines of metrics are not on disk: .*No space left"):
        metrics.sync()
    small_disk.relieve()
    metrics.record(step, 0.0, NUMBERS)
    assert steps(small_disk) == list(range(step + 1))
    metrics.sync()
    assert caplog.messages == ["lines of metrics wait in memory", "lines of metrics that waited in memory are written"]
    assert caplog.records[1].fields["lines"] == 20


def test_lines_that_were_never_written_are_logged_at_the_end(small_disk, caplog):  # noqa: F811
    log = MetricsLog(small_disk.path, first_step=0)
    fill(small_disk)
    log.record(0, 0.0, NUMBERS)
    log.close()
    assert any("lines of metrics were never written" in message for message in caplog.messages)


def test_starting_on_a_full_disk_is_a_one_line_error(small_disk):  # noqa: F811
    (small_disk.path / "metrics.jsonl").write_text('{"step": 0}\n')
    fill(small_disk)
    with pytest.raises(TbaError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        MetricsLog(small_disk.path, first_step=1)
