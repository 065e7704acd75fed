"""A full disk, a slow disk: what a real server makes of them, and what its producers hear."""

import sqlite3
import subprocess
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tba.common import client as client_module
from tba.common import wire

from .fault_lab import (
    BYTES_PER_TOKEN,
    ROWS,
    assert_all_is_stored_once,
    connected,
    prepare,
    producing,
    stored,
    wait_for,
)

DISK_MIB = 24
BALLAST_MIB = 14

QUEUE_MIB = 8
SENDERS = 8
LARGE_TOKENS = 8192  # a row of 64 KiB
LARGE_PUT_MIB = ROWS * LARGE_TOKENS * BYTES_PER_TOKEN / (1 << 20)
# What a server whose writer is held may take: its queue; one reading of the socket beyond it (64 requests); of each
# sender 16 requests that ZeroMQ has received and one that it is receiving; the group that the writer has taken (1 MiB
# and a put); and the allocator's waste.
MOST_MIB = QUEUE_MIB + (64 + SENDERS * (16 + 1)) * LARGE_PUT_MIB + (1 + LARGE_PUT_MIB) + 8
HELD_SECONDS = 4.0
FLOOD = 96  # puts that each sender has under way


@pytest.fixture
def impatient_clients(monkeypatch):
    """Producers ask again after half a second, and go on asking as often: a test need not wait for them."""
    monkeypatch.setattr(client_module, "_RESEND_SECONDS", 0.5)
    monkeypatch.setattr(client_module, "_LONGEST_PATIENCE_SECONDS", 1.0)


@dataclass
class SmallDisk:
    """A file system of its own, most of it taken by a file that can go."""

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
        made = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError as error:
        pytest.skip(f"a small file system cannot be mounted: {error}")
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted: {made.stderr.strip()}")
    yield SmallDisk(path)
    # Lazily: the server, which has files open there, is ended by a fixture that may come later.
    subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=20)


@pytest.fixture
def serve(start_tba, make_config):
    """Starts a server with these settings of `[buffer]`; returns the configuration and the process."""

    def start(**buffer):
        config = make_config(train={"prompts_per_step": 1})
        settings = [part for key, value in buffer.items() for part in ("--set", f"buffer.{key}={value}")]
        process = start_tba("buffer", "serve", "--config", config.file, *settings)
        with connected(config.address) as client:
            client.call(wire.GetStatus(), wire.Status, deadline_seconds=30)
        return config, process

    return start


def test_a_full_disk_is_named_loses_nothing_and_is_recovered_from_without_a_restart(
    serve, small_disk, impatient_clients
):
    config, process = serve(database=small_disk.database, min_free_mib=0)
    small_disk.fill()
    with producing(config.address, 3, tokens=8192) as producers:
        wait_for(lambda: all(producer.troubles for producer in producers), 30, "the disk is full")
        assert all("full" in trouble for producer in producers for trouble in producer.troubles)
        acknowledged = [set(producer.acknowledged) for producer in producers]
        answer_a_status_promptly(config, times=50)
        found = stored(small_disk.database)
        for producer, firsts in zip(producers, acknowledged, strict=True):
            assert firsts <= set(found.sequences(producer.number))
        for producer in producers:
            producer.post_no_more()
        small_disk.relieve()
        for producer in producers:
            producer.wait_until_all_is_answered(20)
    assert process.poll() is None
    assert_all_is_stored_once(small_disk.database, producers)


def test_a_server_that_is_stopped_while_the_disk_is_full_ends_in_order_and_has_lost_nothing_when_it_is_back(
    serve, start_tba, small_disk, impatient_clients
):
    config, process = serve(database=small_disk.database, min_free_mib=0)
    small_disk.fill()
    with producing(config.address, 3, tokens=8192) as producers:
        wait_for(lambda: all(producer.troubles for producer in producers), 30, "the disk is full")
        process.terminate()
        assert process.wait(30) == 0
        small_disk.relieve()
        again = ["--set", f"buffer.database={small_disk.database}", "--set", "buffer.min_free_mib=0"]
        start_tba("buffer", "serve", "--config", config.file, *again)
        for producer in producers:
            producer.wait_until_all_is_answered(30)
    assert_all_is_stored_once(small_disk.database, producers)


def answer_a_status_promptly(config, times: int) -> None:
    """Every request for the status is answered the first time."""
    with connected(config.address) as monitor:
        for _ in range(times):
            monitor.call(wire.GetStatus(), wire.Status, deadline_seconds=5, stop=lambda: bool(monitor.trouble))


def test_too_little_free_space_refuses_puts_with_a_way_out_and_nothing_else(serve, small_disk, impatient_clients):
    config, _ = serve(database=small_disk.database, min_free_mib=DISK_MIB - BALLAST_MIB)
    small_disk.fill()
    with connected(config.address, "searcher") as searcher, producing(config.address, 1, tokens=8) as (producer,):
        wait_for(lambda: producer.troubles, 20, "refused")
        prepare(searcher)
        lease = wire.LeasePrompts(want=1, held=[], weights_version=0, wait_seconds=0.0)
        assert len(searcher.call(lease, wire.Leases, deadline_seconds=5)[0].visits) == 1
        with connected(config.address) as monitor:
            status = monitor.call(wire.GetStatus(), wire.Status, deadline_seconds=5)[0]
        assert (status.trajectories, set(status.rejected)) == (0, {"storage"})
        (trouble,) = producer.troubles
        assert "buffer.min_free_mib is 10: make room, or run `tba buffer compact`" in trouble
        small_disk.relieve()
        producer.wait_until_all_is_answered(20)
    assert_all_is_stored_once(small_disk.database, [producer])


def test_a_slow_disk_slows_producers_and_does_not_fill_memory(serve):
    assert SENDERS * FLOOD * LARGE_PUT_MIB > 2 * MOST_MIB
    config, process = serve(queue_mib=QUEUE_MIB)
    with producing(config.address, SENDERS, tokens=LARGE_TOKENS, window=1) as producers:
        wait_for(lambda: all(producer.acknowledged for producer in producers), 30, "all are at work")
        with writing_is_held(config.database):
            before = resident_mib(process)
            for producer in producers:
                producer.window = FLOOD
            grown = most_resident_mib(process, seconds=HELD_SECONDS) - before
            assert min(producer.posted for producer in producers) > FLOOD
        for producer in producers:
            producer.post_no_more()
        for producer in producers:
            producer.wait_until_all_is_answered(30)
    assert QUEUE_MIB < grown < MOST_MIB
    assert_all_is_stored_once(config.database, producers)


@contextmanager
def writing_is_held(database):
    """Nobody else can write meanwhile."""
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
