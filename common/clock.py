"""The clock, passed to what reads time, so that tests can replace it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall-clock time for records and monotonic time for deadlines, both in seconds."""

    def wall(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()
