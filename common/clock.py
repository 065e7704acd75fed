"""The one place that reads time, so that tests can pass a clock of their own."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall-clock time for records, monotonic time for deadlines; both in seconds."""

    def wall(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The clock of the machine."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self.now += seconds
