"""A full or slow disk: how a real server handles it, and which errors its producers receive."""

import sqlite3
import subprocess
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tba.common.wire import client as client_module
from tba.common.wire import messages
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.checks import not_none, wait_until
from tba.tests.helpers.faults import BYTES_PER_TOKEN, ROWS, assert_all_is_stored_once, producing, stored
from tba.tests.helpers.puts import connected, prepare

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
        settings = [part for key, value in buffer.items() for part in ("--set", f"buffer.{key}={value}")]
        process = start_tba("buffer", "serve", "--config", config.file, *settings)
        with connected(config.address) as client:
            client.call(GetStatus(), Status, deadline_seconds=120)
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
        with connected(config.address) as monitor:
            status = monitor.call(GetStatus(), Status, deadline_seconds=120)[0]
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
            grown = most_resident_mib(process, seconds=BLOCKED_SECONDS) - before
            assert min(producer.posted for producer in producers) > FLOOD
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


def most_resident_mib(process, *, seconds: float) -> float:
    most, deadline = 0.0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        most = max(most, resident_mib(process))
        time.sleep(0.02)
    return most


def resident_mib(process) -> float:
    return psutil.Process(process.pid).memory_info().rss / (1 << 20)
