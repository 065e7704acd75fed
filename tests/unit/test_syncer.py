"""Nothing is acknowledged before it is synced, and what fails on the way ends the server; it does not hang it."""

import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
import pytest

from tba.buffer.server import BufferServer
from tba.buffer.service import BufferService
from tba.buffer.store import Store
from tba.buffer.syncer import Syncer
from tba.buffer.tables.trajectories import Trajectories
from tba.common import wire
from tba.common.channels import ServerChannel
from tba.common.client import BufferClient
from tba.common.clock import SystemClock
from tba.common.codec import encode_request
from tba.common.config import Config
from tba.common.errors import StorageError, SyncFailed
from tba.common.trajectory import pack

REF = wire.WeightsRef(version=0, step=0, path="/v0", manifest_sha256="0" * 64)


class SlowStore(Store):
    """A store whose disk can be held, or broken, and which can be full for trajectories."""

    def __init__(self, path) -> None:
        super().__init__(path, durability="power")
        self.released = threading.Event()
        self.released.set()
        self.syncing = threading.Event()
        self.broken: BaseException | None = None
        self.full = False
        self._sync, self.log.sync = self.log.sync, self._slow_sync
        self._flush, self.trajectories.flush = self.trajectories.flush, self._perhaps_flush

    def _slow_sync(self) -> None:
        self.syncing.set()
        assert self.released.wait(20)
        if self.broken is not None:
            raise self.broken
        self._sync()

    def _perhaps_flush(self) -> None:
        if self.full and self.trajectories._new_rows["id"]:
            raise StorageError("the disk is full")
        self._flush()


class Serving:
    """The real server on a slow store, in a thread, and a searcher that has said hello."""

    def __init__(self, path) -> None:
        config = Config.model_validate({"train": {"prompts_per_step": 1}})
        self.path, self.clock = path, SystemClock()
        self.store = SlowStore(path)
        run = self.store.open_run("test", seed=0, config={}, software={})
        self.channel = ServerChannel("tcp://127.0.0.1:*")
        service = BufferService(self.store, run, config, self.clock)
        self.server = BufferServer(self.channel, self.store, service, self.clock, queue_bytes=1 << 20)
        self.stopped, self.raised = threading.Event(), None
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.client = BufferClient(self.channel.address, role="searcher", name="s")
        keys = wire.RegisterPrompts(task="t", fingerprint="0" * 64, total=1, offset=0, keys=["p0"])
        self.client.call(keys, wire.Registered, deadline_seconds=10)
        self.client.call(wire.AnnounceSnapshot(weights=REF, bytes=1), wire.Done, deadline_seconds=10)

    def _serve(self) -> None:
        try:
            self.server.run(self.stopped.is_set)
        except BaseException as error:  # noqa: BLE001  # looked at by the test
            self.raised = error

    def put(self, rows, first: int = 0) -> int:
        columns, frames = pack(rows)
        return self.client.post(
            wire.PutTrajectories(first_sequence=first, rows=wire.Rows.model_validate(columns)), frames
        )

    def rows_that_others_see(self) -> int:
        with closing(sqlite3.connect(self.path)) as reader:
            return reader.execute("SELECT COUNT(*) FROM trajectory_rows").fetchone()[0]

    def ended(self, seconds: float = 10) -> bool:
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def close(self) -> None:
        self.store.released.set()
        self.stopped.set()
        assert self.ended()
        self.client.close()
        self.channel.close()
        self.store.close()


@pytest.fixture
def serving(tmp_path):
    served = Serving(tmp_path / "buffer.sqlite")
    yield served
    served.close()


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_others_can_read_is_acknowledged_only_when_it_is_synced(serving, trajectory):
    serving.store.released.clear()
    put = serving.put([trajectory()])
    wait_for(lambda: serving.rows_that_others_see() == 1)
    assert serving.client.poll(0.3) == []
    serving.store.released.set()
    (reply,) = serving.client.poll(10)
    assert (reply.header.id, reply.message.stored) == (put, 1)


def hold_the_finish(serving) -> threading.Event:
    """Wait until the log is being finished, for the only time; that ends when the event is set."""
    begun, done, finish = threading.Event(), threading.Event(), serving.store.log.finish
    serving.store.log.copy = lambda **_: not begun.is_set()

    def slow_finish() -> None:
        begun.set()
        assert done.wait(20)
        finish()

    serving.store.log.finish = slow_finish
    assert begun.wait(10)
    return done


def test_puts_wait_while_the_log_is_finished_and_others_are_answered(serving, trajectory):
    done = hold_the_finish(serving)
    serving.put([trajectory()])
    trainer = BufferClient(serving.channel.address, role="trainer", name="t")
    for _ in range(3):
        assert trainer.call(wire.GetStatus(), wire.Status, deadline_seconds=10)[0].trajectories == 0
    trainer.close()
    assert serving.client.poll(0.1) == []
    done.set()
    (reply,) = serving.client.poll(10)
    assert reply.message.stored == 1


def test_a_server_that_is_told_to_stop_while_the_log_is_finished_ends_when_that_is_done(serving, trajectory):
    done = hold_the_finish(serving)
    serving.put([trajectory()])
    serving.stopped.set()
    assert not serving.ended(0.3)
    done.set()
    assert serving.ended()
    assert serving.raised is None


ASKED = wire.SampleBatch(step=0, prompts=1, samples=4, reference="none", wait_seconds=0.0)


def put_a_large_group(serving, trajectory) -> None:
    """Four trajectories of one prompt, 24 MB: more than the system sends ahead of a reader."""
    for n in range(4):
        put = serving.put([trajectory(tokens=np.full(750_000, n, np.int32))], first=n)
        wait_for(lambda put=put: serving.client.poll(0.05) or not serving.client.is_pending(put))


def rows_of(serving, table: str) -> int:
    with closing(sqlite3.connect(serving.path)) as reader:
        return reader.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]


@pytest.fixture
def trainer(serving):
    trainer = BufferClient(serving.channel.address, role="trainer", name="t")
    trainer.call(wire.Hello(host="h", pid=1, software="t"), wire.Welcome, deadline_seconds=10)
    yield trainer
    trainer.close()


def test_puts_wait_until_a_batch_is_on_its_way(serving, trainer, trajectory):
    put_a_large_group(serving, trajectory)
    serving.store.released.clear()
    trainer.post(ASKED)
    wait_for(lambda: rows_of(serving, "batches") == 1)
    put = serving.put([trajectory()], first=4)
    assert serving.client.poll(0.5) == []
    assert rows_of(serving, "trajectory_rows") == 4
    serving.store.released.set()
    (batch,) = trainer.poll(10)
    (reply,) = serving.client.poll(10)
    assert (len(batch.message.trajectory_ids), reply.header.id) == (4, put)


def put_a_group(serving, trajectory) -> None:
    serving.put([trajectory(tokens=np.full(3, n, np.int32)) for n in range(4)])
    assert serving.client.poll(10)


def test_a_batch_is_read_while_its_record_is_synced_and_handed_out_after_that(
    serving, trainer, trajectory, monkeypatch
):
    put_a_group(serving, trajectory)
    seen, was_read, payloads = [], threading.Event(), serving.store.trajectories.payloads

    def watched(ids):
        seen.append((serving.store.syncing.wait(10), rows_of(serving, "batches")))
        was_read.set()
        return payloads(ids)

    monkeypatch.setattr(serving.store.trajectories, "payloads", watched)
    serving.store.released.clear()
    serving.store.syncing.clear()
    trainer.post(ASKED)
    assert was_read.wait(20)
    assert seen == [(True, 1)]
    assert trainer.poll(0.3) == []
    serving.store.released.set()
    (batch,) = trainer.poll(10)
    assert len(batch.message.trajectory_ids) == 4


def can_be_taken(lock) -> bool:
    taken = lock.acquire(blocking=False)
    if taken:
        lock.release()
    return taken


def test_puts_are_decoded_while_a_request_for_a_batch_waits_for_data_and_not_while_it_is_read(
    serving, trainer, trajectory, monkeypatch
):
    puts, payloads = serving.store.trajectories, serving.store.trajectories.payloads
    writing, read, decoded, held = threading.Event(), [], [], []

    def slow_flush():
        if puts._new_rows["id"] and not writing.is_set():
            writing.set()
            wait_for(lambda: not serving.server._mailbox.empty)  # the second put
            decoded.append(True)
        Trajectories.flush(puts)

    def watched(ids):
        with ThreadPoolExecutor(1) as other:
            read.append(other.submit(can_be_taken, serving.server._network.decoding).result())
        held.append(serving.server._mailbox.held)
        return payloads(ids)

    monkeypatch.setattr(puts, "flush", slow_flush)
    monkeypatch.setattr(puts, "payloads", watched)
    trainer.post(ASKED.model_copy(update={"wait_seconds": 20.0}))
    wait_for(lambda: serving.server._parked)
    groups = [[trajectory(tokens=np.full(3, 2 * half + n, np.int32)) for n in range(2)] for half in range(2)]
    serving.put(groups[0])
    assert writing.wait(10)
    serving.put(groups[1], first=2)
    (batch,) = trainer.poll(10)
    assert len(batch.message.trajectory_ids) == 4
    assert (decoded, read, held) == ([True], [False], [True]), "nor is the log copied while it is read"


def test_the_log_is_left_alone_while_a_batch_is_recorded_unless_it_is_long(serving, trainer, trajectory, monkeypatch):
    copied, service = [], serving.server._service
    record = service.record_batch
    monkeypatch.setattr(
        service, "record_batch", lambda *asked: (copied.append(watched_copies(serving)), record(*asked))[1]
    )
    put_a_group(serving, trajectory)
    assert set(watched_copies(serving)) == {False}
    trainer.post(ASKED)
    (batch,) = trainer.poll(10)
    assert len(batch.message.trajectory_ids) == 4
    assert [set(times) for times in copied] == [{True}]
    wait_for(lambda: not serving.server._mailbox.held)
    assert set(watched_copies(serving)) == {False}


def watched_copies(serving) -> list[bool]:
    """With which `unless_short` the checkpointer asks, some times from now on."""
    asked, log = [], serving.store.log
    copy = log.copy
    log.copy = lambda *, unless_short: (asked.append(unless_short), copy(unless_short=unless_short))[1]
    wait_for(lambda: len(asked) >= 3)
    log.copy = copy
    return asked[:3]


def test_what_a_batch_changed_is_looked_at_when_it_has_left(serving, trainer, trajectory, monkeypatch):
    held, service = [], serving.server._service
    prepare = service.prepare_batches
    monkeypatch.setattr(service, "prepare_batches", lambda: (prepare(), held.append(serving.server._mailbox.held)))
    put_a_group(serving, trajectory)
    trainer.post(ASKED)
    (batch,) = trainer.poll(10)
    assert len(batch.message.trajectory_ids) == 4
    wait_for(lambda: held)
    assert held == [False]
    assert not service._served.index.board._changes.drain()


def test_a_batch_whose_record_is_not_synced_is_not_handed_out(serving, trainer, trajectory):
    put_a_group(serving, trajectory)
    serving.store.broken = SyncFailed("the disk")
    trainer.post(ASKED)
    assert serving.ended()
    assert isinstance(serving.raised, SyncFailed)
    assert trainer.poll(0.1) == []


def unreadable(serving, monkeypatch, error: Exception) -> None:
    def fails(_):
        raise error

    monkeypatch.setattr(serving.store.trajectories, "payloads", fails)


def test_a_batch_that_the_disk_does_not_read_is_asked_for_until_it_does(serving, trainer, trajectory, monkeypatch):
    put_a_group(serving, trajectory)
    monkeypatch.setattr("tba.common.client._RESEND_SECONDS", 0.2)
    with monkeypatch.context() as patched:
        unreadable(serving, patched, StorageError("the disk"))
        trainer.post(ASKED)
        wait_for(lambda: trainer.poll(0.05) == [] and trainer.trouble == "the disk")
    replies = []
    wait_for(lambda: replies.extend(trainer.poll(0.05)) or replies)
    assert len(replies[0].message.trajectory_ids) == 4
    assert rows_of(serving, "batches") == 1


def test_a_batch_that_cannot_be_read_is_refused_and_the_server_goes_on(serving, trainer, trajectory, monkeypatch):
    put_a_group(serving, trajectory)
    with monkeypatch.context() as patched:
        unreadable(serving, patched, ValueError("?"))
        trainer.post(ASKED)
        (refused,) = trainer.poll(10)
    assert refused.message.code == "internal"
    batch, _ = trainer.call(ASKED, wire.Batch, deadline_seconds=10)
    assert len(batch.trajectory_ids) == 4


@pytest.mark.parametrize("patience", [0.1, 2.0])
def test_puts_do_not_wait_for_long_for_a_trainer_that_takes_its_batch_slowly(
    serving, trajectory, monkeypatch, patience
):
    monkeypatch.setattr("tba.buffer.network._SLOW_READER_SECONDS", patience)
    put_a_large_group(serving, trajectory)
    with connected_dealer(serving.channel.address) as trainer:
        (request,) = encode_request(ASKED, id=1, role="trainer", sender="t.1", run="")
        trainer.sendall(b"\x00" + short(request))
        trainer.recv(100_000, socket.MSG_WAITALL)  # so some of the batch has left, and no more does
        put = serving.put([trajectory()], first=4)
        if patience > 1:
            assert serving.client.poll(0.5) == []
        (reply,) = serving.client.poll(10)
        assert reply.header.id == put


@contextmanager
def connected_dealer(address):
    """A socket that has shaken hands as a ZeroMQ DEALER does (ZMTP 3.0, RFC 23), and reads only what it is told to."""
    host, port = address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    with socket.socket() as dealer:
        dealer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        dealer.settimeout(10)
        dealer.connect((host, int(port)))
        dealer.sendall(greeting + b"\x04" + short(ready))
        theirs = dealer.recv(len(greeting) + 2, socket.MSG_WAITALL)
        dealer.recv(theirs[-1], socket.MSG_WAITALL)
        yield dealer


def short(part: bytes) -> bytes:
    return bytes([len(part)]) + part


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), StorageError("the disk is gone")])
def test_a_failed_sync_ends_the_server_and_nothing_is_acknowledged(serving, trajectory, error):
    serving.store.broken = error
    serving.put([trajectory()])
    assert serving.ended()
    assert serving.raised is error
    assert serving.client.poll(0.3) == []


def test_what_the_checkpointer_found_keeps_the_syncer_from_acknowledging_and_the_writer_from_committing(
    serving, trajectory
):
    serving.store.released.clear()
    serving.put([trajectory()])
    wait_for(lambda: serving.rows_that_others_see() == 1)
    serving.store.log.failure = SyncFailed("the disk")
    serving.put([trajectory(tokens=[9])], first=1)
    serving.store.released.set()
    assert serving.ended()
    assert serving.raised is serving.store.log.failure
    assert serving.client.poll(0.3) == []
    assert serving.rows_that_others_see() == 1


def test_a_sync_that_fails_late_ends_a_server_that_is_told_to_stop(serving, trajectory):
    serving.store.released.clear()
    serving.store.broken = OSError(5, "Input/output error")
    for n in range(40):  # more than the writer may be ahead
        serving.put([trajectory(tokens=[n])], first=n)
        time.sleep(0.005)
    serving.stopped.set()
    assert not serving.ended(0.3)
    serving.store.released.set()
    assert serving.ended()
    assert isinstance(serving.raised, OSError)
    assert serving.client.poll(0.3) == []


def test_a_server_that_stops_syncs_and_acknowledges_what_is_committed(serving, trajectory):
    serving.store.released.clear()
    put = serving.put([trajectory()])
    wait_for(lambda: serving.rows_that_others_see() == 1)
    serving.stopped.set()
    assert not serving.ended(0.3)
    serving.store.released.set()
    assert serving.ended()
    (reply,) = serving.client.poll(10)
    assert reply.header.id == put


def test_stop_returns_though_the_syncer_failed_with_its_queue_full():
    release, sent = threading.Event(), []

    def fail() -> None:
        release.wait(20)
        raise OSError(28, "No space left on device")

    syncer = Syncer(fail, sent.append)
    syncer.start()
    adding = threading.Thread(target=lambda: [syncer.add([(b"p", [b"r"])]) for _ in range(30)], daemon=True)
    adding.start()
    wait_for(syncer._waiting.full)
    release.set()
    adding.join(10)
    stopping = threading.Thread(target=syncer.stop, daemon=True)
    stopping.start()
    stopping.join(10)
    assert not adding.is_alive()
    assert not stopping.is_alive()
    assert isinstance(syncer.failure, OSError)
    assert sent == []


def test_a_put_that_finds_no_room_does_not_keep_a_status_in_its_group_from_its_answer(serving, trajectory):
    with closing(sqlite3.connect(serving.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        serving.client.post(wire.Hello(host="h", pid=1, software="t"))
        time.sleep(0.3)  # the writer has taken it and waits for the lock: what comes now is one group
        serving.store.full = True
        put, status = serving.put([trajectory()]), serving.client.post(wire.GetStatus())
        time.sleep(0.3)
        other.execute("ROLLBACK")
    answered, deadline = set(), time.monotonic() + 2  # the client would ask again after 3
    while status not in answered and time.monotonic() < deadline:
        answered |= {reply.header.id for reply in serving.client.poll(0.1)}
    assert status in answered
    assert serving.client.is_pending(put)


def test_a_locked_database_keeps_neither_the_status_of_a_group_nor_its_signs_of_life(serving, trajectory):
    serving.store.database._connection.execute("PRAGMA busy_timeout = 300")
    with closing(sqlite3.connect(serving.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        serving.client.post(wire.Hello(host="h", pid=1, software="t"))
        time.sleep(0.1)  # the writer waits with it for the lock: what comes now is one group
        serving.put([trajectory()])
        status = serving.client.post(wire.GetStatus())
        life = serving.client.post(wire.Heartbeat(activity="a", reason="", weights_version=None, metrics={}))
        answered, deadline = set(), time.monotonic() + 2  # the client would ask again after 3
        while not {status, life} <= answered and time.monotonic() < deadline:
            answered |= {reply.header.id for reply in serving.client.poll(0.1)}
        assert {status, life} <= answered
        assert serving.rows_that_others_see() == 0


def test_a_put_that_failed_and_came_again_is_counted_once(serving, trajectory):
    serving.store.full = True
    put = serving.put([trajectory(), trajectory(tokens=[9])])
    wait_for(lambda: not serving.client.poll(0.05) and serving.client.trouble)
    serving.store.full = False
    wait_for(lambda: serving.client.poll(0.05) or not serving.client.is_pending(put))
    status, _ = serving.client.call(wire.GetStatus(), wire.Status, deadline_seconds=10)
    (client,) = (client for client in status.clients if client.role == "searcher")
    assert (client.trajectories, client.duplicates, status.duplicates) == (2, 0, 0)
    assert status.puts_per_second == 0.2
