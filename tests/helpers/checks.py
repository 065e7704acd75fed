"""Small checks that many tests share: a value is present, a condition becomes true, a database says so."""

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
# Limit of a wait for what takes seconds on a machine with nothing else to do: CI machines are slow and shared.
PATIENCE_SECONDS = 300.0


def not_none(value: T | None) -> T:
    """Return a value that the test expects to be there."""
    assert value is not None
    return value


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS, what: str = "the condition") -> None:
    """Poll a condition until it is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not true within {seconds} s"
        # Many conditions open a database, and the processes that are waited for need the processor.
        time.sleep(0.03)


def rows_in(database: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query of a database, which a buffer may be writing to."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        return connection.execute(sql, values).fetchall()


def steps_trained(database: Path) -> int:
    """Return the number of trained steps, 0 as long as there is no database."""
    try:
        return int(rows_in(database, "SELECT COUNT(trained_at) FROM batches")[0][0])
    except sqlite3.OperationalError:
        return 0
