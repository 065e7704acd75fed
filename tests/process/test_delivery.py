"""Deliveries to a real buffer server through a network that can be cut: in order, once, with little memory."""

import errno
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tba.common import wire
from tba.common.client import BufferClient
from tba.common.clock import ManualClock
from tba.common.errors import StorageError
from tba.searcher import delivery as delivery_module
from tba.searcher.delivery import Delivery
from tba.searcher.spool_records import scan

from .conftest import free_port
from .fault_lab import prepare, row
from .proxy import Proxy

ROWS = 4


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    """So that little has to be put to be beyond it."""
    monkeypatch.setattr(delivery_module, "_WINDOW_PUTS", 32)


@pytest.fixture
def network(start_tba, run_config):
    """A buffer server behind a proxy."""
    start_tba("buffer", "serve", "--config", run_config.file)
    proxy = Proxy(run_config.address)
    yield proxy
    proxy.close()


class Courier:
    """A delivery with the client that it uses, and nothing that generates."""

    def __init__(self, address: str, root, *, limit_mib: float = 64.0) -> None:
        self.client = BufferClient(address, role="searcher", name="s0")
        prepare(self.client)
        self.clock = ManualClock()
        self.delivery = Delivery(self.client, run_name="test", root=root, limit_mib=limit_mib, clock=self.clock)
        self.delivery.open()
        self.made = 0
        self.dead = False

    def put(self, groups: int, *, tokens: int = 8) -> None:
        for _ in range(groups):
            self.delivery.put([row(0, self.made + k, tokens) for k in range(ROWS)], lease=0)
            self.made += ROWS

    def turn(self) -> None:
        for reply in self.client.poll(0.01):
            if isinstance(reply.message, wire.PutAck):
                self.delivery.take(reply)
        self.delivery.turn()

    def turn_until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not in time: {self.delivery.metrics}, {self.delivery.pause}"
            self.turn()

    def die(self) -> None:
        """End as a killed process does: nothing is said, the lock goes."""
        if not self.dead:
            self.client.close()
            self.delivery.close()
        self.dead = True


@pytest.fixture
def courier(network, tmp_path):
    made: list[Courier] = []

    def make(**settings) -> Courier:
        made.append(Courier(network.address, tmp_path / "spool", **settings))
        return made[-1]

    yield make
    for one in made:
        one.die()


def in_order(run_config) -> dict[str, list[int]]:
    """The sequence numbers of each sender in the order in which they were stored."""
    found: dict[str, list[int]] = {}
    with sqlite3.connect(run_config.database) as database:
        sql = "SELECT s.sender, t.sequence FROM trajectory_rows t JOIN senders s ON s.id = t.sender ORDER BY t.id"
        for sender, sequence in database.execute(sql):
            found.setdefault(sender, []).append(sequence)
    return found


def test_an_acknowledged_put_is_stored_and_leaves_nothing_on_the_disk(courier, run_config, tmp_path):
    one = courier()
    one.put(5)
    one.turn_until(lambda: one.delivery.is_done)
    one.die()
    assert in_order(run_config) == {one.client.sender: list(range(20))}
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.parametrize("how", ["silence", "cut"])
def test_what_is_put_during_a_cut_waits_on_disk_and_comes_in_order_and_once(courier, network, run_config, how):
    one = courier()
    one.put(3)
    getattr(network, how)()
    one.put(500)
    one.turn_until(lambda: one.delivery.away)
    assert len(one.client._pending) < 50, "memory holds the window only"
    network.heal()
    one.turn_until(lambda: one.delivery.is_done)
    assert in_order(run_config) == {one.client.sender: list(range(503 * ROWS))}
    assert not one.delivery.away


def test_a_full_spool_says_so_and_is_not_full_when_the_buffer_is_back(courier, network, run_config):
    one = courier(limit_mib=0.25)
    network.cut()
    while not one.delivery.pause:
        one.put(1, tokens=500)
    assert one.delivery.pause == f"the spool is full (0.25 MiB): waiting for the buffer at {network.address}"
    network.heal()
    one.turn_until(lambda: not one.delivery.pause)
    one.put(1)
    one.turn_until(lambda: one.delivery.is_done)
    assert in_order(run_config) == {one.client.sender: list(range(one.made))}


def test_the_spool_of_a_dead_searcher_is_delivered_in_its_name_by_the_next(courier, network, run_config, tmp_path):
    first = courier()
    first.put(3)
    first.turn_until(lambda: first.delivery.is_done)
    network.cut()
    first.put(200)
    first.die()
    network.heal()
    second = courier()
    second.turn_until(lambda: second.delivery.is_done)
    assert in_order(run_config) == {first.client.sender: list(range(203 * ROWS))}
    assert [path.name for path in (tmp_path / "spool").iterdir()] == [second.client.sender]


def test_what_was_delivered_before_the_death_is_a_duplicate_and_changes_nothing(courier, run_config):
    first = courier()
    first.put(3)  # the buffer gets it, and nobody takes the acknowledgement
    first.client._channel.receive(20)
    first.die()
    second = courier()
    second.turn_until(lambda: second.delivery.is_done)
    assert in_order(run_config) == {first.client.sender: list(range(3 * ROWS))}
    status, _ = second.client.call(wire.GetStatus(), wire.Status, deadline_seconds=10)
    assert status.duplicates > 0


def test_the_leases_of_a_dead_searcher_are_free_when_its_spool_is_delivered(courier, run_config):
    first = courier()
    lease = wire.LeasePrompts(want=1, held=[], weights_version=0, wait_seconds=0.0)
    (visit,) = first.client.call(lease, wire.Leases, deadline_seconds=10)[0].visits
    first.put(1)
    first.die()
    second = courier()
    second.turn_until(lambda: second.delivery.is_done)
    again, _ = second.client.call(lease, wire.Leases, deadline_seconds=10)
    assert again.visits == [visit]


def test_the_spool_of_another_database_is_left_alone_even_if_its_run_has_our_name(
    courier, network, run_config, start_tba, tmp_path
):
    first = courier()
    network.cut()
    first.put(2)
    first.die()
    other = f"tcp://127.0.0.1:{free_port()}"
    start_tba(
        "buffer", "serve", "--config", run_config.file, *sets(f"buffer.address={other}", "buffer.database=other.sqlite")
    )
    second = Courier(other, tmp_path / "spool")
    assert second.delivery.is_done
    second.die()
    assert list((tmp_path / "spool" / first.client.sender).glob("*.puts"))
    network.heal()
    third = courier()
    third.turn_until(lambda: third.delivery.is_done)
    assert in_order(run_config) == {first.client.sender: list(range(2 * ROWS))}


def sets(*assignments: str) -> list[str]:
    return [part for assignment in assignments for part in ("--set", assignment)]


def test_a_refused_put_of_a_dead_searcher_is_kept_aside_and_the_rest_is_delivered(
    courier, network, run_config, tmp_path
):
    first = courier()
    network.cut()
    first.put(1)
    first.delivery.put([replace(row(0, 4 + k, 8), prompt_key="unknown") for k in range(ROWS)], lease=0)
    first.delivery.put([row(0, 8 + k, 8) for k in range(ROWS)], lease=0)
    first.die()
    network.heal()
    second = courier()
    second.turn_until(lambda: second.delivery.is_done)
    assert in_order(run_config) == {first.client.sender: [0, 1, 2, 3, 8, 9, 10, 11]}
    assert [path.name for path in (tmp_path / "spool/aside").iterdir()] == [f"{first.client.sender}-00000000.puts"]


def test_what_the_disk_does_not_take_waits_in_memory_and_generation_with_it(courier, network, run_config, monkeypatch):
    one = courier()
    network.cut()
    monkeypatch.setattr(os, "pwritev", refuse)
    one.put(40)
    assert "No space left on device: waiting for the buffer" in one.delivery.pause
    monkeypatch.undo()
    network.heal()
    one.turn_until(lambda: one.delivery.is_done)
    assert one.delivery.pause == ""
    assert in_order(run_config) == {one.client.sender: list(range(40 * ROWS))}


def test_what_the_disk_does_not_delete_stays_there_and_delivery_goes_on(courier, run_config, monkeypatch, caplog):
    one = courier(limit_mib=0.05)  # segments of a few puts
    monkeypatch.setattr(os, "ftruncate", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in range(10):
        one.put(5, tokens=200)
        one.turn_until(lambda: one.delivery.is_done)
    assert one.delivery.undeleted > 0
    assert "acknowledged puts stay on the disk" in caplog.text
    assert one.delivery.pause == ""
    monkeypatch.undo()
    assert in_order(run_config) == {one.client.sender: list(range(one.made))}


def test_what_is_damaged_or_gone_is_told_and_kept_and_the_rest_comes_in_order(
    courier, network, run_config, tmp_path, caplog
):
    one = courier(limit_mib=1.0)  # segments of 128 KiB
    network.cut()
    one.put(300, tokens=100)
    torn, flipped, gone = segments(one)[2:5]
    lost = [len(list(scan(gone.read_bytes()))), 1, 1]
    os.truncate(torn, torn.stat().st_size - 1)
    with flipped.open("r+b") as file:
        file.seek(3000)
        file.write(bytes([file.read(1)[0] ^ 1]))
    gone.unlink()
    network.heal()
    one.turn_until(lambda: one.delivery.is_done)
    (stored,) = in_order(run_config).values()
    assert stored == sorted(stored)
    assert len(stored) == one.made - ROWS * sum(lost)
    assert one.delivery.metrics["spool_damaged"] == sum(lost)
    kept = {path.name.rpartition("-")[2] for path in (tmp_path / "spool/aside").iterdir()}
    assert kept == {torn.name, flipped.name}
    told = "".join(str(one.fields) for one in caplog.records)
    assert all(path.name in told for path in (torn, flipped, gone))


def test_what_a_disk_does_not_read_for_a_moment_waits_and_comes_in_order(courier, network, run_config, caplog):
    one = courier(limit_mib=1.0)
    network.cut()
    one.put(300, tokens=100)
    restore = make_unreadable(segments(one)[2])
    network.heal()
    one.turn_until(lambda: "a put is not read back" in caplog.text)
    one.turn_until(lambda: not one.delivery._posted)
    one.clock.advance(59)
    one.put(1)
    one.turn()
    assert one.delivery.groups > 100
    restore()
    one.turn_until(lambda: one.delivery.is_done)
    assert in_order(run_config) == {one.client.sender: list(range(one.made))}
    assert one.delivery.metrics["spool_damaged"] == 0
    assert caplog.text.count("a put is not read back") == 1


def test_a_disk_that_does_not_read_for_long_ends_the_searcher_and_the_next_ones_deliver_all(
    courier, network, run_config, tmp_path, caplog
):
    first = courier(limit_mib=1.0)
    network.cut()
    first.put(300, tokens=100)
    unread, last = segments(first)[2], segments(first)[-1]
    restore = make_unreadable(unread)
    network.heal()
    first.turn_until(lambda: "a put is not read back" in caplog.text)
    first.clock.advance(61)
    with pytest.raises(StorageError, match=f"{unread.name}: Input/output error"):
        first.turn()
    first.die()
    behind = len(list(scan(last.read_bytes()))) * ROWS
    second = courier()
    second.turn_until(lambda: second.delivery.is_done)
    (stored,) = in_order(run_config).values()
    assert len(stored) < first.made
    assert stored[-behind:] == list(range(first.made - behind, first.made)), "one segment held the others back"
    restore()
    third = courier()
    third.turn_until(lambda: third.delivery.is_done)
    (stored,) = in_order(run_config).values()
    assert sorted(stored) == list(range(first.made))
    assert not (tmp_path / "spool" / first.client.sender).exists()
    assert not (tmp_path / "spool/aside").exists()


def segments(one: Courier) -> list[Path]:
    return sorted(one.delivery._spool.directory.glob("*.puts"))


def make_unreadable(path: Path) -> Callable[[], object]:
    """From now on each read of a file is an I/O error, as of the memory at address 0, until what this returns."""
    real = path.rename(path.with_name("real"))
    path.symlink_to("/proc/self/mem")
    return lambda: real.rename(path)


def refuse(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
