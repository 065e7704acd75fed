"""SQL over the database of a run: one statement that reads, with limits on its time, rows and memory."""

import csv
import io
import threading
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tba.buffer.tools.printing import csv_value
from tba.buffer.tools.query import query_limited
from tba.buffer.tools.query_process import MAX_QUERY_ROWS, QueryResult
from tba.common.errors import StorageError, UsageError
from tba.ui import queries
from tba.ui.site import run_of, site_of

SECONDS = 5.0
_TABLE_ROWS = 200
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
# One statement at a time: together they would take the memory and the cores of the run.
_turn = threading.Lock()


def page(request: Request) -> Response:
    """Show a statement and its result, or the error that it raised."""
    run = run_of(request)
    built_in, own = queries.built_in(run), queries.own(run)
    sql, name = _asked(request, {**built_in, **own})
    result, sentence = None, ""
    if sql:
        try:
            result = _run(request, sql, _TABLE_ROWS)
        except (UsageError, StorageError, MemoryError) as error:
            sentence = str(error) or "the query needs too much memory"
    return site_of(request).page(
        "sql.html",
        http_status=400 if sentence else 200,
        run=run,
        sql=sql,
        result=result,
        sentence=sentence,
        name=name,
        built_in=list(built_in),
        own=list(own),
        directory=run.directory / queries.DIRECTORY,
        seconds=SECONDS,
    )


def csv_file(request: Request) -> Response:
    """Return the result of a statement as CSV."""
    run = run_of(request)
    try:
        sql, _ = _asked(request, {**queries.built_in(run), **queries.own(run)})
        result = _run(request, sql, MAX_QUERY_ROWS)
    except MemoryError as error:
        raise UsageError("the query needs too much memory") from error
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_cell(value) for value in row] for row in [result.headings, *result.rows])
    headers = {"Content-Disposition": f'attachment; filename="{run.key}.csv"'}
    return Response(text.getvalue().encode(errors="replace"), media_type="text/csv; charset=utf-8", headers=headers)


def _cell(value: Any) -> Any:
    """Return a value for CSV: a text that a spreadsheet would run as a formula begins with an apostrophe."""
    if not isinstance(value, str) or not value.startswith(_FORMULA_STARTS):
        return csv_value(value)
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _asked(request: Request, saved: Mapping[str, str]) -> tuple[str, str]:
    """Return the statement that the address holds or names, and the name of the saved query, "" for none."""
    name = request.query_params.get("query", "")
    if name and name not in saved:
        raise HTTPException(404, f"no query is called {name[:100]}: there are {', '.join(saved)}")
    return (saved[name], name) if name else (request.query_params.get("sql", "").strip(), "")


def _run(request: Request, sql: str, rows: int) -> QueryResult:
    # A page of another site must not have the browser of a reader run expensive statements.
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise UsageError("the statement comes from another site: read it, and run it here")
    if not _turn.acquire(timeout=SECONDS):
        raise UsageError("another query is running: try again in a few seconds")
    try:
        return query_limited(run_of(request).database, sql, rows=rows, seconds=SECONDS)
    finally:
        _turn.release()
