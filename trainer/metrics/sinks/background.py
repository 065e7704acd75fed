"""A metrics sink in a thread of its own: it can neither stop training nor slow it down."""

import queue
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.trainer.metrics.answers import Answer

log = get_logger(__name__)

# Records queued for a slow sink; newer ones are dropped.
_MAX_QUEUED = 1000
_CLOSE_SECONDS = 10.0

_Record = tuple[int, float, dict[str, float], Sequence[Answer]]


class Sink(Protocol):
    """Receives the metrics of one step after another, and some of its answers. May raise anything."""

    def record(self, step: int, time: float, numbers: dict[str, float], answers: Sequence[Answer]) -> None: ...

    def close(self) -> None: ...


class BackgroundSink:
    """Runs a sink in a thread. Its first failure is logged, all are counted in `lost`.

    A sink that cannot be opened receives nothing. One that failed on a record receives the next one. Records that do
    not fit into the queue are lost.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self.name = name
        self.lost = 0
        # Until opening it has failed.
        self._opened = True
        self._open = open_sink
        self._queue: queue.Queue[_Record | None] = queue.Queue(_MAX_QUEUED)
        self._thread = Background(f"metrics-{name}", self._work)
        self._thread.start()

    def record(self, step: int, time: float, numbers: dict[str, float], answers: Sequence[Answer] = ()) -> None:
        """Queue the metrics of a step, without waiting."""
        if self._opened:
            self._put((step, time, numbers, answers))
        else:
            self.lost += 1

    def close(self) -> None:
        """Let the sink process its queue, within ten seconds."""
        if self._opened and self._put(None):
            self._thread.join(_CLOSE_SECONDS)
        if self.lost or self._thread.running:
            log.warning("a metrics sink lost steps or did not end in time", sink=self.name, lost=self.lost)

    def _put(self, record: _Record | None) -> bool:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._failed("its queue is full")
            return False
        return True

    def _work(self) -> None:
        try:
            sink = self._open()
        # A sink's library may raise anything. It is logged and counted.
        except Exception as error:  # noqa: BLE001
            self._opened = False
            self._failed(f"it cannot be opened: {error}")
            self.lost += self._queue.qsize()
            return
        while (record := self._queue.get()) is not None:
            self._attempt(sink.record, *record)
        self._attempt(sink.close)

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, reason: str) -> None:
        if not self.lost:
            log.warning(
                "a metrics sink failed; training continues, metrics.jsonl has all", sink=self.name, reason=reason
            )
        self.lost += 1
