"""Binding an address, by one server at a time; connections; and which requests a client sends again."""

import contextlib
import fcntl
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from tba.common.errors import AddressInUse, BufferUnavailable, ConfigError, Refused
from tba.common.wire import channels, messages
from tba.common.wire import client as client_module
from tba.common.wire.channels import ClientChannel, Peer, ServerChannel
from tba.common.wire.client import BufferClient
from tba.common.wire.codec import decode_request, encode_reply
from tba.common.wire.socket_files import is_local, is_private, make_socket_directory, socket_of
from tba.tests.helpers.checks import not_none, wait_until
from tba.tests.helpers.clock import ManualClock


def test_a_server_at_the_name_of_its_machine_listens_where_other_nodes_connect():
    # /etc/hosts of Debian gives that name an address of loopback.
    with closing(ServerChannel(f"tcp://{socket.gethostname()}:0")) as server:
        assert server.address.startswith("tcp://0.0.0.0:")
    with closing(ServerChannel("tcp://localhost:0")) as server:
        assert server.address.startswith("tcp://127.0.0.1:")
    for address in ("ipc://*", "ipc://@tba-test-channels", "ipc://@tba-test/channels", "tcp://127.0.0.1:*"):
        ServerChannel(address).close()


def test_one_of_several_servers_that_start_together_gets_the_socket_file(tmp_path):
    count, outcomes = 8, list[str]()
    all_ready, all_tried = threading.Barrier(count), threading.Barrier(count)

    def bind() -> None:
        all_ready.wait()
        with contextlib.ExitStack() as channels_of_it:
            try:
                channels_of_it.enter_context(closing(ServerChannel(f"ipc://{tmp_path}/socket")))
                outcomes.append("bound")
            except AddressInUse:
                outcomes.append("in use")
            all_tried.wait()

    threads = [threading.Thread(target=bind) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["bound", *["in use"] * (count - 1)]


def test_a_server_with_a_full_backlog_keeps_its_socket_file(tmp_path):
    with socket.socket(socket.AF_UNIX) as stuck, socket.socket(socket.AF_UNIX) as waiting:
        stuck.bind(f"{tmp_path}/socket")
        stuck.listen(0)
        waiting.connect(f"{tmp_path}/socket")
        with pytest.raises(AddressInUse, match=re.escape(f"buffer.address ipc://{tmp_path}/socket is in use")):
            ServerChannel(f"ipc://{tmp_path}/socket")
        assert Path(tmp_path, "socket").is_socket()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("buffer.sqlite", "the file is not a socket"),
        ("nowhere/socket", "cannot be bound"),
        ("x" * 200, "cannot be bound"),
    ],
)
def test_a_socket_file_that_cannot_be_created_is_a_configuration_error_and_no_other_file_is_replaced(
    tmp_path, path, words
):
    (tmp_path / "buffer.sqlite").write_text("rows")
    with pytest.raises(ConfigError, match=words):
        ServerChannel(f"ipc://{tmp_path}/{path}")
    assert (tmp_path / "buffer.sqlite").read_text() == "rows"


def test_a_connection_that_opens_does_not_end_the_wait_for_a_message(tmp_path):
    address = f"ipc://{tmp_path}/socket"
    with closing(ServerChannel(address)) as server, zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(address)
        # The server's monitor has announced it to `receive`.
        assert server._connections.events.poll(60_000)

        def send_when_the_connection_is_noted() -> None:
            wait_until(lambda: server._connections._open)
            client.send(b"request")

        sender = threading.Thread(target=send_when_the_connection_is_noted)
        sender.start()
        ((_, frames),) = server.receive(60, 1)
        sender.join()
        assert bytes(frames[0]) == b"request"


def test_a_server_that_is_woken_stops_waiting_with_nothing(tmp_path):
    with closing(ServerChannel(f"ipc://{tmp_path}/socket")) as server:
        server.wake()
        assert server.receive(60, 1) == []
        server.wake()
        assert server.receive(60, 0) == []


# A process of its own: what fails here is an assertion of ZeroMQ, which ends it, when a ping is read or due after the
# peer has left. The waits are longer than those between two pings of earlier versions.
LEAVES_UNREAD = """
import time
from tba.common.wire import channels

server = channels.ServerChannel("tcp://127.0.0.1:*")
client = channels.ClientChannel(server.address)


def wait(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        server.receive(0.05, 0)


def send(requests):
    while requests:
        requests -= client.send([b"request"])
        server.receive(0, 0)


# ZeroMQ reads the first requests at once, and queues fewer of them for the server. It reads the others, with what
# follows them, when most of the first are taken, and queues a few of them again.
send(100)
wait(0.5)
send(60)
wait(2.5)
received = []
while len(received) < 105:
    received += server.receive(1, 1)
client.close()
for _ in range(2):
    # The connection is reset.
    server.send(received[0][0], [b"reply"])
    wait(2.5)
while more := server.receive(0.5, 16):
    received += more
server.close()
print(len(received))
"""


@pytest.mark.slow
def test_a_peer_that_leaves_with_unread_requests_does_not_end_the_server():
    done = subprocess.run([sys.executable, "-c", LEAVES_UNREAD], capture_output=True, text=True, timeout=120)
    assert done.stdout == "160\n", done.stderr


def test_a_directory_locked_by_another_program_is_an_address_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.common.wire.socket_files._LOCK_SECONDS", 0.05)
    directory = os.open(tmp_path, os.O_RDONLY)
    # As any program that may read the directory can.
    fcntl.flock(directory, fcntl.LOCK_SH)
    sentence = rf"{re.escape(str(tmp_path))}/socket cannot be bound: another program keeps a lock"
    with pytest.raises(AddressInUse, match=sentence):
        ServerChannel(f"ipc://{tmp_path}/socket")
    os.close(directory)
    assert list(tmp_path.iterdir()) == []


def test_the_socket_of_a_run_is_in_its_directory_or_in_memory_if_the_path_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.common.wire.socket_files._MEMORY", tmp_path)
    monkeypatch.setattr("os.getuid", lambda: 7)
    assert socket_of(Path("/runs/demo")) == Path("/runs/demo/buffer.socket")
    short = socket_of(Path("/runs", "x" * 100))
    assert short.parent == tmp_path / "tba-7"
    assert short != socket_of(Path("/runs", "y" * 100))


@pytest.mark.parametrize("make", [make_socket_directory, lambda address: ClientChannel(address).close()])
def test_a_socket_directory_in_memory_is_taken_before_another_user_can_and_refused_if_one_has(
    tmp_path, monkeypatch, make
):
    monkeypatch.setattr("tba.common.wire.socket_files._MEMORY", tmp_path)
    address, directory = f"ipc://{tmp_path}/tba-7/x.socket", tmp_path / "tba-7"
    make(address)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="other users have access"):
        make(address)
    directory.chmod(0o700)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="other users have access"):
        make(address)


def test_a_peer_of_the_oldest_protocol_does_not_end_the_server():
    with closing(ServerChannel("tcp://127.0.0.1:*")) as server:
        host, port = server.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            # ZMTP 1.0 (https://rfc.zeromq.org/spec/13): an empty identity, then one frame.
            connection.sendall(b"\x01\x00" + b"\x02\x00x")
            ((peer, frames),) = server.receive(60, 64)
            assert (peer.address, peer.key, bytes(frames[0])) == ("", "", b"x")


def send_without_end(address: str) -> None:
    """Send frames of one multipart, as a ZMTP peer (https://rfc.zeromq.org/spec/23), until the connection is closed."""
    host, port = address.removeprefix("tcp://").split(":")
    ready = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    frame = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
    with socket.create_connection((host, int(port))) as connection, contextlib.suppress(OSError):
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
        for _ in range(1000):
            connection.sendall(frame)


@pytest.mark.parametrize("limit", ["_UNFINISHED_BYTES", "_ALL_UNFINISHED_BYTES"])
def test_a_connection_whose_message_has_no_end_is_closed_and_others_are_not(monkeypatch, caplog, limit):
    monkeypatch.setattr(f"tba.common.wire.channels.{limit}", 16 << 20)
    with closing(ServerChannel("tcp://127.0.0.1:*")) as server, closing(ClientChannel(server.address)) as client:
        attackers = [threading.Thread(target=send_without_end, args=(server.address,), daemon=True) for _ in range(2)]
        for attacker in attackers:
            attacker.start()
        # More than the limit in all, but in whole messages.
        sent, received = 0, 0
        deadline = time.monotonic() + 60
        while received < 20 or any(attacker.is_alive() for attacker in attackers):
            assert time.monotonic() < deadline
            if sent == received < 20 and client.connections:
                sent += client.send([bytes(4 << 20)])
            received += len(server.receive(0.05, 64))
    lines = [record for record in caplog.records if record.getMessage() == "connection closed"]
    assert lines
    assert "a message has no end" in lines[0].fields["reason"]


def test_after_a_check_of_the_connections_that_had_to_wait_for_other_threads_the_next_one_comes_later(monkeypatch):
    with closing(ServerChannel("tcp://127.0.0.1:*")) as server, closing(ClientChannel(server.address)):
        while not server._connections._open:
            server.receive(0.05, 1)
        # A check that waits takes no CPU time.
        monkeypatch.setattr(channels, "_bytes_received", lambda _: time.sleep(0.02) or 0)
        server._connections._next_check_at = 0.0
        began = time.monotonic()
        server._connections.end_unfinished(all_read=True)
        assert server._connections._next_check_at - began >= 40 * 0.02


def test_a_file_with_the_number_of_a_closed_connection_keeps_its_locks(tmp_path):
    with contextlib.ExitStack() as closed_at_the_end:
        server = closed_at_the_end.enter_context(closing(ServerChannel("tcp://127.0.0.1:*")))
        client = ClientChannel(server.address)
        deadline = time.monotonic() + 60
        while not server._connections._open:
            assert time.monotonic() < deadline
            server.receive(0.05, 1)
        (number,) = server._connections._open
        client.close()
        while Path(f"/proc/self/fd/{number}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # ZeroMQ has closed the connection, and its event is not read yet.
        path = tmp_path / "buffer.sqlite"
        opened = closed_at_the_end.enter_context(path.open("w"))
        assert opened.fileno() <= number
        if opened.fileno() < number:
            os.dup2(opened.fileno(), number)
            closed_at_the_end.callback(os.close, number)
        fcntl.lockf(opened, fcntl.LOCK_EX)
        before = len(os.listdir("/proc/self/fd"))
        server._connections.end_unfinished(all_read=True)
        assert len(os.listdir("/proc/self/fd")) == before
        blocked = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = subprocess.run([sys.executable, "-c", blocked, path], capture_output=True, text=True, check=False)
        assert "BlockingIOError" in other.stderr


def test_a_large_reply_has_left_when_its_peer_reads_and_not_before(tmp_path):
    address = f"ipc://{tmp_path}/socket"
    with closing(ServerChannel(address)) as server, zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.RCVHWM, 1)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(address)
        client.send(b"request")
        ((peer, _),) = server.receive(60, 1)
        # More than the buffers of the two sockets hold. Each is smaller than what pyzmq sends without a copy.
        sent = [not_none(server.send_large(peer, [b"header", bytes(16 << 10)])) for _ in range(300)]
        time.sleep(0.2)
        assert not sent[-1]()
        for _ in sent:
            client.recv_multipart()
        wait_until(lambda: all(has_left() for has_left in sent))


REACHED = {
    "ipc:///tmp/buffer": (True, True),
    "ipc://@abstract": (True, False),
    "tcp://127.0.0.1:5757": (True, True),
    "tcp://127.0.1.1:*": (True, True),
    "tcp://localhost:5757": (True, True),
    "tcp://[::1]:5757": (True, True),
    "tcp://localhost.example.org:5757": (False, False),
    "tcp://[::]:5757": (False, False),
    "tcp://0.0.0.0:5757": (False, False),
    "tcp://*:5757": (False, False),
    "tcp://node1:5757": (False, False),
}


def test_an_abstract_socket_is_local_and_not_private():
    assert {address: (is_local(address), is_private(address)) for address in REACHED} == REACHED


STATE = messages.RunState(weights=None, step=0, finished=False)


class Server:
    """A server that answers on command."""

    def __init__(self) -> None:
        self.channel = ServerChannel("tcp://127.0.0.1:*")
        self.peer = Peer(b"")

    def receive(self) -> list[int]:
        """Return the ids of the requests that have arrived."""
        found = []
        for peer, frames in self.channel.receive(0.1, 64):
            self.peer = peer
            found.append(decode_request(frames).header.id)
        return found

    def answer(self, id_: int) -> None:
        assert self.channel.send(self.peer, encode_reply(messages.Done(), id=id_, run="r", state=STATE))


@contextmanager
def dialled(**options: Any) -> Iterator[tuple[Server, BufferClient]]:
    """A server, and a client of it."""
    server = Server()
    client = BufferClient(server.channel.address, role="trainer", name="t", **options)
    with closing(server.channel), closing(client):
        yield server, client


@pytest.mark.slow
def test_a_reply_to_an_earlier_request_delays_the_resending_of_later_ones():
    clock = ManualClock()
    with dialled(clock=clock) as (server, client):

        def received(count: int) -> list[int]:
            """Return the ids that the server receives: `count` of them, and whatever follows within 0.2 s."""
            found: list[int] = []
            wait_until(lambda: client.poll(0.05) or found.extend(server.receive()) or len(found) >= count, 10)
            client.poll(0.1)
            return found + server.receive()

        ids = [client.post(messages.Goodbye()) for _ in range(4)]
        assert received(4) == ids
        clock.advance(2)
        server.answer(ids[0])
        assert received(0) == []
        # Four seconds after they were sent, two after an earlier request was answered.
        clock.advance(2)
        server.answer(ids[3])
        assert received(0) == []
        # A reply to a later request does not restart the timeout of earlier ones.
        clock.advance(2)
        assert received(2) == ids[1:3]


def test_a_reply_that_cannot_be_read_raises_instead_of_being_asked_for_again():
    with dialled() as (server, client):
        id_ = client.ask_ahead(messages.Goodbye())
        wait_until(lambda: client.poll(0.05) or server.receive() == [id_], 60)
        frames = encode_reply(messages.Done(), id=id_, run="r", state=STATE, frames=[b"stray"])
        assert server.channel.send(server.peer, frames)
        with pytest.raises(Refused, match="cannot be read: done carries no arrays"):
            client.collect(id_, messages.Done, stop=lambda: False)


def test_a_buffer_of_another_run_is_waited_for_ten_minutes_and_then_it_is_meant():
    clock = ManualClock()
    with dialled(clock=clock, run="r") as (_, client):
        id_, failure = client.post(messages.Goodbye()), messages.Failure(code="wrong_run", message="another run")
        frames = [memoryview(part) for part in encode_reply(failure, id=id_, run="other", state=STATE)]
        assert client._accept(frames) is None
        clock.advance(599)
        assert client._accept(frames) is None
        clock.advance(2)
        assert not_none(client._accept(frames)).message == failure
    assert Refused("wrong_run", "").exit_code == 1


def test_a_repeated_reply_does_not_end_the_wait_for_another(monkeypatch):
    with dialled() as (server, client):
        first, second = client.post(messages.Goodbye()), client.post(messages.Goodbye())
        arrived: list[int] = []
        wait_until(lambda: client.poll(0.05) or arrived.extend(server.receive()) or arrived == [first, second])
        server.answer(first)
        assert [reply.header.id for reply in client.poll(60)] == [first]
        accept = client._accept

        def drop_and_go_on(frames):
            reply = accept(frames)
            if reply is None:
                threading.Timer(0.1, server.answer, [second]).start()
            return reply

        monkeypatch.setattr(client, "_accept", drop_and_go_on)
        server.answer(first)
        assert [reply.header.id for reply in client.poll(60)] == [second]


@pytest.mark.slow
def test_a_buffer_that_was_never_there_is_named_within_seconds_with_the_remedy(monkeypatch):
    # Port 1 needs privileges, so nothing listens there.
    client = BufferClient("tcp://127.0.0.1:1", role="trainer", name="trainer")
    reasons: list[str] = []
    monkeypatch.setattr(client_module.log, "warning", lambda _, **fields: reasons.append(fields["reason"]))
    with pytest.raises(BufferUnavailable):
        client.call(messages.Goodbye(), messages.Done, stop=lambda: bool(reasons))
    client.close()
    assert reasons == ["tcp://127.0.0.1:1 does not answer: is `tba buffer serve` running?"]
