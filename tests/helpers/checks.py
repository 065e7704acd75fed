"""Small checks that many tests share: a value is present, a condition becomes true."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# Limit of a wait for what takes seconds on a machine with nothing else to do: CI machines are slow and shared.
PATIENCE_SECONDS = 300.0


def not_none(value: T | None) -> T:
    """Return a value that the test expects to be there."""
    assert value is not None
    return value


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS, what: str = "the condition") -> None:
    """Poll a condition until it is true, less often the longer it takes; fail after `seconds`."""
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        assert waited < seconds, f"{what}: not true within {seconds} s"
        # Many conditions open a database, and the processes that are waited for need the processor.
        time.sleep(min(0.03 + waited / 30, 0.15))
