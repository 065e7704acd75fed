"""Producers for tests of what survives: real clients in processes of their own, which note what is acknowledged."""

import itertools
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np

from tba.common import wire
from tba.common.client import BufferClient
from tba.common.trajectory import Trajectory, pack

GROUP = 4
PROMPTS = 64
WINDOW = 16  # puts under way
WEIGHTS = wire.WeightsRef(version=0, step=0, path="/v0", manifest_sha256="0" * 64)


def prepare(address: str) -> None:
    """Register prompts and weights."""
    client = BufferClient(address, role="publisher", name="publisher")
    client.call(wire.Hello(host="h", pid=1, software="t"), wire.Welcome, deadline_seconds=20)
    keys = [f"p{n}" for n in range(PROMPTS)]
    registration = wire.RegisterPrompts(task="t", fingerprint="0" * 64, total=PROMPTS, offset=0, keys=keys)
    client.call(registration, wire.Registered, deadline_seconds=20)
    client.call(wire.AnnounceSnapshot(weights=WEIGHTS, bytes=1), wire.Done, deadline_seconds=20)
    client.close()


def put_message(first: int, tokens: int, seed: int) -> tuple[wire.PutTrajectories, list[bytes]]:
    """A group of one prompt, different from every other by its tokens."""
    rows = [
        Trajectory(
            prompt_key=f"p{(first // GROUP + seed) % PROMPTS}",
            lease=0,
            prompt_ids=np.array([1, 2], np.int32),
            response_ids=np.array([seed, first + k, *range(tokens)], np.int32),
            logprobs=np.zeros(tokens + 2, np.float32),
            version_runs=np.array([[0, tokens + 2]], np.int32),
            reward=float((first + k) % 7),
            reward_parts={},
            stop_reason="eos",
            sampling={"temperature": 1.0, "top_p": 1.0},
            created_at=1.0,
            generation_seconds=0.1,
        )
        for k in range(GROUP)
    ]
    columns, frames = pack(rows)
    return wire.PutTrajectories(first_sequence=first, rows=wire.Rows.model_validate(columns)), frames


class Producers:
    """Processes that put until `stop`; each writes `SENDER SEQUENCE DUPLICATES` for every acknowledgement."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        self._folder = folder
        self._context = multiprocessing.get_context("spawn")
        self._stopping = self._context.Event()
        self._numbers = itertools.count()
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.killed: set[int] = set()

    def start(self, count: int) -> None:
        """Start some more."""
        for _ in range(count):
            number = next(self._numbers)
            arguments = (self._address, number, self._folder / f"acks{number}", self._stopping)
            process = self._context.Process(target=_produce, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def kill_one(self) -> None:
        """SIGKILL to the oldest; another takes its place."""
        process = self.processes.pop(0)
        process.kill()
        process.join()
        self.start(1)

    def finish(self, seconds: float) -> None:
        """No new puts; wait until all of those that were made are acknowledged."""
        self._stopping.set()
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        assert [process.exitcode for process in self.processes] == [0] * len(self.processes)

    def end(self) -> None:
        """Leave no process behind."""
        for process in self.processes:
            process.kill()
            process.join()

    def acknowledged(self) -> set[tuple[str, int]]:
        """(sender, sequence) of every acknowledged row."""
        return {(sender, int(first) + k) for sender, first, _ in self._lines() for k in range(GROUP)}

    def duplicates(self) -> int:
        """Rows that the buffer said it had already."""
        return sum(int(duplicates) for _, _, duplicates in self._lines())

    def _lines(self) -> list[list[str]]:
        # A producer that was killed may have left half a line.
        texts = [path.read_text() for path in sorted(self._folder.glob("acks*"))]
        return [line.split() for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]


def _produce(address: str, number: int, log: Path, stopping) -> None:
    client = BufferClient(address, role="searcher", name=f"producer{number}")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sequence, waiting = 0, {}
    while waiting or not stopping.is_set():
        while len(waiting) < WINDOW and not stopping.is_set():
            waiting[client.post(*put_message(sequence, tokens=30, seed=number))] = sequence
            sequence += GROUP
        for reply in client.poll(0.05):
            assert isinstance(reply.message, wire.PutAck), reply.message
            first = waiting.pop(reply.header.id)
            os.write(descriptor, f"{client.sender} {first} {reply.message.duplicates}\n".encode())
    client.close()
