"""What the tests of storage faults share: producers whose rows say what they are, and a look at what was stored."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tba.common import wire
from tba.common.client import BufferClient
from tba.common.trajectory import Trajectory, pack

REF = wire.WeightsRef(version=0, step=0, path="/v0", manifest_sha256="0" * 64)
ROWS = 4  # of a put
BYTES_PER_TOKEN = 8  # its id and its log-probability


def row(producer: int, sequence: int, tokens: int) -> Trajectory:
    """A row whose tokens follow from who made it and its number."""
    response = np.arange(tokens, dtype=np.int32)
    response[:2] = producer, sequence
    return Trajectory(
        prompt_key="p0",
        lease=0,
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=response,
        logprobs=np.full(tokens, -0.5 - sequence, np.float32),
        version_runs=np.array([[0, tokens]], np.int32),
        reward=1.0,
        reward_parts={},
        stop_reason="eos",
        sampling={"temperature": 1.0, "top_p": 1.0},
        created_at=0.0,
        generation_seconds=0.0,
    )


@contextmanager
def connected(address: str, role: str = "monitor", name: str = "test") -> Iterator[BufferClient]:
    """A client that is closed in the end."""
    client = BufferClient(address, role=role, name=name)
    try:
        yield client
    finally:
        client.close()


def prepare(client: BufferClient) -> None:
    """Register the one prompt and the one snapshot that the rows name."""
    client.call(wire.Hello(host="h", pid=1, software="t"), wire.Welcome, deadline_seconds=20)
    keys = wire.RegisterPrompts(task="t", fingerprint="0" * 64, total=1, offset=0, keys=["p0"])
    client.call(keys, wire.Registered, deadline_seconds=20)
    client.call(wire.AnnounceSnapshot(weights=REF, bytes=1), wire.Done, deadline_seconds=20)


@dataclass
class Producer:
    """A searcher that puts without pause, a few puts ahead of the answers. `run` has a thread of its own."""

    address: str
    number: int
    tokens: int
    window: int = 4
    posted: int = 0  # puts
    acknowledged: list[int] = field(default_factory=list)  # first sequence numbers, as the answers came
    troubles: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)

    def start(self) -> None:
        self._enough, self._given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def post_no_more(self) -> None:
        self._enough.set()

    def wait_until_all_is_answered(self, seconds: float) -> None:
        self._enough.set()
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"producer {self.number} still waits: {self.troubles}"

    def give_up(self) -> None:
        """End without the answers."""
        self._given_up.set()
        self.wait_until_all_is_answered(10)

    def _run(self) -> None:
        with connected(self.address, "searcher", f"s{self.number}") as client:
            prepare(client)
            while not self._given_up.is_set() and not (self._enough.is_set() and not client._pending):
                while len(client._pending) < self.window and not self._enough.is_set():
                    self._post(client)
                self._note(client.poll(0.05))
                self.troubles |= {client.trouble} - {""}

    def _post(self, client: BufferClient) -> None:
        first = self.posted * ROWS
        columns, frames = pack([row(self.number, first + k, self.tokens) for k in range(ROWS)])
        client.post(wire.PutTrajectories(first_sequence=first, rows=wire.Rows.model_validate(columns)), frames)
        self.posted += 1

    def _note(self, replies) -> None:
        for reply in replies:
            if isinstance(reply.message, wire.PutAck):
                self.acknowledged.append(reply.message.first_sequence)
            else:
                self.refused.append(repr(reply.message))


@contextmanager
def producing(address: str, count: int, *, tokens: int, window: int = 4) -> Iterator[list[Producer]]:
    """Producers at work; they are ended at the end, answered or not."""
    producers = [Producer(address, number, tokens, window) for number in range(count)]
    for producer in producers:
        producer.start()
    try:
        yield producers
    finally:
        for producer in producers:
            producer.give_up()


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)


@dataclass(frozen=True)
class Stored:
    """What a file holds: one (id, producer, sequence) per row. Made only of rows that are all they should be."""

    rows: list[tuple[int, int, int]]

    def sequences(self, producer: int) -> list[int]:
        return [sequence for _, number, sequence in self.rows if number == producer]


def stored(database: Path) -> Stored:
    """The rows of a sound file. Each has the tokens that `row` gave it."""
    with closing(sqlite3.connect(database)) as connection:
        return stored_in(connection)


def stored_in(connection: sqlite3.Connection) -> Stored:
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    found = connection.execute(
        "SELECT t.id, s.sender, t.sequence, y.response_ids, y.logprobs FROM trajectory_rows t"
        " JOIN senders s ON s.id = t.sender LEFT JOIN payloads y ON y.trajectory = t.id ORDER BY t.id"
    )
    rows = [(id_, _checked(sender, sequence, *payload), sequence) for id_, sender, sequence, *payload in found]
    assert connection.execute("SELECT COUNT(*) FROM payloads").fetchone() == (len(rows),)
    return Stored(rows)


def _checked(sender: str, sequence: int, response: bytes, logprobs: bytes) -> int:
    producer = int(sender.split(".", maxsplit=1)[0].removeprefix("s"))
    expected = row(producer, sequence, len(response) // 4)
    assert response == expected.response_ids.tobytes()
    assert logprobs == expected.logprobs.tobytes()
    return producer


def assert_all_is_stored_once(database: Path, producers: list[Producer]) -> None:
    """All that was posted was acknowledged once and is there once."""
    found = stored(database)
    for producer in producers:
        firsts = [put * ROWS for put in range(producer.posted)]
        assert producer.refused == []
        assert sorted(producer.acknowledged) == firsts
        assert sorted(found.sequences(producer.number)) == list(range(producer.posted * ROWS))
