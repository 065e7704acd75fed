"""SQL that people ask of a buffer file: one statement that only reads, its rows one by one."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.buffer.reader import open_reader
from tba.common.errors import UsageError

# A read-only connection could still attach, and so create, another file.
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_ALLOWED_PRAGMAS = frozenset({"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo"})
_DENIED_FUNCTIONS = frozenset({"load_extension", "writefile", "edit"})
_PROGRESS_INSTRUCTIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement gives: headings, and rows that are read as they are taken."""

    headings: list[str]
    rows: Iterator[tuple[Any, ...]]


@contextlib.contextmanager
def query(path: Path, sql: str, parameters: Sequence[Any] = ()) -> Iterator[Result]:
    """Run one reading statement. Raises UsageError with what SQLite says of it, or if it would write."""
    with open_reader(path) as connection, reading_only(connection):
        cursor = connection.execute(sql, parameters)
        if cursor.description is None:
            raise UsageError("the statement gives no rows: `tba buffer query` takes one SELECT")
        yield Result([column[0] for column in cursor.description], iter(cursor))


@contextlib.contextmanager
def reading_only(connection: sqlite3.Connection) -> Iterator[None]:
    """Let people's SQL read and nothing else. Raises UsageError with one sentence for what it gets wrong."""
    refused: list[str] = []
    connection.set_authorizer(_Authorizer(refused))
    # Between callbacks Python sees Ctrl-C, also in a statement that runs for minutes.
    connection.set_progress_handler(lambda: 0, _PROGRESS_INSTRUCTIONS)
    with _explained(refused):
        yield


class _Authorizer:
    """SQLite asks it for everything that a statement would do."""

    def __init__(self, refused: list[str]) -> None:
        self._refused = refused

    def __call__(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action in _ALLOWED and second not in _DENIED_FUNCTIONS:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA and first in _ALLOWED_PRAGMAS:
            return sqlite3.SQLITE_OK
        self._refused.append(first or second or "")
        return sqlite3.SQLITE_DENY


@contextlib.contextmanager
def _explained(refused: list[str]) -> Iterator[None]:
    try:
        yield
    except sqlite3.Warning as error:  # Python 3.11's word for several statements
        raise UsageError("one statement at a time") from error
    except sqlite3.DatabaseError as error:
        if refused or "readonly" in str(error):
            raise UsageError(
                "`tba buffer query` only reads: writing, ATTACH and most PRAGMAs are refused; to change a file, stop "
                "its server and use another SQLite client on a copy"
            ) from error
        if _code(error) == sqlite3.SQLITE_INTERRUPT:  # how SQLite hands on a Ctrl-C
            raise KeyboardInterrupt from error
        if _is_of_the_statement(error):
            raise UsageError(f"SQL: {error}{_hint(str(error))}") from error
        raise


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _is_of_the_statement(error: sqlite3.Error) -> bool:
    return _code(error) in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_RANGE)


def _hint(said: str) -> str:
    if said.startswith(("no such table", "no such column")):
        return ": docs/database.md lists the views (trajectories, groups, consumption, staleness, clients) and tables"
    return ""
