"""An acknowledgement means: committed, and on the disk. Seen on real servers whose disk is slow, broken or killed."""

import sqlite3
import time

import pytest

from tba.common import wire
from tba.common.client import BufferClient

from .load import ROWS, prepare, put_of

# While the switch is there, the disk does what the test says.
SLOW = """
import os, time
sync = os.fdatasync
def slow(file):
    while os.path.exists({switch!r}):
        time.sleep(0.01)
    sync(file)
os.fdatasync = slow
"""
BROKEN = """
import os, time
sync = os.fdatasync
def broken(file):
    if os.path.exists({switch!r}):
        time.sleep({seconds})
        raise OSError(5, "Input/output error")
    sync(file)
os.fdatasync = broken
"""


@pytest.fixture
def switch(tmp_path):
    """The file whose existence breaks the disk."""
    return tmp_path / "broken"


@pytest.fixture
def client(run_config):
    client = BufferClient(run_config.address, role="searcher", name="test")
    yield client
    client.close()


def start(start_tba, run_config, patch: str = ""):
    return start_tba("buffer", "serve", "--config", run_config.file, patch=patch)


def put(client: BufferClient, first: int = 0) -> None:
    visit = wire.Visit(lease=0, epoch=0, prompt_key="p0")
    client.post(*put_of(client.sender, first, visit, 8))


def rows(run_config) -> int:
    """What another program sees: all that is committed."""
    with sqlite3.connect(run_config.database) as database:
        return database.execute("SELECT COUNT(*) FROM trajectory_rows").fetchone()[0]


def wait_for_rows(run_config, count: int) -> None:
    deadline = time.monotonic() + 10
    while rows(run_config) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rows(run_config) == count


def test_nothing_is_acknowledged_before_it_is_on_the_disk(start_tba, run_config, client, switch):
    start(start_tba, run_config, SLOW.format(switch=str(switch)))
    prepare(client)
    switch.touch()
    put(client)
    wait_for_rows(run_config, ROWS)
    assert client.poll(0.5) == []
    switch.unlink()
    (reply,) = client.poll(10)
    assert reply.message == wire.PutAck(first_sequence=0, stored=ROWS, duplicates=0)


def test_a_put_that_was_committed_but_not_acknowledged_is_known_after_a_crash(start_tba, run_config, client, switch):
    server = start(start_tba, run_config, SLOW.format(switch=str(switch)))
    prepare(client)
    switch.touch()
    put(client)
    wait_for_rows(run_config, ROWS)
    server.kill()
    server.wait()
    switch.unlink()
    start(start_tba, run_config)
    (reply,) = client.poll(20)
    assert reply.message == wire.PutAck(first_sequence=0, stored=0, duplicates=ROWS)
    assert rows(run_config) == ROWS


def test_a_disk_that_cannot_sync_ends_the_server_and_nothing_was_acknowledged(
    start_tba, run_config, client, switch, tmp_path
):
    server = start(start_tba, run_config, BROKEN.format(switch=str(switch), seconds=0))
    prepare(client)
    switch.touch()
    put(client)
    assert server.wait(60) == 1
    assert client.poll(0.2) == []
    output = (tmp_path / "tba0.log").read_text()
    assert "Input/output error" in output
    assert "Traceback" not in output
    switch.unlink()
    start(start_tba, run_config)
    (reply,) = client.poll(20)
    assert isinstance(reply.message, wire.PutAck)
    assert rows(run_config) == ROWS


def test_a_hanging_disk_holds_the_writer_back_and_a_late_one_answers_all(start_tba, run_config, client, switch):
    """More transactions than may wait for the disk: the writer waits, and none of their replies is lost."""
    start(start_tba, run_config, SLOW.format(switch=str(switch)))
    prepare(client)
    switch.touch()
    for n in range(30):
        put(client, first=n * ROWS)
        client.poll(0.03)
    assert client.poll(0.1) == []
    assert rows(run_config) < 30 * ROWS
    switch.unlink()
    acknowledged: set[int] = set()
    deadline = time.monotonic() + 20
    while len(acknowledged) < 30 and time.monotonic() < deadline:
        acknowledged |= {reply.message.first_sequence for reply in client.poll(0.5)}
    assert acknowledged == {n * ROWS for n in range(30)}
    assert rows(run_config) == 30 * ROWS


def test_a_server_whose_disk_hangs_still_ends_when_the_sync_fails(start_tba, run_config, client, switch):
    """The writer, stuck behind the disk, must hear of the failure."""
    server = start(start_tba, run_config, BROKEN.format(switch=str(switch), seconds=1.5))
    prepare(client)
    switch.touch()
    for n in range(30):
        put(client, first=n * ROWS)
        client.poll(0.03)
    assert server.wait(60) == 1
