"""A query in a process of its own: its result, and its limits."""

import pytest

from tba.buffer.tools.query import query_limited
from tba.buffer.tools.query_process import MAX_QUERY_ROWS, QueryResult
from tba.common.errors import UsageError


def ask(path, sql: str, *, limit: int = 100, seconds: float = 30.0) -> QueryResult:
    return query_limited(path, sql, rows=limit, seconds=seconds)


def test_rows_of_every_type_come_back_as_they_are(filled):
    result = ask(filled, "SELECT 1 AS i, 0.5 AS r, 'ä' AS t, x'00ff' AS b, NULL AS n, 9e999 AS infinite")
    assert result.headings == ["i", "r", "t", "b", "n", "infinite"]
    assert result.rows == [[1, 0.5, "ä", b"\x00\xff", None, float("inf")]]
    assert ask(filled, "SELECT COUNT(*) FROM trajectories").rows == [[7]]


def test_bytes_of_a_result_have_a_limit(filled):
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100)"
    result = ask(filled, f"{numbers} SELECT hex(zeroblob(100000)) FROM n")
    assert 30 < len(result.rows) < 50
    assert "at most 8 MiB" in result.cut


MANY = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 10000)"


@pytest.mark.parametrize("row", ["replace(hex(zeroblob(50000)), '00', char(128512))", ", ".join(["''"] * 500)])
def test_a_result_can_be_read_whatever_its_values_are(row, filled):
    result = ask(filled, f"{MANY} SELECT {row} FROM n", limit=MAX_QUERY_ROWS)
    assert "at most 8 MiB" in result.cut


# Functions that SQLite does not interrupt, with time proportional to a power of the length of a text.
SLOW = {
    "rows": "COUNT(*) FROM endless",
    "instr": "instr(hex(zeroblob(999999)), hex(zeroblob(499999)) || '1')",
    "json_patch": "json_patch(j, j) FROM (SELECT json_group_object(value, 1) AS j FROM n)",
    "printf": ", ".join(["printf('%.*c', 500000000, 'x')"] * 12),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", SLOW.values(), ids=SLOW)
def test_a_function_that_looks_at_no_clock_is_ended_at_the_limit(filled, call):
    numbers = """WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n LIMIT 100000),
        endless(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM endless)"""
    with pytest.raises(UsageError, match=r"^the query takes longer than 0.2 s: read fewer rows$"):
        ask(filled, f"{numbers} SELECT {call}", seconds=0.2)


def test_a_query_that_crashes_sqlite_ends_no_other_process(filled):
    """SQLite up to 3.45 recurses for each step of a path, and a later one has a limit."""
    crash = "json_set('{}', '$.' || replace(hex(zeroblob(1000000)), '00', 'a.'), 1)"
    with pytest.raises(UsageError, match="ended SQLite with SIGSEGV: write it in another way|SQL: "):
        ask(filled, f"SELECT length({crash})")
    assert ask(filled, "SELECT 1").rows == [[1]]


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("PRAGMA hard_heap_limit = 0", "only reads"),
        ("SELECT zeroblob(1000000000)", "too big"),
        ("SELEC 1", "syntax error"),
    ],
)
def test_a_query_beyond_what_is_allowed_is_refused(sql, words, filled):
    with pytest.raises(UsageError, match=words):
        ask(filled, sql)
