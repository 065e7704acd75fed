"""No reply leaves before its transaction is on the disk, and a failed sync ends the server instead of hanging it."""

import sqlite3
import threading
import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tba.buffer.server.writer import BufferServer
from tba.buffer.service.service import BufferService
from tba.buffer.store.store import Store
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import StorageError, SyncFailed
from tba.common.wire import messages
from tba.common.wire.channels import ServerChannel
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.buffer import new_database
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.puts import prepare, put_message


class SlowStore(Store):
    """A store whose disk can block, fail, or be full for trajectories."""

    def __init__(self, path) -> None:
        super().__init__(new_database(path), durability="power")
        self.released = threading.Event()
        self.released.set()
        self.broken: SyncFailed | None = None
        self.full = False
        # The last part of a transaction.
        self._check, self.database._files.check = self.database._files.check, self._slow_check
        self._flush, self.trajectories.flush = self.trajectories.flush, self._flush_if_not_full

    def _slow_check(self) -> None:
        assert self.released.wait(60)
        if self.broken is not None:
            raise self.broken
        self._check()

    def _flush_if_not_full(self) -> None:
        if self.full and self.trajectories._new_rows["id"]:
            raise StorageError("the disk is full")
        self._flush()


class Serving:
    """The real server on a slow store, in a thread, and a searcher that has registered a prompt."""

    def __init__(self, path) -> None:
        config = Config.model_validate({"train": {"prompts_per_step": 1}})
        self.path = path
        self.store = SlowStore(path)
        run = self.store.open_run("test", seed=0, config={}, software={})
        self.channel = ServerChannel("tcp://127.0.0.1:*")
        service = BufferService(self.store, run, config, SystemClock())
        self.server = BufferServer(self.channel, service, queue_bytes=1 << 20)
        self.stopped = threading.Event()
        self.raised: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.client = BufferClient(self.channel.address, role="searcher", name="s")
        prepare(self.client)

    def _serve(self) -> None:
        try:
            self.server.run(self.stopped.is_set)
        except BaseException as error:  # noqa: BLE001
            self.raised = error

    def put(self, rows, first: int = 0) -> int:
        return self.client.post(*put_message(rows, first))

    def committed(self, table: str = "trajectory_rows") -> int:
        """Return the rows of a table that another process sees."""
        with closing(sqlite3.connect(self.path)) as reader:
            return reader.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]

    def ended(self, seconds: float = 60) -> bool:
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
    serving = Serving(tmp_path / "buffer.sqlite")
    yield serving
    serving.close()


def test_a_put_is_acknowledged_only_when_it_is_on_the_disk(serving, trajectory):
    serving.store.released.clear()
    put = serving.put([trajectory()])
    wait_until(lambda: serving.committed() == 1)
    assert serving.client.poll(0.1) == []
    serving.store.released.set()
    (reply,) = serving.client.poll(60)
    assert (reply.header.id, reply.message.stored) == (put, 1)


REQUEST = messages.SampleBatch(step=0, prompts=1, samples=4, reference="none", wait_seconds=0.0)


@pytest.fixture
def trainer(serving):
    trainer = BufferClient(serving.channel.address, role="trainer", name="t")
    trainer.call(messages.Hello(host="h", pid=1), messages.Welcome, deadline_seconds=60)
    yield trainer
    trainer.close()


def put_a_group(serving, trajectory) -> None:
    serving.put([trajectory(tokens=np.full(3, n, np.int32)) for n in range(4)])
    assert serving.client.poll(60)


def test_a_batch_whose_record_is_not_synced_is_not_handed_out(serving, trainer, trajectory):
    put_a_group(serving, trajectory)
    serving.store.broken = SyncFailed("the disk")
    trainer.post(REQUEST)
    assert serving.ended()
    assert isinstance(serving.raised, SyncFailed)
    assert trainer.poll(0.1) == []


def unreadable(serving, monkeypatch, error: Exception) -> None:
    def fails(_):
        raise error

    monkeypatch.setattr(serving.store.trajectories, "payloads", fails)


def test_a_batch_that_the_disk_cannot_read_is_requested_until_it_can(serving, trainer, trajectory, monkeypatch):
    put_a_group(serving, trajectory)
    monkeypatch.setattr("tba.common.wire.client._RESEND_SECONDS", 0.2)
    with monkeypatch.context() as patched:
        unreadable(serving, patched, StorageError("the disk"))
        trainer.post(REQUEST)
        wait_until(lambda: trainer.poll(0.05) == [] and trainer.trouble == "the disk")
        assert serving.committed("batches") == 0
    replies: list[Any] = []
    wait_until(lambda: replies.extend(trainer.poll(0.05)) or replies)
    assert len(replies[0].message.trajectory_ids) == 4
    assert serving.committed("batches") == 1


def test_a_batch_that_fails_to_be_read_is_refused_and_the_server_continues(serving, trainer, trajectory, monkeypatch):
    put_a_group(serving, trajectory)
    with monkeypatch.context() as patched:
        unreadable(serving, patched, ValueError("?"))
        trainer.post(REQUEST)
        (refused,) = trainer.poll(60)
    assert refused.message.code == "internal"
    batch, _ = trainer.call(REQUEST, messages.Batch, deadline_seconds=60)
    assert len(batch.trajectory_ids) == 4


def test_a_server_that_stops_acknowledges_what_is_committed(serving, trajectory):
    serving.store.released.clear()
    put = serving.put([trajectory()])
    wait_until(lambda: serving.committed() == 1)
    serving.stopped.set()
    assert not serving.ended(0.1)
    serving.store.released.set()
    assert serving.ended()
    (reply,) = serving.client.poll(60)
    assert reply.header.id == put


@pytest.fixture
def patient(monkeypatch):
    """A client that sends no request again within a test."""
    monkeypatch.setattr("tba.common.wire.client._RESEND_SECONDS", 600.0)


def wait_for_answers(serving, *requests: int) -> None:
    answered = set[int]()
    wait_until(lambda: answered.update(one.header.id for one in serving.client.poll(0.1)) or answered >= set(requests))


def test_status_and_heartbeat_are_answered_while_the_database_is_locked(patient, serving, trajectory):
    serving.store.database._connection.execute("PRAGMA busy_timeout = 300")
    with closing(sqlite3.connect(serving.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        serving.client.post(messages.Hello(host="h", pid=1))
        # The writer waits for the lock with the hello: later requests form one group.
        time.sleep(0.1)
        serving.put([trajectory()])
        status = serving.client.post(GetStatus())
        life = serving.client.post(messages.Heartbeat(activity="a", reason="", weights_version=None, metrics={}))
        wait_for_answers(serving, status, life)
        assert serving.committed() == 0


def test_a_put_that_failed_and_came_again_is_counted_once(serving, trajectory, monkeypatch):
    monkeypatch.setattr("tba.common.wire.client._RESEND_SECONDS", 0.2)
    serving.store.full = True
    put = serving.put([trajectory(), trajectory(tokens=[9])])
    wait_until(lambda: not serving.client.poll(0.05) and serving.client.trouble)
    serving.store.full = False
    wait_until(lambda: serving.client.poll(0.05) or not serving.client.is_pending(put))
    status, _ = serving.client.call(GetStatus(), Status, deadline_seconds=60)
    (client,) = (client for client in status.clients if client.role == "searcher")
    assert (client.trajectories, client.duplicates, status.duplicates) == (2, 0, 0)
    assert status.puts_per_second == 0.2
