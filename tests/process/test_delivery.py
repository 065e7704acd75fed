"""Delivery to a real buffer server through a network that can be cut: exactly once, with bounded memory."""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tba.common.errors import StorageError
from tba.common.wire import client, messages
from tba.common.wire.client import BufferClient
from tba.searcher.delivery import delivery
from tba.searcher.delivery.delivery import Delivery
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.faults import row
from tba.tests.helpers.proxy import Proxy
from tba.tests.helpers.puts import prepare, status_of
from tba.tests.process.conftest import free_port

ROWS = 4


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    """A few puts are then enough to exceed the window."""
    monkeypatch.setattr(delivery, "_MAX_PUTS", 32)


@pytest.fixture
def network(start_tba, run_config):
    """A buffer server behind a proxy."""
    start_tba("buffer", "serve", "--config", run_config.file)
    proxy = Proxy(run_config.address)
    yield proxy
    proxy.close()


class Courier:
    """A delivery and its client, without anything that generates."""

    def __init__(self, address: str, root, *, limit_mib: float = 64.0) -> None:
        self.client = BufferClient(address, role="searcher", name="s0")
        prepare(self.client)
        self.delivery = Delivery(self.client, run_name="test", root=root, limit_mib=limit_mib)
        self.delivery.open()
        self.made = 0
        self.dead = False

    def put(self, groups: int, *, tokens: int = 8) -> None:
        for _ in range(groups):
            self.delivery.submit([row(0, self.made + k, tokens) for k in range(ROWS)], lease=0)
            self.made += ROWS

    def step(self) -> None:
        for reply in self.client.poll(0.01):
            if isinstance(reply.message, messages.PutAck):
                self.delivery.acknowledge(reply)
        self.delivery.step()

    def step_until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not in time: {self.delivery.metrics}, {self.delivery.pause}"
            self.step()

    def die(self) -> None:
        """End as a killed process does: without a Goodbye, and releasing the lock."""
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


def numbers_of(run_config) -> dict[str, list[int]]:
    """Return the stored sequence numbers of each sender, sorted.

    Puts sent on a new connection before the client has noticed it come before those that it then sends again.
    """
    found: dict[str, list[int]] = {}
    sql = "SELECT s.sender, t.sequence FROM trajectory_rows t JOIN senders s ON s.id = t.sender ORDER BY t.sequence"
    for sender, sequence in run_config.query(sql):
        found.setdefault(sender, []).append(sequence)
    return found


@pytest.mark.parametrize("how", ["silence", "cut"])
def test_puts_during_a_cut_wait_on_disk_and_are_stored_once(courier, network, run_config, how):
    one = courier()
    one.put(3)
    getattr(network, how)()
    one.put(500)
    one.step_until(lambda: one.delivery.away)
    assert len(one.client._pending) < 50, "memory holds only the window"
    network.heal()
    one.step_until(lambda: one.delivery.is_done)
    assert numbers_of(run_config) == {one.client.sender: list(range(503 * ROWS))}
    assert not one.delivery.away


def test_a_connection_whose_other_end_is_dead_behind_a_proxy_is_replaced(courier, network, run_config, monkeypatch):
    monkeypatch.setattr(client, "_SILENT_SECONDS", 2.0)
    one = courier()
    one.put(1)
    one.step_until(lambda: one.delivery.is_done)
    network.swallow()
    one.put(2)
    one.step_until(lambda: one.delivery.is_done)
    assert numbers_of(run_config) == {one.client.sender: list(range(3 * ROWS))}


def test_the_spool_of_another_database_is_left_alone_even_if_its_run_has_the_same_name(
    courier, network, run_config, start_tba, tmp_path
):
    first = courier()
    network.cut()
    first.put(2)
    first.die()
    other = f"tcp://127.0.0.1:{free_port()}"
    own = ("--set", f"buffer.address={other}", "--set", "buffer.database=other.sqlite")
    start_tba("buffer", "serve", "--config", run_config.file, *own)
    second = Courier(other, tmp_path / "spool")
    assert second.delivery.is_done
    second.die()
    assert list((tmp_path / "spool" / first.client.sender).glob("*.put"))
    network.heal()
    third = courier()
    third.step_until(lambda: third.delivery.is_done)
    assert numbers_of(run_config) == {first.client.sender: list(range(2 * ROWS))}


def test_a_refused_put_of_a_dead_searcher_is_quarantined_and_the_rest_is_delivered(
    courier, network, run_config, tmp_path, caplog
):
    first = courier()
    network.cut()
    first.put(1)
    first.delivery.submit([replace(row(0, 4 + k, 8), prompt_key="unknown") for k in range(ROWS)], lease=0)
    first.delivery.submit([row(0, 8 + k, 8) for k in range(ROWS)], lease=0)
    first.die()
    network.heal()
    second = courier()
    second.step_until(lambda: second.delivery.is_done)
    assert numbers_of(run_config) == {first.client.sender: [0, 1, 2, 3, 8, 9, 10, 11]}
    (kept,) = (tmp_path / "spool/aside").iterdir()
    assert kept.name.startswith(f"{first.client.sender}-")
    assert b"unknown" in kept.read_bytes()
    assert [record.fields.get("kept") for record in caplog.records if record.levelname == "ERROR"] == [kept]


def test_puts_of_a_dead_searcher_that_the_disk_does_not_delete_stay_and_count_as_duplicates_later(
    courier, network, run_config, monkeypatch, tmp_path, caplog
):
    first = courier()
    network.cut()
    first.put(3)
    first.die()
    network.heal()
    monkeypatch.setattr(os, "unlink", refuse)
    second = courier()
    second.step_until(lambda: second.delivery.is_done)
    assert numbers_of(run_config) == {first.client.sender: list(range(3 * ROWS))}
    assert left(caplog) == [("WARNING", None), ("ERROR", 3)]
    monkeypatch.undo()
    third = courier()
    third.step_until(lambda: third.delivery.is_done)
    assert status_of(third.client.address).duplicates == 3 * ROWS
    assert not (tmp_path / "spool" / first.client.sender).exists()


def left(caplog) -> list[tuple[str, int | None]]:
    """What is logged of puts that a dead searcher leaves for the next start: levels, and the number of puts."""
    found = [record for record in caplog.records if "next start" in record.message]
    return [(record.levelname, record.fields.get("puts")) for record in found]


def test_puts_that_the_disk_refuses_wait_in_memory_and_generation_pauses(courier, network, run_config, monkeypatch):
    one = courier()
    network.cut()
    monkeypatch.setattr(os, "writev", refuse)
    one.put(40)
    assert "No space left on device: waiting for the buffer" in one.delivery.pause
    monkeypatch.undo()
    network.heal()
    one.step_until(lambda: one.delivery.is_done)
    assert one.delivery.pause == ""
    assert numbers_of(run_config) == {one.client.sender: list(range(40 * ROWS))}


def test_a_damaged_or_missing_put_is_logged_and_quarantined_and_the_rest_arrives(
    courier, network, run_config, tmp_path, caplog
):
    one = courier()
    network.cut()
    one.put(100, tokens=100)
    torn, flipped, gone = spooled(one)[50:53]
    os.truncate(torn, torn.stat().st_size - 1)
    with flipped.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))
    gone.unlink()
    network.heal()
    one.step_until(lambda: one.delivery.is_done)
    lost = range(50 * ROWS, 53 * ROWS)
    (stored,) = numbers_of(run_config).values()
    assert stored == [n for n in range(one.made) if n not in lost]
    assert one.delivery.metrics["spool_damaged"] == 3
    kept = {path.name.rpartition("-")[2] for path in (tmp_path / "spool/aside").iterdir()}
    assert kept == {torn.name, flipped.name}
    logged = "".join(str(record.fields) for record in caplog.records)
    assert all(path.name in logged for path in (torn, flipped, gone))


def test_a_put_that_is_unreadable_ends_the_searcher_and_the_next_ones_deliver_everything(
    courier, network, run_config, tmp_path, caplog
):
    first = courier()
    network.cut()
    first.put(100, tokens=100)
    unread = spooled(first)[50:52]
    restore = [make_unreadable(path) for path in unread]
    network.heal()
    with pytest.raises(StorageError, match=f"{unread[0].name}: Input/output error"):
        first.step_until(lambda: first.delivery.is_done)
    first.die()
    second = courier()
    second.step_until(lambda: second.delivery.is_done)
    # Unreadable puts do not keep the others of a dead searcher back.
    assert left(caplog) == [("WARNING", None), ("ERROR", 2)]
    lost = range(50 * ROWS, 52 * ROWS)
    (stored,) = numbers_of(run_config).values()
    assert stored == [n for n in range(first.made) if n not in lost]
    for one in restore:
        one()
    third = courier()
    third.step_until(lambda: third.delivery.is_done)
    (stored,) = numbers_of(run_config).values()
    assert stored == list(range(first.made))
    assert not (tmp_path / "spool" / first.client.sender).exists()
    assert not (tmp_path / "spool/aside").exists()


def spooled(one: Courier) -> list[Path]:
    """The files of the puts that are not acknowledged, in order."""
    return sorted(not_none(one.delivery._spool).directory.glob("*.put"))


def make_unreadable(path: Path) -> Callable[[], object]:
    """Make each read of a file an I/O error, as reading this process's memory at address 0 is, until the result is
    called."""
    real = path.rename(path.with_suffix(".real"))
    path.symlink_to("/proc/self/mem")
    return lambda: real.rename(path)


def refuse(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
