"""Programs that are measured alternately: each is a few processes, which are stopped while another program runs."""

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


class Program:
    """The process of an engine, counted in `counter`, and the servers that it needs, each with all its descendants."""

    def __init__(self, engine: Process, servers: Sequence[Process], counter: Counter, log: Path) -> None:
        self._engine = engine
        self._servers = servers
        self._counter = counter
        self._log = log

    def stop(self) -> None:
        """Stop all processes, the engine first: its servers then have no open request."""
        for process in (self._engine, *self._servers):
            for member in _family(process):
                # It may have just ended.
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.suspend()

    def resume(self) -> None:
        """Resume all processes, the engine last: the replies that it waits for have then arrived."""
        for process in (*self._servers, self._engine):
            for member in _family(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.resume()

    def run_until(self, tokens: float) -> None:
        """Wait until this many tokens have been generated since the start, then stop."""
        while self._counter.read().tokens < tokens:
            self._check()
            time.sleep(_POLL_SECONDS)
        self.stop()

    def run_for(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> Progress:
        """Return the progress within this period, which starts after one second; `meanwhile` is called at its start."""
        self.resume()
        time.sleep(_SETTLE_SECONDS)
        start, until = self._counter.read(), time.monotonic() + seconds
        if meanwhile:
            meanwhile()
        time.sleep(max(0.0, until - time.monotonic()))
        self._check()
        self.stop()
        return self._counter.read() - start

    def end(self) -> None:
        """Terminate the engine, and kill it if it does not end. The caller ends the servers that it started."""
        self.resume()
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
    """Yield the process, then its descendants; nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        yield root
        yield from root.children(recursive=True)
