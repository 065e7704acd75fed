"""A full disk, a slow disk: what a real server makes of them, and what its producers hear."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tba.common import client as client_module
from tba.common import wire

from .fault_lab import (
    assert_all_is_stored_once,
    connected,
    prepare,
    producing,
    stored,
    wait_for,
)

DISK_MIB = 24
BALLAST_MIB = 14


@pytest.fixture(autouse=True)
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


def test_a_full_disk_is_named_loses_nothing_and_is_recovered_from_without_a_restart(serve, small_disk):
    config, process = serve(database=small_disk.database, min_free_mib=0)
    small_disk.fill()
    with producing(config.address, 3, tokens=8192) as producers:
        wait_for(lambda: all(producer.troubles for producer in producers), 30, "the disk is full")
        assert all("full" in trouble for producer in producers for trouble in producer.troubles)
        acknowledged = [set(producer.acknowledged) for producer in producers]
        answer_a_status_promptly(config, times=20)
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


def answer_a_status_promptly(config, times: int) -> None:
    """Every request for the status is answered the first time."""
    with connected(config.address) as monitor:
        for _ in range(times):
            monitor.call(wire.GetStatus(), wire.Status, deadline_seconds=5)
            assert monitor._last_id
            assert monitor.trouble == ""


def test_too_little_free_space_refuses_puts_with_a_way_out_and_nothing_else(serve, small_disk):
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
