"""Peers that send garbage, vanish, or keep reading: the server stays up, bounded in memory and responsive."""

import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from typing import Any

import msgpack
import psutil
import pytest
import zmq

from tba.buffer.store.store import Store
from tba.buffer.store.tables.trajectories import TRAJECTORY_COLUMNS
from tba.common.wire import messages
from tba.common.wire.codec import MAX_HEADER_BYTES, decode_reply, encode_request
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.mutations import PROMPTS, VERSIONS, Mutator
from tba.tests.helpers.producers import put_of
from tba.tests.helpers.puts import connected, prepare
from tba.tests.process.conftest import clean_environment
from tba.tests.runner import size

MESSAGES = size(2000, 5000)
# Three threads wake a fourth. Without a lock around the socket libzmq aborts within a second.
WAKE = """
import sys, threading, time
from tba.common.wire.channels import ServerChannel
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
from tba.buffer.server import network
read = network.decode_request
def decode(frames):
    if bytes(frames[0]).count(b"poison"):
        raise MemoryError
    return read(frames)
network.decode_request = decode
"""


BAD = {
    "wrong version": ([msgpack.packb({"v": messages.PROTOCOL_VERSION + 1, "id": 5})], "version"),
    "oversize header": ([bytes(MAX_HEADER_BYTES + 1)], "oversize"),
    "too many frames": ([b"x"] * 20, "malformed"),
    "stray arrays": (
        [*encode_request(GetStatus(), id=1, role="monitor", sender="s", run=""), b"stray"],
        "malformed",
    ),
    "other run": (encode_request(GetStatus(), id=1, role="monitor", sender="s", run="f" * 32), "wrong_run"),
}


@pytest.fixture
def config(make_config):
    return make_config(train={"prompts_per_step": 1}, buffer={"lease_seconds": 2.0})


@pytest.fixture
def server(start_tba, config):
    return start_tba("buffer", "serve", "--config", config.file)


def prepare_all(config) -> None:
    """Register the prompts and announce the versions of the mutated messages."""
    with connected(config.address, "searcher") as client:
        prepare(client, len(PROMPTS), len(VERSIONS))


def status_of(config) -> Status:
    with connected(config.address) as client:
        return client.call(GetStatus(), Status, deadline_seconds=120)[0]


def replies(raw, timeout_ms: int) -> list[Any]:
    found = []
    while raw.poll(timeout_ms):
        found.append(decode_reply([memoryview(frame) for frame in raw.recv_multipart()]).message)
    return found


def lease_two(client) -> list[messages.Visit]:
    message = messages.LeasePrompts(want=2, held=[], weights_version=2, wait_seconds=0.0)
    return client.call(message, messages.Leases, deadline_seconds=120)[0].visits


def test_a_bad_message_gets_an_error_reply_and_the_server_continues(server, config, raw):
    for name, (frames, code) in BAD.items():
        raw.send_multipart(frames)
        assert raw.poll(60_000)
        assert [reply.code for reply in replies(raw, 100)] == [code], name
    assert status_of(config).rejected == Counter(code for _, code in BAD.values())


def test_thousands_of_mutated_messages_over_a_socket_do_not_harm_the_server(server, config, raw):
    prepare_all(config)
    mutator, answered, parked = Mutator(9), 0, 0
    for sent in range(1, MESSAGES + 1):
        raw.send_multipart(mutator.message())
        answered += len(replies(raw, 0))
        # A peer with more unread replies than a client has requests under way loses some.
        if sent - answered - parked > 64:
            answered += len(replies(raw, 200))
            parked = sent - answered
    wait_until(lambda: status_of(config).queued_bytes == 0, what="the queue is empty")
    answered += len(replies(raw, 1000))
    assert answered > 0.95 * MESSAGES, "a few may be parked, and none is ignored"
    assert server.poll() is None
    with connected(config.address, "searcher") as client:
        visit = messages.Visit(lease=0, epoch=0, prompt_key="p0")
        client.post(*put_of(client.sender, 0, visit, 8))
        assert client.poll(60)[0].message.stored == 4  # type: ignore[attr-defined]
    with closing(sqlite3.connect(config.database)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_message_that_fails_for_lack_of_memory_does_not_end_the_server(start_tba, config, raw):
    start_tba("buffer", "serve", "--config", config.file, patch=UNREADABLE)
    raw.send(b"poison")
    assert raw.poll(60_000)
    (reply,) = replies(raw, 100)
    assert reply.code == "internal"
    assert status_of(config).rejected == {"internal": 1}


def test_refused_messages_do_not_fill_memory_while_the_writer_waits(server, config, raw):
    prepare_all(config)
    with closing(sqlite3.connect(config.database, isolation_level=None)) as other, connected(config.address) as stuck:
        other.execute("BEGIN IMMEDIATE")
        stuck.post(GetStatus())
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


def test_heartbeats_that_wait_for_a_locked_database_keep_their_leases(server, config):
    prepare_all(config)
    beat = messages.Heartbeat(activity="generating", reason="", weights_version=0, metrics={})
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


def test_a_reader_of_an_old_state_does_not_block_the_writer(tmp_path):
    store = Store(tmp_path / "buffer.sqlite", durability="process")
    run = store.open_run("test", seed=0, config={}, software={})
    with closing(sqlite3.connect(store.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM payloads").fetchone()
        slowest = max(write_five_mib(store, run) for _ in range(12))
        held = log_bytes(store)
    assert held > 50 << 20, "the reader prevents a reset of the WAL"
    slowest = max([slowest, *(write_five_mib(store, run) for _ in range(12))])
    assert log_bytes(store) < held + (20 << 20), "the WAL is reset"
    # Even on a busy machine: a writer that is blocked waits for the reader, which lives on.
    assert slowest < 60
    store.close()


def write_five_mib(store: Store, run) -> float:
    started = time.monotonic()
    with store.transaction():
        for id_ in store.trajectories.new_ids(5):
            row: dict[str, Any] = dict.fromkeys(TRAJECTORY_COLUMNS, 0)
            row |= {"id": id_, "run": run.id, "sequence": id_, "dedup_hash": id_, "payload_bytes": 1 << 20}
            row |= dict.fromkeys(("reward_parts", "stop_reason", "sampling", "text", "error", "metadata"), "{}")
            columns = {name: [value] for name, value in row.items()}
            store.trajectories.add(columns, [[memoryview(blob)] for blob in (bytes(1 << 20), b"", b"", b"", b"")])
    return time.monotonic() - started


def log_bytes(store: Store) -> int:
    return store.path.with_name(store.path.name + "-wal").stat().st_size
