"""Run one SELECT of another process or a browser: its time, rows, bytes and memory are limited."""

import itertools
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader
from tba.buffer.tools.query import reading_only
from tba.common.errors import UsageError
from tba.common.quantity import quantity
from tba.common.wire.query_messages import MAX_QUERY_BYTES, QueryResult

_HEAP_BYTES = 256 << 20
_VALUE_BYTES = 4 << 20
# A pattern such as %a%a%a... takes time proportional to a power of the text, without a chance to interrupt it.
_PATTERN_BYTES = 100
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: _VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: _PATTERN_BYTES,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# Of a value on the wire, in addition to the bytes of a text or a blob.
_VALUE_HEADER_BYTES = 9


def _replace(text: str, old: str, new: str) -> str:
    if old and len(text) + text.count(old) * (len(new) - len(old)) > _VALUE_BYTES:
        # SQLite's "string or blob too big".
        raise OverflowError
    # Python would insert between all characters.
    return text.replace(old, new) if old else text


def _outside(text: Iterable[str], characters: str) -> int:
    """Return how many characters at the start of a text are among others. `str.strip` looks at all others for each."""
    among = frozenset(characters)
    return sum(1 for _ in itertools.takewhile(among.__contains__, text))


def _trim_left(text: str, characters: str) -> str:
    return text[_outside(text, characters) :]


def _trim_right(text: str, characters: str) -> str:
    return text[: len(text) - _outside(reversed(text), characters)]


# SQLite's own take time proportional to the product of the lengths, without a chance to interrupt them.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "trim": lambda text, characters: _trim_left(_trim_right(text, characters), characters),
    "ltrim": _trim_left,
    "rtrim": _trim_right,
    "instr": lambda text, part: text.find(part) + 1,
    "replace": _replace,
}
# They take time proportional to the square of the number of keys, and have no substitute.
_DENIED = frozenset({"json_patch", "jsonb_patch"})


def _of_texts(function: Callable[..., Any], deadline: float) -> Callable[..., Any]:
    """Return the SQL function for a function of texts: NULL for NULL, and numbers and blobs count as their text."""

    def call(*values: Any) -> Any:
        # Many calls fit between two of SQLite's own looks at the time.
        if time.monotonic() > deadline:
            raise TimeoutError
        if None in values:
            return None
        return function(
            *(value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values)
        )

    return call


def limit_memory(path: Path) -> None:
    """Limit the memory of SQLite in this process. Raises UsageError or StorageError if the file is not a buffer."""
    with open_reader(path) as connection:
        connection.execute(f"PRAGMA hard_heap_limit = {_HEAP_BYTES}")


def query_limited(path: Path, sql: str, *, rows: int, seconds: float) -> QueryResult:
    """Return the first rows of one statement that reads; `cut` of the result is a sentence if there are more.

    Raises UsageError for a wrong statement, one that would write, or one that takes longer.
    """
    found: list[list[Any]] = []
    size, cut = 0, ""
    with open_reader(path) as connection:
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        # A sort counts as memory: on the disk it would take space from the buffer.
        connection.execute("PRAGMA temp_store = MEMORY")
        with reading_only(connection, seconds=seconds, denied=_DENIED):
            # Not before that of `reading_only`, which tells a function that is out of time from one that fails.
            deadline = time.monotonic() + seconds
            for name, function in _FUNCTIONS.items():
                count = 3 if name == "replace" else 2
                connection.create_function(name, count, _of_texts(function, deadline), deterministic=True)
            cursor = connection.execute(sql)
            if cursor.description is None:
                raise UsageError("the statement returns no rows: a query is one SELECT")
            headings = [column[0][:200] or "?" for column in cursor.description]
            for row in cursor:
                size += sum(map(_wire_bytes, row))
                if len(found) == rows:
                    cut = f"first {quantity(len(found), 'row')} only"
                elif size > MAX_QUERY_BYTES:
                    cut = f"first {quantity(len(found), 'row')} only: a reply has at most {MAX_QUERY_BYTES >> 20} MiB"
                if cut:
                    break
                found.append(list(row))
    return QueryResult(headings=headings, rows=found, cut=cut)


def _wire_bytes(value: Any) -> int:
    content = value.encode() if isinstance(value, str) else value if isinstance(value, bytes) else b""
    return _VALUE_HEADER_BYTES + len(content)
