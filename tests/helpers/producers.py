"""Producers for tests: a program that leases prompts and puts groups through real clients, and logs every ack.

    python load.py ADDRESS LEDGER PRODUCERS [PUTS_PER_SECOND] [TOKENS]

A line of the ledger is one acknowledged put: `sender first_sequence rows stored duplicates`. It is written as soon as
the ack arrives, and survives a kill of this program. After SIGTERM the program starts no new put and exits when every
put is acknowledged. The tokens of a row are derived from its sender and sequence number: see `tokens_of`.
"""

import os
import signal
import sys
import threading
import time
import zlib
from typing import Any

import numpy as np

from tba.common.system.process import die_with_parent
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.tests.helpers.puts import make_trajectory, put_message

PROMPTS = 64
ROWS = 4
# Pending puts. Those lost with a killed server are sent again after three seconds, and the load must continue.
_IN_FLIGHT = 64


def tokens_of(sender: str, sequence: int, count: int) -> np.ndarray:
    """Return the response of a row, unique to it."""
    return np.resize(np.array([zlib.crc32(sender.encode()) >> 1, sequence], np.int32), count)


def episode_of(sequence: int, count: int) -> dict[str, Any]:
    """Return what makes a row an episode of two turns in two sequences, unique to it. Every other row is one."""
    if sequence % 2 or count < 5:
        return {}
    mask = np.ones(count, np.uint8)
    mask[2:4] = 0
    same = {"seconds": 0.5, "parts": {"n": sequence}, "messages": [["user", f"answer {sequence}"]]}
    turns = [{"start": 0, "tokens": 2, "reward": sequence}, {"start": 4, "tokens": count - 4, "reward": -1}]
    return {
        "loss_mask": mask,
        "segments": np.array([2], np.int32),
        "turns": [turn | same for turn in turns],
        "stop_reason": "completed",
    }


def put_of(sender: str, first: int, visit: messages.Visit, tokens: int) -> tuple[messages.PutTrajectories, list[bytes]]:
    """Return the put with the group of one visit."""
    group = [
        make_trajectory(
            visit.prompt_key,
            visit.lease,
            tokens=tokens_of(sender, first + k, tokens),
            reward=float(k % 2),
            **episode_of(first + k, tokens),
        )
        for k in range(ROWS)
    ]
    return put_message(group, first)


class Producer:
    """One client that puts until stopped, then waits until every put is acknowledged."""

    def __init__(self, address: str, name: str, ledger: int, *, pause: float, tokens: int) -> None:
        self.client = BufferClient(address, role="searcher", name=name)
        self._ledger = ledger
        self._pause = pause
        self._tokens = tokens
        self._sequence = 0
        self._work: list[messages.Visit] = []
        self._lease_request: int | None = None
        # The lease of each pending put, by request id.
        self._puts: dict[int, int] = {}

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._request_work()
            if self._work and len(self._puts) < _IN_FLIGHT:
                visit = self._work.pop()
                message, frames = put_of(self.client.sender, self._sequence, visit, self._tokens)
                self._sequence += ROWS
                self._puts[self.client.post(message, frames)] = visit.lease
            self._receive(self._pause)
        while self._puts:
            self._receive(0.2)
        self.client.close()

    def _request_work(self) -> None:
        if not self._work and not self.client.is_pending(self._lease_request):
            held = list(self._puts.values())
            message = messages.LeasePrompts(want=16, held=held, weights_version=0, wait_seconds=0.0)
            self._lease_request = self.client.post(message)

    def _receive(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            for reply in self.client.poll(max(0.0, deadline - time.monotonic())):
                self._handle(reply)
            if time.monotonic() >= deadline:
                return

    def _handle(self, reply) -> None:
        message = reply.message
        if isinstance(message, messages.Leases):
            self._work += message.visits
        elif isinstance(message, messages.PutAck):
            line = f"{self.client.sender} {message.first_sequence} {ROWS} {message.stored} {message.duplicates}\n"
            os.write(self._ledger, line.encode())
            del self._puts[reply.header.id]
        else:
            raise SystemExit(f"{self.client.sender} received {message}")


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
