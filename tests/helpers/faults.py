"""Shared by tests of storage faults: producers whose rows identify themselves, and checks of the stored rows."""

import json
import math
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import ClientKeys
from tba.common.wire.trajectory import Trajectory
from tba.tests.helpers.puts import connected, make_trajectory, prepare, put_message

# Rows in a put.
ROWS = 4
# The id and the log-probability of a token.
BYTES_PER_TOKEN = 8


def row(producer: int, sequence: int, tokens: int) -> Trajectory:
    """Return a row whose tokens are derived from its producer and sequence number; every other one is an episode."""
    response = np.arange(tokens, dtype=np.int32)
    response[:2] = producer, sequence
    logprobs = np.full(tokens, -0.5 - sequence, np.float32)
    return make_trajectory(lease=0, tokens=response, logprobs=logprobs, **_episode(sequence, tokens))


def _episode(sequence: int, tokens: int) -> dict[str, Any]:
    """Return the fields of an episode of two turns, the second of which begins a context."""
    if sequence % 2 or tokens < 5:
        return {}
    mask = np.ones(tokens, np.uint8)
    mask[2:4] = 0
    same = {"seconds": 0.5, "parts": {"n": sequence}, "messages": [["user", f"answer {sequence}"]]}
    turns = [{"start": 0, "tokens": 2, "reward": sequence}, {"start": 4, "tokens": tokens - 4, "reward": -1}]
    segments = np.array([2], np.int32)
    return {"loss_mask": mask, "segments": segments, "turns": [t | same for t in turns], "stop_reason": "completed"}


def put_of(producer: int, first: int, tokens: int) -> tuple[messages.PutTrajectories, list[bytes]]:
    """Return a put of `ROWS` rows and its frames."""
    return put_message([row(producer, first + k, tokens) for k in range(ROWS)], first)


@dataclass
class Producer:
    """A searcher that puts without pause, in a thread, with up to `window` pending puts, and `limit` puts in all.

    `posted` counts puts; `acknowledged` has their first sequence numbers in the order of the replies, and `duplicates`
    counts the rows that were stored before.
    """

    address: str
    number: int
    tokens: int
    window: int = 4
    limit: float = math.inf
    keys: ClientKeys | None = None
    posted: int = 0
    acknowledged: list[int] = field(default_factory=list)
    troubles: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    duplicates: int = 0

    def start(self) -> None:
        self._enough, self._given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop_posting(self) -> None:
        self._enough.set()

    def wait_until_all_is_answered(self, seconds: float) -> None:
        self._enough.set()
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"producer {self.number} still waits: {self.troubles}"

    def give_up(self) -> None:
        """End without waiting for replies."""
        self._given_up.set()
        self.wait_until_all_is_answered(60)

    def _run(self) -> None:
        with connected(self.address, "searcher", f"s{self.number}", self.keys) as client:
            prepare(client)
            while not self._given_up.is_set() and not (self._enough.is_set() and not client._pending):
                while len(client._pending) < self.window and not self._enough.is_set() and self.posted < self.limit:
                    self._post(client)
                self._note(client.poll(0.05))
                self.troubles |= {client.trouble} - {""}

    def _post(self, client: BufferClient) -> None:
        client.post(*put_of(self.number, self.posted * ROWS, self.tokens))
        self.posted += 1

    def _note(self, replies) -> None:
        for reply in replies:
            if isinstance(reply.message, messages.PutAck):
                self.acknowledged.append(reply.message.first_sequence)
                self.duplicates += reply.message.duplicates
            else:
                self.refused.append(repr(reply.message))


@contextmanager
def producing(
    address: str, count: int, *, tokens: int, window: int = 4, limit: float = math.inf, keys: ClientKeys | None = None
) -> Iterator[list[Producer]]:
    """Run producers, and end them at the end of the block, answered or not."""
    producers = [Producer(address, number, tokens, window, limit, keys) for number in range(count)]
    for producer in producers:
        producer.start()
    try:
        yield producers
    finally:
        for producer in producers:
            producer.give_up()


@dataclass(frozen=True)
class Stored:
    """The rows of a file, each as (id, producer, sequence). Their content has been checked."""

    rows: list[tuple[int, int, int]]

    def sequences(self, producer: int) -> list[int]:
        return [sequence for _, number, sequence in self.rows if number == producer]


def stored(database: Path) -> Stored:
    """Return the rows of an intact file, after comparing their tokens with `row`."""
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = connection.execute(
            "SELECT t.id, s.sender, t.sequence, y.response_ids, y.logprobs, t.turns, y.segments FROM trajectory_rows t"
            " JOIN senders s ON s.id = t.sender LEFT JOIN payloads y ON y.trajectory = t.id ORDER BY t.id"
        )
        rows = [(id_, _checked(sender, sequence, *payload), sequence) for id_, sender, sequence, *payload in found]
        assert connection.execute("SELECT COUNT(*) FROM payloads").fetchone() == (len(rows),)
    return Stored(rows)


def _checked(sender: str, sequence: int, response: bytes, logprobs: bytes, turns: str, segments: bytes) -> int:
    producer = int(sender.split(".", maxsplit=1)[0].removeprefix("s"))
    expected = row(producer, sequence, len(response) // 4)
    assert response == expected.response_ids.tobytes()
    assert logprobs == expected.logprobs.tobytes()
    assert (json.loads(turns), segments) == (expected.turns, expected.segments.tobytes())
    return producer


def assert_all_is_stored_once(database: Path, producers: list[Producer]) -> None:
    """Assert that every posted row was acknowledged once and is stored once."""
    found = stored(database)
    for producer in producers:
        firsts = [put * ROWS for put in range(producer.posted)]
        assert producer.refused == []
        assert sorted(producer.acknowledged) == firsts
        assert sorted(found.sequences(producer.number)) == list(range(producer.posted * ROWS))
