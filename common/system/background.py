"""A background thread with one life cycle, for every thread that tba starts, and the pauses between tries."""

import threading
from collections.abc import Callable

from tba.common.errors import TbaError
from tba.common.log import get_logger

log = get_logger(__name__)


class Background:
    """A daemon thread that runs `work` once.

        start() ──► work() runs ──► it returns, or raises ──► stop() joins, check() raises the failure

    `work` takes no argument. A loop polls `stopping` or waits on it; a thread that blocks in a queue or a socket
    instead is woken by `wake`, which `stop` calls once after `stopping` is set. A failure is kept: the owner calls
    `check` to raise it. One that is a bug, and not a TbaError, is also logged immediately, with its traceback.
    """

    def __init__(self, name: str, work: Callable[[], None], *, wake: Callable[[], None] | None = None) -> None:
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self._name = name
        self._work = work
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def running(self) -> bool:
        """Whether the thread has been started and has not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if it was started before."""
        self._thread.start()

    def stop(self, timeout_seconds: float | None = None) -> bool:
        """Ask the thread to end and join it. Returns False if it still runs after the timeout. May be called twice."""
        if not self.stopping.is_set():
            self.stopping.set()
            if self._wake is not None:
                self._wake()
        self.join(timeout_seconds)
        return not self.running

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait until `work` has returned, without asking it to. Returns at once if the thread was never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def check(self) -> None:
        """Raise the exception that ended the thread, if one did."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            self._work()
        # KeyboardInterrupt too: a thread that ends unnoticed is worse than an exception raised in another one.
        except BaseException as error:
            self.failure = error
            if not isinstance(error, TbaError):
                log.exception("background thread failed", thread=self._name)


def backoff(failures: int, first_seconds: float, max_seconds: float) -> float:
    """Return the seconds to wait after a number of failures in a row: `first_seconds`, doubled after each."""
    # 60 doublings exceed any maximum; more would overflow a float.
    doublings = min(max(failures - 1, 0), 60)
    return min(first_seconds * 2.0**doublings, max_seconds)
