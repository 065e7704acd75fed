"""A sink that can neither stop nor slow training."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from tba.common.log import get_logger

log = get_logger(__name__)

_WAITING = 1000  # records that wait for a slow sink, before newer ones are dropped
_FLUSH_SECONDS = 1.0
_CLOSE_SECONDS = 10.0


class Sink(Protocol):
    """Takes the numbers of one step after the other. May raise anything."""

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Guarded:
    """Runs a sink in a thread of its own. Its first failure is logged, all are counted in `lost`.

    A sink that cannot be opened takes nothing; one that failed on a record is given the next one all the same. What
    does not fit into the queue is lost.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self.name = name
        self.lost = 0
        self._opened = True  # until opening has failed
        self._open = open_sink
        self._queue: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(_WAITING)
        # A daemon: one that hangs must not keep the trainer from ending.
        self._thread = threading.Thread(target=self._work, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None:
        """Hand a step over, without waiting."""
        if self._opened:
            self._put(lambda sink: sink.record(step, time, numbers))
        else:
            self.lost += 1

    def flush(self) -> None:
        """Have the sink write what it holds; waits for it a moment at most."""
        done = threading.Event()

        def flush(sink: Sink) -> None:
            try:
                sink.flush()
            finally:
                done.set()

        if self._opened and self._thread.is_alive() and self._put(flush):
            done.wait(_FLUSH_SECONDS)

    def close(self) -> None:
        """Let the sink finish what is in its queue, within a time limit."""
        if self._opened and self._put(None):
            self._thread.join(_CLOSE_SECONDS)
        if self.lost or self._thread.is_alive():
            log.warning("a metrics sink lost steps or did not end in time", sink=self.name, lost=self.lost)

    def _put(self, job: Callable[[Sink], None] | None) -> bool:
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self._failed("its queue is full")
            return False
        return True

    def _work(self) -> None:
        try:
            sink = self._open()
        except Exception as error:  # noqa: BLE001 - whatever a sink's library raises: logged and counted
            self._opened = False
            self._failed(f"it cannot be opened: {error}")
            self.lost += self._queue.qsize()
            return
        while (job := self._queue.get()) is not None:
            self._attempt(job, sink)
        self._attempt(lambda opened: opened.close(), sink)

    def _attempt(self, job: Callable[[Sink], None], sink: Sink) -> None:
        try:
            job(sink)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, reason: str) -> None:
        if not self.lost:
            log.warning("a metrics sink failed; training goes on, metrics.jsonl has all", sink=self.name, reason=reason)
        self.lost += 1
