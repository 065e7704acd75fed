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

from tba.common.wire import messages
from tba.common.wire.codec import MAX_HEADER_BYTES, decode_reply, encode_request
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.mutations import PROMPTS, VERSIONS
from tba.tests.helpers.puts import connected, prepare
from tba.tests.process.conftest import clean_environment

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


BAD = {
    "wrong version": ([msgpack.packb({"v": messages.PROTOCOL_VERSION + 1, "id": 5})], "version"),
    "oversize header": ([bytes(MAX_HEADER_BYTES + 1)], "oversize"),
    "too many frames": ([b"x"] * 20, "malformed"),
    "stray arrays": ([*encode_request(GetStatus(), id=1, role="monitor", sender="s", run=""), b"stray"], "malformed"),
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
