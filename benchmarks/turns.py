"""Ways to generate that take turns: each a few processes, stopped while another way runs."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.counted import Counter, Progress

Process = subprocess.Popen[bytes]
_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 1.0
_TAIL_CHARACTERS = 3000


class Way:
    """An engine's process, counted in `counter`, and those that serve it. All that they start belongs to it."""

    def __init__(self, engine: Process, servers: Sequence[Process], counter: Counter, log: Path) -> None:
        self._engine = engine
        self._servers = servers
        self._counter = counter
        self._log = log

    def stop(self) -> None:
        """Stop all, the engine first: a server then has nothing more to answer."""
        for process in (self._engine, *self._servers):
            for member in _family(process):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    member.suspend()

    def go_on(self) -> None:
        """Let all run on, the engine last: the answers that it waits for are there when it looks."""
        for process in (*self._servers, self._engine):
            for member in _family(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.resume()

    def run_until(self, tokens: float) -> None:
        """From the start until so many are made; then it is stopped."""
        while self._counter.read().tokens < tokens:
            self._check()
            time.sleep(_POLL_SECONDS)
        self.stop()

    def turn(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> Progress:
        """What it does in so many seconds, after one that does not count; `meanwhile` is called as they begin."""
        self.go_on()
        time.sleep(_SETTLE_SECONDS)
        start, until = self._counter.read(), time.monotonic() + seconds
        if meanwhile:
            meanwhile()
        time.sleep(max(0.0, until - time.monotonic()))
        self._check()
        self.stop()
        return self._counter.read() - start

    def end(self) -> None:
        """The engine alone, killed if it does not stop: the servers are ended by who started them."""
        self.go_on()
        members = list(_family(self._engine))
        self._engine.terminate()
        try:
            self._engine.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            self._engine.wait()

    def _check(self) -> None:
        if (code := self._engine.poll()) is not None:
            raise RuntimeError(f"the engine's process ended with {code}: {self._log.read_text()[-_TAIL_CHARACTERS:]}")


def _family(process: Process) -> Iterator[psutil.Process]:
    """The process, then all below it; nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        yield root
        yield from root.children(recursive=True)
