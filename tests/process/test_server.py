"""A real buffer server process: what comes in over real sockets, and what survives a kill."""

import os
import random
import signal
import sqlite3
import time
from dataclasses import replace

import msgpack
import pytest
import zmq

from tba.common import wire
from tba.common.client import BufferClient
from tba.common.codec import MAX_HEADER_BYTES, decode_reply, encode_request
from tba.common.errors import BufferUnavailable
from tba.common.trajectory import pack

REF = wire.WeightsRef(version=0, step=0, path="/v0", manifest_sha256="0" * 64)


@pytest.fixture
def server(start_tba, run_config):
    """A running server and its configuration file."""
    process = start_tba("buffer", "serve", "--config", run_config.file)
    with connect(run_config) as client:
        client.call(wire.GetStatus(), wire.Status, deadline_seconds=20)
    return process


class connect:  # noqa: N801  # used as a context manager
    def __init__(self, run_config, role: str = "monitor") -> None:
        self.client = BufferClient(run_config.address, role=role, name="test")

    def __enter__(self) -> BufferClient:
        return self.client

    def __exit__(self, *_: object) -> None:
        self.client.close()


class RawPeer:
    """A socket that sends whatever it is told."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    def ask(self, frames: list[bytes], timeout: float = 10.0):
        self.socket.send_multipart(frames)
        assert self.socket.poll(timeout * 1000), "no reply"
        return decode_reply([memoryview(f) for f in self.socket.recv_multipart()]).message


@pytest.fixture
def raw(server, run_config):
    peer = RawPeer(run_config.address)
    yield peer
    peer.socket.close()


def put_message(trajectory, count: int, first: int):
    columns, frames = pack([trajectory(tokens=[first + k]) for k in range(count)])
    return wire.PutTrajectories(first_sequence=first, rows=wire.Rows.model_validate(columns)), frames


def prepare(client: BufferClient) -> None:
    client.call(wire.Hello(host="h", pid=1, software="t"), wire.Welcome, deadline_seconds=10)
    keys = wire.RegisterPrompts(task="t", fingerprint="0" * 64, total=1, offset=0, keys=["p0"])
    client.call(keys, wire.Registered, deadline_seconds=10)
    client.call(wire.AnnounceSnapshot(weights=REF, bytes=1), wire.Done, deadline_seconds=10)


def status_of(run_config) -> wire.Status:
    with connect(run_config) as client:
        return client.call(wire.GetStatus(), wire.Status, deadline_seconds=10)[0]


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


BAD = {
    "garbage": ([os.urandom(200)], "malformed"),
    "empty header": ([b""], "malformed"),
    "truncated header": ([msgpack.packb({"v": 1, "type": "hello"})[:-3]], "malformed"),
    "wrong version": ([msgpack.packb({"v": 2, "id": 5})], "version"),
    "oversize header": ([bytes(MAX_HEADER_BYTES + 1)], "oversize"),
    "unknown type": (
        [msgpack.packb({"v": 1, "type": "x", "id": 1, "run": "", "body": {}, "role": "monitor", "sender": "s"})],
        "malformed",
    ),
    "deep version": ([msgpack.packb({"v": nested(1000)})], "malformed"),
    "too many frames": ([b"x"] * 20, "malformed"),
    "stray arrays": (
        [*encode_request(wire.GetStatus(), id=1, role="monitor", sender="s", run=""), b"stray"],
        "malformed",
    ),
    "other run": (encode_request(wire.GetStatus(), id=1, role="monitor", sender="s", run="f" * 32), "wrong_run"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_message_gets_an_error_reply_and_the_server_goes_on(raw, run_config, name):
    frames, code = BAD[name]
    reply = raw.ask(frames)
    assert isinstance(reply, wire.Failure)
    assert reply.code == code
    assert status_of(run_config).rejected == {code: 1}


def test_a_thousand_mutated_messages_leave_the_server_well(raw, run_config, trajectory):
    message, arrays = put_message(trajectory, 3, 0)
    good = encode_request(message, id=1, role="searcher", sender="s.1", run="", frames=arrays)
    rng = random.Random(0)
    with connect(run_config, "searcher") as client:
        prepare(client)
    for _ in range(1000):
        frames = [bytearray(frame) for frame in good]
        victim = rng.choice([frame for frame in frames if frame])
        for _ in range(rng.randint(1, 4)):
            victim[rng.randrange(len(victim))] = rng.randrange(256)
        if rng.random() < 0.3:
            del victim[rng.randrange(len(victim)) :]
        raw.ask([bytes(frame) for frame in frames])
    with connect(run_config) as client:
        client.post(*put_message(trajectory, 4, 1000))
        (reply,) = client.poll(10)
        assert reply.message == wire.PutAck(first_sequence=1000, stored=4, duplicates=0)
    with sqlite3.connect(run_config.database) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_acknowledged_trajectories_survive_sigkill_and_a_repeated_put_adds_nothing(
    server, start_tba, run_config, trajectory
):
    with connect(run_config, "searcher") as client:
        prepare(client)
        acknowledged = put_until(client, trajectory, seconds=1.0, kill=server)
        start_tba("buffer", "serve", "--config", run_config.file)
        repeated = wait_for_acks(client)
        assert repeated, "the put that the kill interrupted is sent again"
        sequences = stored_sequences(run_config)
    assert len(sequences) == len(set(sequences))
    assert set(acknowledged) | set(repeated) == set(sequences)


def put_until(client: BufferClient, trajectory, *, seconds: float, kill) -> list[int]:
    """Put without pause, kill the server in the middle; returns the sequences that were acknowledged."""
    acknowledged, sequence, started = [], 0, time.monotonic()
    while time.monotonic() - started < seconds:
        client.post(*put_message(trajectory, 4, sequence))
        sequence += 4
        acknowledged += acks(client.poll(0.001))
    client.post(*put_message(trajectory, 4, sequence))
    kill.kill()
    kill.wait()
    return acknowledged


def wait_for_acks(client: BufferClient) -> list[int]:
    repeated, deadline = [], time.monotonic() + 30
    while client._pending and time.monotonic() < deadline:
        repeated += acks(client.poll(0.1))
    return repeated


def acks(replies) -> list[int]:
    return [r.message.first_sequence + k for r in replies for k in range(4) if isinstance(r.message, wire.PutAck)]


def stored_sequences(run_config) -> list[int]:
    with sqlite3.connect(run_config.database) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [row[0] for row in database.execute("SELECT sequence FROM trajectory_rows")]


def test_a_client_without_a_server_gives_up_at_its_deadline(run_config):
    with connect(run_config) as client, pytest.raises(BufferUnavailable, match="is `tba buffer serve` running"):
        client.call(wire.GetStatus(), wire.Status, deadline_seconds=0.5)


def test_a_client_may_start_before_the_server(start_tba, run_config):
    with connect(run_config) as client:
        client.post(wire.GetStatus())
        start_tba("buffer", "serve", "--config", run_config.file)
        assert client.call(wire.GetStatus(), wire.Status, deadline_seconds=20)


def test_a_sender_that_returns_with_a_new_address_is_known_by_its_name(server, run_config, trajectory):
    with connect(run_config, "searcher") as first:
        prepare(first)
        first.post(*put_message(trajectory, 4, 0))
        assert first.poll(10)[0].message.stored == 4
        with connect(run_config, "searcher") as returned:  # another socket, so another address
            returned.sender = first.sender
            returned.post(*put_message(trajectory, 4, 0))
            (reply,) = returned.poll(10)
            assert reply.message == wire.PutAck(first_sequence=0, stored=0, duplicates=4)


def test_what_was_under_way_is_sent_again_as_soon_as_the_server_is_back(server, start_tba, run_config, trajectory):
    with connect(run_config, "searcher") as client:
        prepare(client)
        server.send_signal(signal.SIGSTOP)  # it receives and does not answer
        client.post(*put_message(trajectory, 4, 0))
        client.poll(0.2)
        server.kill()
        server.wait()
        start_tba("buffer", "serve", "--config", run_config.file)
        (reply,) = client.poll(20)
        assert reply.message.stored == 4


def test_a_long_poll_is_answered_when_the_data_arrives(server, run_config, trajectory):
    with connect(run_config, "searcher") as searcher, connect(run_config, "trainer") as trainer:
        prepare(searcher)
        asked = trainer.post(wire.SampleBatch(step=0, prompts=1, samples=2, reference="r", wait_seconds=20.0))
        assert trainer.poll(0.3) == []
        searcher.post(*put_message(trajectory, 2, 0))
        (reply,) = trainer.poll(10)
        assert reply.header.id == asked
        assert isinstance(reply.message, wire.Batch)


def test_sigterm_ends_the_server_with_exit_code_0(server):
    server.terminate()
    assert server.wait(60) == 0


def test_a_second_server_on_the_same_address_is_one_sentence_and_exit_code_1(server, run_config, tba):
    result = tba("buffer", "serve", "--config", run_config.file, "--set", "buffer.database=other.sqlite")
    assert result.returncode == 1, "systemd is to try again: the other one may be on its way out"
    assert "is in use: a buffer serves run test there" in result.stderr
    assert "Traceback" not in result.stderr
    everywhere = run_config.address.replace("127.0.0.1", "*")
    result = tba("buffer", "serve", "--config", run_config.file, "--set", f"buffer.address={everywhere}")
    assert (result.returncode, f"{everywhere} is in use: another program" in result.stderr) == (1, True)


@pytest.fixture
def ipc_config(make_config, tmp_path):
    """As `run_config`, at a socket file."""
    address = f"ipc://{tmp_path}/socket"
    return replace(make_config(buffer={"address": address}, train={"prompts_per_step": 1}), address=address)


def test_a_second_server_does_not_take_the_socket_file_of_the_first(start_tba, ipc_config, tba):
    start_tba("buffer", "serve", "--config", ipc_config.file)
    with connect(ipc_config) as client:
        client.call(wire.GetStatus(), wire.Status, deadline_seconds=20)
        result = tba("buffer", "serve", "--config", ipc_config.file, "--set", "buffer.database=other.sqlite")
        assert (result.returncode, f"buffer.address {ipc_config.address} is in use" in result.stderr) == (1, True)
    assert status_of(ipc_config).run_name == "test", "one that dials now still finds the first"


def test_the_socket_file_of_a_server_that_was_killed_is_taken_over(start_tba, ipc_config, tmp_path):
    for _ in range(2):
        server = start_tba("buffer", "serve", "--config", ipc_config.file)
        with connect(ipc_config) as client:
            client.call(wire.GetStatus(), wire.Status, deadline_seconds=20)
        server.kill()
        server.wait()
        assert (tmp_path / "socket").is_socket()


def test_stats_are_read_while_the_server_runs(server, run_config, trajectory, tba):
    with connect(run_config, "searcher") as client:
        prepare(client)
        client.post(*put_message(trajectory, 4, 0))
        assert client.poll(10)
    result = tba("buffer", "stats", "--config", run_config.file, "--json")
    assert '"trajectories": 4' in result.stdout
