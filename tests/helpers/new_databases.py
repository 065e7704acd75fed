"""Databases to begin with: a copy of a new one, since making one takes longer than most tests."""

import tempfile
from functools import cache
from pathlib import Path

from tba.buffer.store.store import Store


def new_database(path: Path) -> Path:
    """Copy an empty database to `path`, unless there is a file. Returns `path`."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_empty())
    return path


@cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "buffer.sqlite")
        Store(path, durability="process").close()
        return path.read_bytes()
