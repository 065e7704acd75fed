"""A watchdog for the loop of a process: the loop reports each round, and a loop that stops coming round is ended.

    loop      beat ──► WATCHDOG=1 to systemd, at most once a second
    thread    no beat for too long ──► stacks of all threads to standard error, exit code 75
    timer     the thread has not run for as long ──► the same stacks, exit code 1

The loop itself must call `beat`. A thread of its own would go on reporting while the loop hangs.

A call into C that does not return and holds the interpreter's lock stops the thread too. The timer is faulthandler's,
which needs no lock; it always exits with 1.
"""

import faulthandler
import os
import time
from typing import NoReturn

from tba.common.errors import EXIT_HUNG
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.system.process import kill_descendants, notify_systemd

log = get_logger(__name__)

_NOTIFY_SECONDS = 1.0
_POLL_SECONDS = 5.0
_POLLS_PER_LIMIT = 10
# How many times longer a round may take while kernels may be compiled.
WARMUP_TIMES = 4


class Watchdog:
    """Reports the rounds of one loop to systemd, and ends the process when there is none for `limit_seconds`.

    With a limit of 0 it only reports. A process has one timer, so only one of its watchdogs may have a limit.
    """

    def __init__(self, *, limit_seconds: float = 0.0, setting: str = "") -> None:
        """`setting` is the key of the limit, for the log."""
        self._limit = limit_seconds
        self._setting = setting
        self._beats = 0
        self._warm = True
        self._notified_at = 0.0
        self._thread = Background("watchdog", self._watch)

    def start(self) -> None:
        if self._limit:
            # Here, not in the thread: a loop that keeps the lock in its first round would not let the thread set it.
            self._set_timer(self._limit * WARMUP_TIMES)
            self._thread.start()

    def beat(self, *, warm: bool = True) -> None:
        """Reset the timer: one iteration is done. Until the loop is `warm`, its limit is four times as long."""
        self._beats += 1
        self._warm = warm
        now = time.monotonic()
        if now - self._notified_at >= _NOTIFY_SECONDS:
            self._notified_at = now
            notify_systemd("WATCHDOG=1")

    def stop(self) -> None:
        self._thread.stop()

    def _watch(self) -> None:
        interval = min(self._limit / _POLLS_PER_LIMIT, _POLL_SECONDS)
        # Counted in polls of this thread, so that the time for which a machine slept does not count.
        seen, polls = self._beats, 0
        while not self._thread.stopping.wait(interval):
            seen, polls = self._beats, polls + 1 if self._beats == seen else 0
            limit = self._limit if self._warm else self._limit * WARMUP_TIMES
            if polls * interval >= limit:
                self._exit(polls * interval)
            self._set_timer(limit)
        faulthandler.cancel_dump_traceback_later()

    def _set_timer(self, seconds: float) -> None:
        # Standard error by its number: the object may have been replaced by one without a file.
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    def _exit(self, seconds: float) -> NoReturn:
        log.error(
            f"no step for {seconds:.0f} s: the stacks of all threads follow, and this process exits",
            exit_code=EXIT_HUNG,
            limit=self._setting,
        )
        faulthandler.dump_traceback()
        # Without a supervisor nothing else ends them.
        kill_descendants()
        # The main thread hangs, so nothing else ends the process.
        os._exit(EXIT_HUNG)
