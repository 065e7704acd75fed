"""Peers that send nonsense, vanish, or read for ever: the server stays well, small and at work for the others."""

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest
import zmq

from tba.buffer.store import Store
from tba.buffer.tables.trajectories import TRAJECTORY_COLUMNS
from tba.common import wire
from tba.common.codec import decode_reply

from .conftest import clean_environment
from .fault_lab import connected, wait_for
from .load import put_of
from .mutations import PROMPTS, VERSIONS, Mutator, reference

MESSAGES = 5000
# Three threads wake a fourth. Without a lock around the socket this ends in an abort of libzmq within a second.
WAKE = """
import sys, threading, time
from tba.common.channels import ServerChannel
sys.setswitchinterval(1e-4)
channel, deadline = ServerChannel("tcp://127.0.0.1:*"), time.monotonic() + 2
def wake():
    while time.monotonic() < deadline:
        channel.wake()
threads = [threading.Thread(target=wake) for _ in range(3)]
for thread in threads: thread.start()
while time.monotonic() < deadline:
    channel.receive(0.1, 64)
for thread in threads: thread.join()
channel.close()
"""
UNREADABLE = """
from tba.buffer import network
read = network.decode_request
def decode(frames):
    if bytes(frames[0]).count(b"poison"):
        raise MemoryError
    return read(frames)
network.decode_request = decode
"""


@pytest.fixture
def config(make_config):
    return make_config(train={"prompts_per_step": 1}, buffer={"lease_seconds": 2.0})


@pytest.fixture
def server(start_tba, config):
    return start_tba("buffer", "serve", "--config", config.file)


@pytest.fixture
def raw(config):
    """A socket that sends whatever it is told."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(config.address)
    yield socket
    socket.close()


def prepare(config) -> None:
    with connected(config.address, "searcher") as client:
        keys = wire.RegisterPrompts(task="t", fingerprint="0" * 64, total=len(PROMPTS), offset=0, keys=PROMPTS)
        client.call(keys, wire.Registered, deadline_seconds=20)
        for version in VERSIONS:
            announced = wire.AnnounceSnapshot(weights=reference(version, version), bytes=1)
            client.call(announced, wire.Done, deadline_seconds=20)


def status_of(config) -> wire.Status:
    with connected(config.address) as client:
        return client.call(wire.GetStatus(), wire.Status, deadline_seconds=20)[0]


def replies(raw, timeout_ms: int) -> list[wire.Message]:
    found = []
    while raw.poll(timeout_ms):
        found.append(decode_reply([memoryview(frame) for frame in raw.recv_multipart()]).message)
    return found


def lease_two(client) -> list[wire.Visit]:
    message = wire.LeasePrompts(want=2, held=[], weights_version=2, wait_seconds=0.0)
    return client.call(message, wire.Leases, deadline_seconds=10)[0].visits


def test_thousands_of_mutated_messages_over_a_socket_leave_the_server_well(server, config, raw):
    prepare(config)
    mutator, answered = Mutator(9), 0
    for _ in range(MESSAGES):
        raw.send_multipart(mutator.message())
        answered += len(replies(raw, 0))
    wait_for(lambda: status_of(config).queued_bytes == 0, 30, "the queue is empty")
    answered += len(replies(raw, 1000))
    assert answered > 0.95 * MESSAGES, "few may wait, and none is ignored"
    assert server.poll() is None
    with connected(config.address, "searcher") as client:
        visit = wire.Visit(lease=0, epoch=0, prompt_key="p0")
        client.post(*put_of(client.sender, 0, visit, 8))
        assert client.poll(10)[0].message.stored == 4
    with closing(sqlite3.connect(config.database)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_message_that_cannot_be_read_for_no_fault_of_its_own_ends_nothing(start_tba, config, raw):
    start_tba("buffer", "serve", "--config", config.file, patch=UNREADABLE)
    raw.send(b"poison")
    assert raw.poll(20_000)
    (reply,) = replies(raw, 100)
    assert reply.code == "internal"
    assert status_of(config).rejected == {"internal": 1}


def test_refused_messages_fill_no_memory_while_the_writer_waits(server, config, raw):
    prepare(config)
    with closing(sqlite3.connect(config.database, isolation_level=None)) as other, connected(config.address) as stuck:
        other.execute("BEGIN IMMEDIATE")
        stuck.post(wire.GetStatus())
        stuck.poll(0.5)
        process = psutil.Process(server.pid)
        before, garbage, deadline = process.memory_info().rss, os.urandom(100), time.monotonic() + 3
        while time.monotonic() < deadline:
            try:
                raw.send(garbage, zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.001)
        assert process.memory_info().rss - before < 16 << 20
        other.execute("ROLLBACK")
    assert {reply.code for reply in replies(raw, 2000)} == {"malformed"}


def test_the_leases_of_a_searcher_that_vanished_go_to_another(server, config):
    prepare(config)
    with connected(config.address, "searcher", "gone") as gone:
        visits = lease_two(gone)
    time.sleep(2.2)
    with connected(config.address, "searcher", "here") as here:
        assert lease_two(here) == visits


def test_signs_of_life_that_wait_behind_a_held_database_keep_their_leases(server, config):
    prepare(config)
    beat = wire.Heartbeat(activity="generating", reason="", weights_version=0, metrics={})
    with connected(config.address, "searcher") as client:
        lease_two(client)
        with closing(sqlite3.connect(config.database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for _ in range(8):
                client.post(beat)
                client.poll(0.5)
            other.execute("ROLLBACK")
        leases = {each.sender: each.leases for each in status_of(config).clients}
        assert leases[client.sender] == 2


def test_many_threads_may_wake_the_network():
    woken = subprocess.run([sys.executable, "-c", WAKE], env=clean_environment(), capture_output=True, timeout=60)
    assert woken.returncode == 0, woken.stderr.decode()


def test_a_reader_of_an_old_state_does_not_hold_the_writer_up(tmp_path):
    store = Store(tmp_path / "buffer.sqlite", durability="process")
    run = store.open_run("test", seed=0, config={}, software={})
    with closing(sqlite3.connect(store.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM payloads").fetchone()
        slowest = max(write_five_mib(store, run) for _ in range(12))
        held = log_bytes(store)
    assert held > 50 << 20, "the reader keeps the log"
    slowest = max([slowest, *(write_five_mib(store, run) for _ in range(12))])
    assert log_bytes(store) < held + (20 << 20), "it is written from its beginning again"
    assert slowest < 5
    store.close()


def write_five_mib(store: Store, run) -> float:
    started = time.monotonic()
    with store.transaction():
        for id_ in store.trajectories.new_ids(5):
            row = (id_, run.id, 1, 0, 1, id_, 0, 0.0, "{}", "eos", 0, 0, id_, "{}", 0.0, 0.0, 0.0, None, None, "{}")
            columns = {name: [value] for name, value in zip(TRAJECTORY_COLUMNS, (*row, 1 << 20), strict=True)}
            store.trajectories.add(columns, [[memoryview(blob)] for blob in (bytes(1 << 20), b"", b"", b"", b"")])
    if store.log.copy():
        store.log.finish()
    return time.monotonic() - started


def log_bytes(store: Store) -> int:
    return store.path.with_name(store.path.name + "-wal").stat().st_size
