"""A full or slow disk, for a real server and its producers, for snapshots and for metrics: nothing is lost."""

import json
import math
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import SafetensorError

from tba.common.errors import CheckpointError, TbaError
from tba.common.weights.snapshot import list_snapshots, read
from tba.common.wire import client as client_module
from tba.common.wire import messages
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.checks import not_none, wait_until
from tba.tests.helpers.faults import BYTES_PER_TOKEN, ROWS, assert_all_is_stored_once, producing, stored
from tba.tests.helpers.publisher import PublisherHarness
from tba.tests.helpers.puts import connected, prepare, status_of
from tba.tests.process.conftest import changed
from tba.trainer.metrics.metrics_log import MetricsLog
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.publishing.snapshot_writer import Publication, SnapshotWriter, is_full_disk

DISK_MIB = 24
BALLAST_MIB = 14

QUEUE_MIB = 8
SENDERS = 8
# A row of 64 KiB.
LARGE_TOKENS = 8192
LARGE_PUT_MIB = ROWS * LARGE_TOKENS * BYTES_PER_TOKEN / (1 << 20)
# The most memory that a server with a blocked writer may need: its queue; one read of the socket beyond it (64
# requests); per sender 16 requests received by ZeroMQ and one being received; the writer's group (1 MiB and a put);
# and allocator overhead.
MOST_MIB = QUEUE_MIB + (64 + SENDERS * (16 + 1)) * LARGE_PUT_MIB + (1 + LARGE_PUT_MIB) + 8
BLOCKED_SECONDS = 4.0
# Pending puts per sender.
FLOOD = 96


@pytest.fixture
def impatient_clients(monkeypatch):
    """Producers repeat unanswered requests after half a second, and then every second: tests need not wait."""
    monkeypatch.setattr(client_module, "_RESEND_SECONDS", 0.5)
    monkeypatch.setattr(client_module, "_LONGEST_TIMEOUT_SECONDS", 1.0)


@dataclass
class SmallDisk:
    """A small file system, mostly filled by a file that can be removed."""

    path: Path

    @property
    def database(self) -> Path:
        return self.path / "buffer.sqlite"

    @property
    def ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self) -> None:
        self.ballast.write_bytes(bytes(BALLAST_MIB << 20))

    def leave(self, free_bytes: int) -> None:
        """Take the remaining space but for this."""
        disk = os.statvfs(self.path)
        with self.ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - free_bytes)

    def relieve(self) -> None:
        self.ballast.unlink()


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError as error:
        pytest.skip(f"a small file system cannot be mounted: {error}")
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    yield SmallDisk(path)
    # Lazily: the fixture that ends the server, which has open files there, may run later.
    subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=20)


@pytest.fixture
def serve(start_tba, make_config):
    """Start servers with settings of `[buffer]`. Returns the configuration and the process."""

    def start(**buffer):
        config = make_config(train={"prompts_per_step": 1})
        settings = changed(*(f"buffer.{key}={value}" for key, value in buffer.items()))
        process = start_tba("buffer", "serve", "--config", config.file, *settings)
        status_of(config.address)
        return config, process

    return start


def test_a_full_disk_is_reported_loses_no_row_and_needs_no_restart(serve, small_disk, impatient_clients):
    config, process = serve(database=small_disk.database, min_free_mib=0)
    small_disk.fill()
    with producing(config.address, 3, tokens=8192) as producers:
        wait_until(lambda: all(producer.troubles for producer in producers), what="the disk is full")
        assert all("full" in trouble for producer in producers for trouble in producer.troubles)
        acknowledged = [set(producer.acknowledged) for producer in producers]
        answer_a_status_promptly(config, times=50)
        found = stored(small_disk.database)
        for producer, firsts in zip(producers, acknowledged, strict=True):
            assert firsts <= set(found.sequences(producer.number))
        for producer in producers:
            producer.stop_posting()
        small_disk.relieve()
        for producer in producers:
            producer.wait_until_all_is_answered(60)
    assert process.poll() is None
    assert_all_is_stored_once(small_disk.database, producers)


def test_a_server_stopped_while_the_disk_is_full_exits_cleanly_and_loses_no_row(
    serve, start_tba, small_disk, impatient_clients
):
    config, process = serve(database=small_disk.database, min_free_mib=0)
    small_disk.fill()
    with producing(config.address, 3, tokens=8192) as producers:
        wait_until(lambda: all(producer.troubles for producer in producers), what="the disk is full")
        process.terminate()
        assert process.wait(60) == 0
        # Rows posted after the disk is relieved would fill it again.
        for producer in producers:
            producer.stop_posting()
        small_disk.relieve()
        again = ["--set", f"buffer.database={small_disk.database}", "--set", "buffer.min_free_mib=0"]
        start_tba("buffer", "serve", "--config", config.file, *again)
        for producer in producers:
            producer.wait_until_all_is_answered(60)
    assert_all_is_stored_once(small_disk.database, producers)


def answer_a_status_promptly(config, times: int) -> None:
    """Assert that every status request is answered without being repeated."""
    with connected(config.address) as monitor:
        for _ in range(times):
            monitor.call(GetStatus(), Status, deadline_seconds=60, stop=lambda: bool(monitor.trouble))


def test_too_little_free_space_refuses_only_puts_and_names_a_remedy(serve, small_disk, impatient_clients):
    config, _ = serve(database=small_disk.database, min_free_mib=DISK_MIB - BALLAST_MIB)
    small_disk.fill()
    with connected(config.address, "searcher") as searcher, producing(config.address, 1, tokens=8) as (producer,):
        wait_until(lambda: producer.troubles, what="refused")
        prepare(searcher)
        lease = messages.LeasePrompts(want=1, held=[], weights_version=0, wait_seconds=0.0)
        assert len(searcher.call(lease, messages.Leases, deadline_seconds=120)[0].visits) == 1
        status = status_of(config.address)
        assert (status.trajectories, set(status.rejected)) == (0, {"storage"})
        stall = not_none(status.stall)
        assert (stall.reason, "% of its disk is free" in stall.sentence) == ("buffer_refuses", True)
        (trouble,) = producer.troubles
        assert "buffer.min_free_mib is 10: make room, or run `tba buffer prune --tokens`" in trouble
        small_disk.relieve()
        producer.wait_until_all_is_answered(60)
    assert_all_is_stored_once(small_disk.database, [producer])


def test_a_slow_disk_slows_producers_and_does_not_fill_memory(serve):
    assert SENDERS * FLOOD * LARGE_PUT_MIB > 2 * MOST_MIB
    config, process = serve(queue_mib=QUEUE_MIB)
    with producing(config.address, SENDERS, tokens=LARGE_TOKENS, window=1) as producers:
        wait_until(lambda: all(producer.acknowledged for producer in producers), what="all have started")
        with writing_is_blocked(config.database):
            before = resident_mib(process)
            for producer in producers:
                producer.window = FLOOD
            grown = most_resident_mib(process, lambda: min(one.posted for one in producers) > FLOOD) - before
        for producer in producers:
            producer.stop_posting()
        for producer in producers:
            producer.wait_until_all_is_answered(60)
    assert QUEUE_MIB < grown < MOST_MIB
    assert_all_is_stored_once(config.database, producers)


@contextmanager
def writing_is_blocked(database):
    """Lock the database against other writers."""
    with closing(sqlite3.connect(database, isolation_level=None, timeout=10)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def most_resident_mib(process, have_flooded: Callable[[], bool]) -> float:
    """Return the most memory that a server takes until it is flooded, and for a while after."""
    most, ends = 0.0, math.inf
    while time.monotonic() < ends:
        if ends == math.inf and have_flooded():
            ends = time.monotonic() + BLOCKED_SECONDS
        most = max(most, resident_mib(process))
        time.sleep(0.02)
    return most


def resident_mib(process) -> float:
    return psutil.Process(process.pid).memory_info().rss / (1 << 20)


@pytest.fixture
def make_lab(small_disk):
    """Makes models whose run writes to a small disk; `hidden` 128 is half a megabyte."""
    made = []

    def make(**settings: Any) -> PublisherHarness:
        made.append(PublisherHarness(small_disk.path, **{"hidden": 128, "min_free_mib": 12, "steps": 99} | settings))
        return made[-1]

    yield make
    for lab in made:
        lab.close()


LORA = {"rank": 1, "publish": "adapter"}
# The small disk is also the memory.
MEMORY: dict[str, Any] = {"snapshots_in": "memory", "keep_snapshot_every": 2}


def steps(lab) -> list[int]:
    return [read(path).manifest.step for path in list_snapshots(lab.config.snapshots)]


def test_snapshots_wait_for_disk_space_and_only_the_newest_is_published_afterwards(make_lab, small_disk):
    lab = make_lab()
    publisher = lab.publisher()
    publisher.publish(0)
    assert publisher.flush(60)
    small_disk.fill()
    for step in range(1, 6):
        publisher.publish(step)  # returns: training continues
    wait_until(lambda: publisher.reason.startswith("v5 waits for disk space"), what=publisher.reason)
    assert "train.min_free_mib = 12" in publisher.reason
    assert not publisher.flush(0.1)
    small_disk.relieve()
    assert publisher.flush(60)
    assert steps(lab) == [0, 5]
    assert publisher.reason == ""
    assert lab.announced().manifest.step == 5


def test_a_disk_that_fills_during_a_write_is_recognised_and_no_file_is_left(make_lab, small_disk):
    lab = make_lab()
    copies = HostBuffers(torch.device("cpu"))
    publication = Publication(0, 0, copies.copy(lab.weights().items()))
    config = lab.config.model_copy(update={"train": lab.config.train.model_copy(update={"min_free_mib": 0})})
    writer = SnapshotWriter(config, lab.model, copies, unwrapped=lab.model, model_files=lab.files)
    lab.config.snapshots.mkdir(parents=True, exist_ok=True)
    small_disk.leave(128 << 10)
    with pytest.raises((OSError, SafetensorError)) as caught:
        writer.write(publication)
    assert is_full_disk(caught.value)
    assert list(lab.config.snapshots.iterdir()) == []


def test_adapters_are_published_while_a_full_snapshot_waits_for_space(make_lab, small_disk):
    lab = make_lab(hidden=256, lora=LORA, keep_snapshot_every=5)
    publisher = lab.publisher()
    publisher.publish(0)
    assert publisher.flush(60)
    small_disk.leave(13 << 20)
    publisher.publish(1)
    assert publisher.flush(60)
    publisher.publish(5)
    wait_until(lambda: publisher.reason.startswith("v2 waits for disk space"), what="it is full")
    small_disk.relieve()
    assert publisher.flush(60)
    assert steps(lab) == [0, 1, 5]


@pytest.mark.parametrize("first", [0, 3])
def test_the_base_of_a_dropped_snapshot_is_published_with_the_next_one(make_lab, small_disk, first):
    lab = make_lab(lora=LORA)
    small_disk.fill()
    publisher = lab.publisher()
    publisher.publish(first)
    publisher.publish(first + 1)
    number = publisher._next_version - 1
    wait_until(lambda: publisher.reason.startswith(f"v{number} waits"), what=publisher.reason)
    small_disk.relieve()
    assert publisher.flush(60)
    publisher.publish(first + 2)
    assert publisher.flush(60)
    assert steps(lab) == [0, first + 1, first + 2]
    assert lab.announced().manifest.base == number - 1


def test_without_room_for_one_more_copy_training_continues_and_the_next_attempt_is_published(make_lab, small_disk):
    lab = make_lab(**MEMORY)
    publisher = lab.publisher()
    small_disk.fill()
    assert publisher.publish(0) is None
    assert publisher.missed
    assert "train.min_free_mib = 12" in publisher.reason
    assert publisher.flush(1)
    small_disk.relieve()
    assert publisher.publish(0) == 0
    assert publisher.flush(60)
    assert (publisher.missed, publisher.reason) == (False, "")
    assert lab.announced().manifest.step == 0


def test_a_kept_snapshot_waits_for_the_disk_while_newer_ones_are_published(make_lab, small_disk):
    lab = make_lab(**MEMORY)
    publisher = lab.publisher()
    publisher.publish(0)
    assert publisher.flush(60)
    small_disk.fill()
    for version, step in enumerate((2, 3), 1):
        publisher.publish(step)
        wait_until(lambda: lab.announced_ref().version == version, what="it is announced")  # noqa: B023
        wait_until(lambda: not publisher._busy, what="the file of the one before is free")
    wait_until(lambda: publisher.reason.startswith("v1 waits for disk space"), what=publisher.reason)
    assert not publisher.flush(0.1)
    small_disk.relieve()
    assert publisher.flush(60)
    assert steps(lab) == [0, 2]


# No divisor of a page, so that the disk is full in the middle of a line.
NUMBERS: Any = {"text": "x" * 301}


@pytest.fixture
def metrics(small_disk):
    log = MetricsLog(small_disk.path, first_step=0)
    yield log
    log.close()


def record_until_lines_wait(log, first: int, waiting: int) -> int:
    """Record steps. Returns the next one."""
    step = first
    while log.waiting < waiting:
        log.record(step, 0.0, NUMBERS)
        step += 1
        assert step < first + 1000
    return step


def recorded_steps(disk) -> list[int]:
    return [json.loads(line)["step"] for line in (disk.path / "metrics.jsonl").read_text().splitlines()]


def test_lines_wait_for_space_and_are_then_written_whole_and_in_order(metrics, small_disk, caplog):
    caplog.set_level("INFO")
    metrics.record(0, 0.0, NUMBERS)
    small_disk.leave(0)
    step = record_until_lines_wait(metrics, 1, 20)
    with pytest.raises(CheckpointError, match=r"20 lines of metrics are not on disk: .*No space left"):
        metrics.sync()
    small_disk.relieve()
    metrics.record(step, 0.0, NUMBERS)
    assert recorded_steps(small_disk) == list(range(step + 1))
    metrics.sync()
    assert caplog.messages == ["lines of metrics wait in memory", "lines of metrics that waited in memory are written"]
    assert caplog.records[1].fields["lines"] == 20


def test_lines_that_were_never_written_are_logged_at_the_end(small_disk, caplog):
    log = MetricsLog(small_disk.path, first_step=0)
    small_disk.leave(0)
    log.record(0, 0.0, NUMBERS)
    log.close()
    assert any("lines of metrics were never written" in message for message in caplog.messages)


def test_starting_on_a_full_disk_is_a_one_line_error(small_disk):
    (small_disk.path / "metrics.jsonl").write_text('{"step": 0}\n')
    small_disk.leave(0)
    with pytest.raises(TbaError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        MetricsLog(small_disk.path, first_step=1)
