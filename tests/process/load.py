"""Producers for tests: a program that leases prompts and puts groups through real clients, and writes down every ack.

    python load.py ADDRESS LEDGER PRODUCERS [PUTS_PER_SECOND] [TOKENS]

A line of the ledger is one acknowledged put: `sender first_sequence rows stored duplicates`. It is written before
anything else happens, and survives a kill of this program. SIGTERM: nothing new is begun, and the program ends when
all that was put is acknowledged. What a row holds follows from its sender and sequence number: see `tokens_of`.
"""

import os
import signal
import sys
import threading
import time
import zlib

import numpy as np

from tba.common import wire
from tba.common.client import BufferClient
from tba.common.process import die_with_parent
from tba.common.trajectory import Trajectory, pack

PROMPTS = 64
ROWS = 4
_IN_FLIGHT = 64  # puts: those of a killed server wait three seconds to be sent again, and the load must go on


def tokens_of(sender: str, sequence: int, count: int) -> np.ndarray:
    """The response of a row: nobody else's."""
    return np.resize(np.array([zlib.crc32(sender.encode()) >> 1, sequence], np.int32), count)


def prompt_keys() -> list[str]:
    """The prompts of the run."""
    return [f"p{n}" for n in range(PROMPTS)]


def prepare(client: BufferClient) -> None:
    """Make the run ready for puts."""
    reference = wire.WeightsRef(version=0, step=0, path="/v0", manifest_sha256="0" * 64)
    keys = wire.RegisterPrompts(task="t", fingerprint="0" * 64, total=PROMPTS, offset=0, keys=prompt_keys())
    client.call(keys, wire.Registered, deadline_seconds=20)
    client.call(wire.AnnounceSnapshot(weights=reference, bytes=1), wire.Done, deadline_seconds=20)


def put_of(sender: str, first: int, visit: wire.Visit, tokens: int) -> tuple[wire.PutTrajectories, list[bytes]]:
    """The group of one visit."""
    group = [
        Trajectory(
            prompt_key=visit.prompt_key,
            lease=visit.lease,
            prompt_ids=np.array([1, 2], np.int32),
            response_ids=tokens_of(sender, first + k, tokens),
            logprobs=np.full(tokens, -0.5, np.float32),
            version_runs=np.array([[0, tokens]], np.int32),
            reward=float(k % 2),
            reward_parts={},
            stop_reason="eos",
            sampling={"temperature": 1.0, "top_p": 1.0},
            created_at=1000.0,
            generation_seconds=0.1,
        )
        for k in range(ROWS)
    ]
    columns, frames = pack(group)
    return wire.PutTrajectories(first_sequence=first, rows=wire.Rows.model_validate(columns)), frames


class Producer:
    """One client: `turn` until stopped, then `drained`."""

    def __init__(self, address: str, name: str, ledger: int, *, pause: float, tokens: int) -> None:
        self.client = BufferClient(address, role="searcher", name=name)
        self._ledger = ledger
        self._pause = pause
        self._tokens = tokens
        self._sequence = 0
        self._work: list[wire.Visit] = []
        self._lease_request: int | None = None
        self._puts: dict[int, int] = {}  # request -> lease

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._ask_for_work()
            if self._work and len(self._puts) < _IN_FLIGHT:
                visit = self._work.pop()
                message, frames = put_of(self.client.sender, self._sequence, visit, self._tokens)
                self._sequence += ROWS
                self._puts[self.client.post(message, frames)] = visit.lease
            self._note(self._pause)
        while self._puts:
            self._note(0.2)
        self.client.close()

    def _ask_for_work(self) -> None:
        if not self._work and not self.client.is_pending(self._lease_request):
            held = list(self._puts.values())
            message = wire.LeasePrompts(want=16, held=held, weights_version=0, wait_seconds=0.0)
            self._lease_request = self.client.post(message)

    def _note(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            for reply in self.client.poll(max(0.0, deadline - time.monotonic())):
                self._take(reply)
            if time.monotonic() >= deadline:
                return

    def _take(self, reply) -> None:
        message = reply.message
        if isinstance(message, wire.Leases):
            self._work += message.visits
        elif isinstance(message, wire.PutAck):
            line = f"{self.client.sender} {message.first_sequence} {ROWS} {message.stored} {message.duplicates}\n"
            os.write(self._ledger, line.encode())
            del self._puts[reply.header.id]
        else:
            raise SystemExit(f"{self.client.sender} heard {message}")


def main(address: str, ledger: str, producers: str, rate: str = "50", tokens: str = "64") -> None:
    die_with_parent()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            Producer(address, f"load{number}", file, pause=1 / float(rate), tokens=int(tokens)).run(stop)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(int(producers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
