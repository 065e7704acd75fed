"""Databases to begin with: a copy of a new one, since migrations take longer than most tests."""

import tempfile
from functools import cache
from pathlib import Path

from tba.buffer.store.schema import schema_names
from tba.buffer.store.store import Store


def new_database(path: Path) -> Path:
    """Copy an empty database of the newest schema to `path`, unless there is a file. Returns `path`."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # A test may have registered a further migration.
        path.write_bytes(_empty(tuple(schema_names())))
    return path


@cache
def _empty(_schema: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "buffer.sqlite")
        Store(path, durability="process").close()
        return path.read_bytes()
