"""SQL over the database of a run: one statement that reads, with limits on its time, rows and memory."""

import csv
import io
import threading

from starlette.requests import Request
from starlette.responses import Response

from tba.buffer.tools.limited_query import query_limited
from tba.buffer.tools.printing import csv_value
from tba.common.errors import StorageError, UsageError
from tba.common.wire.query_messages import MAX_QUERY_ROWS, QueryResult
from tba.ui.site import run_of, site_of

SECONDS = 5.0
_TABLE_ROWS = 200
# One statement at a time: together they would take the memory and the cores of the run.
_turn = threading.Lock()
EXAMPLES = {
    "best answers": "SELECT id, reward, policy_version, text FROM trajectories WHERE run = '{run}'"
    " ORDER BY reward DESC LIMIT 20",
    "reward and staleness by step": "SELECT step, mean_reward, mean_staleness, max_staleness FROM staleness"
    " WHERE run = '{run}' ORDER BY step DESC LIMIT 100",
    "searchers": "SELECT sender, host, trajectories, errors, mean_reward FROM clients WHERE run = '{run}'",
    "newest errors": "SELECT id, prompt, searcher, error FROM trajectories WHERE run = '{run}' AND error IS NOT NULL"
    " ORDER BY received_at DESC LIMIT 20",
}


def page(request: Request) -> Response:
    """Show a statement and its result, or the error that it raised."""
    run, sql = run_of(request), request.query_params.get("sql", "").strip()
    result, sentence = None, ""
    if sql:
        try:
            result = _run(request, sql, _TABLE_ROWS)
        except (UsageError, StorageError, MemoryError) as error:
            sentence = str(error) or "the query needs too much memory"
    # A quote in the name of a run is doubled in SQL.
    name = run.name.replace("'", "''")
    examples = {title: text.replace("{run}", name) for title, text in EXAMPLES.items()}
    return site_of(request).page(
        "sql.html",
        http_status=400 if sentence else 200,
        run=run,
        sql=sql,
        result=result,
        sentence=sentence,
        examples=examples,
        seconds=SECONDS,
    )


def csv_file(request: Request) -> Response:
    """Return the result of a statement as CSV."""
    run = run_of(request)
    try:
        result = _run(request, request.query_params.get("sql", ""), MAX_QUERY_ROWS)
    except MemoryError as error:
        raise UsageError("the query needs too much memory") from error
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(result.headings)
    writer.writerows([csv_value(value) for value in row] for row in result.rows)
    headers = {"Content-Disposition": f'attachment; filename="{run.key}.csv"'}
    return Response(text.getvalue().encode(errors="replace"), media_type="text/csv; charset=utf-8", headers=headers)


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
