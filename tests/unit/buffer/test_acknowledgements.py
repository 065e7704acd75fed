"""No reply leaves before its transaction is on the disk; requests that wait; queries in a process of their own."""

import sqlite3
import threading
import time
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tba.buffer.server.mailbox import Arrival, Mailbox, Parked
from tba.buffer.server.writer import BufferServer
from tba.buffer.service.service import BufferService
from tba.buffer.store.store import Store
from tba.buffer.tools.query import query_limited
from tba.buffer.tools.query_process import MAX_QUERY_ROWS, QueryResult
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import StorageError, SyncFailed, UsageError
from tba.common.wire import messages
from tba.common.wire.channels import Peer, ServerChannel
from tba.common.wire.client import BufferClient
from tba.common.wire.codec import RequestHeader
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


@pytest.mark.parametrize("stops", [False, True])
def test_a_put_is_acknowledged_only_when_it_is_on_the_disk_also_by_a_server_that_stops(serving, trajectory, stops):
    serving.store.released.clear()
    put = serving.put([trajectory()])
    wait_until(lambda: serving.committed() == 1)
    assert serving.client.poll(0.1) == []
    if stops:
        serving.stopped.set()
        assert not serving.ended(0.1)
    serving.store.released.set()
    assert not stops or serving.ended()
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


def test_a_put_is_acknowledged_before_the_checkpoint_that_follows_it(serving, trajectory, monkeypatch):
    database, checkpoint, released = serving.store.database, serving.store.database.checkpoint, threading.Event()
    # The put is what exceeds 4 MiB.
    database.written = 4 << 20
    monkeypatch.setattr(
        database, "checkpoint", lambda: checkpoint() if database.written <= 4 << 20 else released.wait(60)
    )
    try:
        serving.put([trajectory()])
        assert serving.client.poll(10.0)
    finally:
        released.set()


def test_a_batch_whose_record_is_not_synced_is_not_handed_out(serving, trainer, trajectory):
    put_a_group(serving, trajectory)
    serving.store.broken = SyncFailed("the disk")
    trainer.post(REQUEST)
    assert serving.ended()
    assert isinstance(serving.raised, SyncFailed)
    assert trainer.poll(0.1) == []


def test_a_batch_that_the_disk_cannot_read_is_requested_until_it_can(serving, trainer, trajectory, monkeypatch):
    """And one whose reading fails in another way is refused, after which the server continues."""
    put_a_group(serving, trajectory)
    monkeypatch.setattr("tba.common.wire.client._RESEND_SECONDS", 0.2)
    with monkeypatch.context() as patched:
        patched.setattr(serving.store.trajectories, "payloads", Mock(side_effect=ValueError("?")))
        trainer.post(REQUEST)
        (refused,) = trainer.poll(60)
        assert refused.message.code == "internal"
        patched.setattr(serving.store.trajectories, "payloads", Mock(side_effect=StorageError("the disk")))
        trainer.post(REQUEST)
        wait_until(lambda: trainer.poll(0.05) == [] and trainer.trouble == "the disk")
        assert serving.committed("batches") == 0
    replies: list[Any] = []
    wait_until(lambda: replies.extend(trainer.poll(0.05)) or replies)
    assert len(replies[0].message.trajectory_ids) == 4
    assert serving.committed("batches") == 1


def test_status_and_heartbeat_are_answered_while_the_database_is_locked(serving, trajectory, monkeypatch):
    # Nothing is sent again.
    monkeypatch.setattr("tba.common.wire.client._RESEND_SECONDS", 600.0)
    serving.store.database._connection.execute("PRAGMA busy_timeout = 300")
    with closing(sqlite3.connect(serving.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        serving.client.post(messages.Hello(host="h", pid=1))
        # The writer waits for the lock with the hello: later requests form one group.
        time.sleep(0.1)
        serving.put([trajectory()])
        asked, answered = {serving.client.post(GetStatus()), serving.client.post(HEARTBEAT)}, set[int]()
        wait_until(lambda: answered.update(one.header.id for one in serving.client.poll(0.1)) or answered >= asked)
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


LEASE = messages.LeasePrompts(want=1, held=[], weights_version=0, wait_seconds=1.0)
HEARTBEAT = messages.Heartbeat(activity="waiting", reason="", weights_version=None, metrics={})
BATCH = messages.SampleBatch(step=0, prompts=1, samples=1, reference="none", wait_seconds=1.0)


def arrival(message, peer=b"p", role="monitor", id_=1, sender="s.1", deadline=0.0):
    header = RequestHeader(v=1, type=message.TYPE, id=id_, run="", role=role, sender=sender)
    return Arrival(Peer(peer), header, message, bytes=1, at=0.0, deadline=deadline)


def test_a_transaction_takes_some_of_each_queue_and_one_batch():
    mailbox = Mailbox(1 << 20)

    def taken() -> list[str]:
        return [one.header.type for one in mailbox.take(0)]

    for n in range(50):
        mailbox.add(arrival(GetStatus(), peer=bytes([n])))
    for _ in range(3):
        mailbox.add(arrival(BATCH))
    mailbox.add(arrival(messages.Goodbye(), role="searcher"))
    assert taken() == [*["get_status"] * 32, "sample_batch", "goodbye"]
    assert taken() == [*["get_status"] * 18, "sample_batch"]
    assert taken() == ["sample_batch"]
    # A status does not wait behind the heartbeats of a fleet, nor do they for several transactions.
    for n in range(200):
        mailbox.add(arrival(HEARTBEAT, peer=bytes([n]), role="searcher"))
    mailbox.add(arrival(GetStatus()))
    assert taken() == [*["heartbeat"] * 200, "get_status"]
    assert mailbox.empty


def test_a_heartbeat_does_not_wake_the_writer_and_is_taken_with_the_next_request():
    mailbox, taken = Mailbox(1 << 20), []
    writer = threading.Thread(target=lambda: taken.extend(mailbox.take(60)))
    writer.start()
    wait_until(lambda: mailbox._changed._waiters)  # type: ignore[attr-defined]
    mailbox.add(arrival(HEARTBEAT, role="searcher"))
    assert mailbox._changed._waiters  # type: ignore[attr-defined]
    mailbox.add(arrival(messages.Goodbye(), role="searcher"))
    writer.join()
    assert [arrival.header.type for arrival in taken] == ["heartbeat", "goodbye"]


def test_other_requests_of_one_connection_beyond_a_limit_are_dropped():
    mailbox = Mailbox(1 << 20)
    for id_ in range(1000):
        mailbox.add(arrival(LEASE, role="searcher", id_=id_))
    mailbox.add(arrival(LEASE, peer=b"other", role="searcher"))
    assert (mailbox.dropped, mailbox.bytes) == (872, 129)
    assert {taken.peer for taken in mailbox.take(0)} == {Peer(b"p"), Peer(b"other")}
    mailbox.add(arrival(LEASE, role="searcher"))
    assert mailbox.dropped == 872


def parked_lease(sender: str, peer: bytes = b"1", deadline: float = 1.0) -> Arrival:
    return arrival(LEASE, peer=peer, role="searcher", sender=sender, deadline=deadline)


def test_parked_requests_are_one_of_each_sender_few_of_a_connection_and_taken_once_when_overdue():
    parked = Parked()
    old, new, late = parked_lease("a.1"), parked_lease("a.1", peer=b"2"), parked_lease("b.1", deadline=2.0)
    assert all(map(parked.add, (old, new, late)))
    assert parked.of_type(LEASE.TYPE) == {"a.1": new, "b.1": late}
    assert [parked.take_overdue(1.0) for _ in range(2)] == [[new], []]
    assert parked.of_type(LEASE.TYPE) == {"b.1": late}
    flood = [parked_lease(f"a{n}.1") for n in range(1000)]
    assert 1 + sum(map(parked.add, flood)) == len(parked.of_type(LEASE.TYPE)) < 10
    assert parked.add(parked_lease("c.1", peer=b"2")), "other connections are not affected"
    for item in list(parked.of_type(LEASE.TYPE).values()):
        parked.remove(item)
    assert parked.add(flood[-1])


def ask(path, sql: str, *, limit: int = 100, seconds: float = 30.0) -> QueryResult:
    return query_limited(path, sql, rows=limit, seconds=seconds)


def test_rows_of_every_type_come_back_as_they_are_and_a_crash_of_sqlite_ends_no_other_process(filled):
    """SQLite up to 3.45 recurses for each step of a path, and a later one has a limit."""
    result = ask(filled, "SELECT 1 AS i, 0.5 AS r, 'ä' AS t, x'00ff' AS b, NULL AS n, 9e999 AS infinite")
    assert result.headings == ["i", "r", "t", "b", "n", "infinite"]
    assert result.rows == [[1, 0.5, "ä", b"\x00\xff", None, float("inf")]]
    crash = "json_set('{}', '$.' || replace(hex(zeroblob(1000000)), '00', 'a.'), 1)"
    with pytest.raises(UsageError, match="ended SQLite with SIGSEGV: write it in another way|SQL: "):
        ask(filled, f"SELECT length({crash})")
    assert ask(filled, "SELECT COUNT(*) FROM trajectories").rows == [[7]]


MANY = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 10000)"


@pytest.mark.parametrize(("row", "least", "most"), [
    ("hex(zeroblob(100000))", 30, 50), ("replace(hex(zeroblob(50000)), '00', char(128512))", 30, 50),
    (", ".join(["''"] * 500), 1000, 2000),
])  # fmt: skip
def test_a_result_has_a_limit_in_bytes_and_can_be_read_whatever_its_values_are(row, least, most, filled):
    result = ask(filled, f"{MANY} SELECT {row} FROM n", limit=MAX_QUERY_ROWS)
    assert least < len(result.rows) < most
    assert "at most 8 MiB" in result.cut


# Functions that SQLite does not interrupt, with time proportional to a power of the length of a text.
SLOW = {
    "rows": "COUNT(*) FROM endless",
    "instr": "instr(hex(zeroblob(999999)), hex(zeroblob(499999)) || '1')",
    "json_patch": "json_patch(j, j) FROM (SELECT json_group_object(value, 1) AS j FROM n)",
    "printf": ", ".join(["printf('%.*c', 500000000, 'x')"] * 12),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", SLOW.values(), ids=SLOW)
def test_a_function_that_looks_at_no_clock_is_ended_at_the_limit(filled, call):
    numbers = """WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n LIMIT 100000),
        endless(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM endless)"""
    with pytest.raises(UsageError, match=r"^the query takes longer than 0.2 s: read fewer rows$"):
        ask(filled, f"{numbers} SELECT {call}", seconds=0.2)
