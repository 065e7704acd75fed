"""SQL over the database of a run: one statement that reads, with limits on its time, rows and memory.

Saved queries are those of tba, and `queries/NAME.sql` in the directory of a run. Each has a permanent address,
`/r/RUN/sql?query=NAME`. In its text, `{run}` stands for the name of the run.
"""

import csv
import io
import re
import stat
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tba.buffer.tools.printing import csv_value
from tba.buffer.tools.query import query_limited
from tba.buffer.tools.query_process import MAX_QUERY_ROWS, QueryResult
from tba.common.errors import StorageError, UsageError
from tba.ui.formats import column
from tba.ui.runs import Run
from tba.ui.site import run_of, site_of

SECONDS = 5.0
_TABLE_ROWS = 200
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
# One statement at a time: together they would take the memory and the cores of the run.
_turn = threading.Lock()
DIRECTORY = "queries"
_MOST_FILES = 200
_MOST_BYTES = 64 << 10
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,98}\.sql")

_SCHEMA = """SELECT s.name, GROUP_CONCAT(c.name, ', ') AS columns FROM sqlite_schema s JOIN pragma_table_info(s.name) c
    WHERE s.type IN ('view', 'table') GROUP BY s.name ORDER BY s.type DESC, s.name"""

_BUILT_IN = {
    "best responses": """SELECT id, reward, policy_version, prompt_text, answer, text
FROM trajectories WHERE run = '{run}' ORDER BY reward DESC LIMIT 20""",
    "held-out prompts with a wrong response": """SELECT version, prompt_text, answer, response, reward, error
FROM held_out h WHERE evaluation = (SELECT evaluation FROM held_out
    WHERE run = '{run}' ORDER BY step DESC, evaluated_at DESC LIMIT 1) AND NOT passed ORDER BY h.prompt""",
    "worst responses of late": """SELECT t.id, t.reward, t.policy_version, t.prompt_text, t.answer, t.text
FROM (SELECT id FROM trajectories WHERE run = '{run}' ORDER BY received_at DESC LIMIT 2000) n
JOIN trajectories t ON t.id = n.id WHERE t.error IS NULL ORDER BY t.reward, t.id DESC LIMIT 20""",
    "reward and staleness by step": """SELECT step, mean_reward, mean_staleness, max_staleness, mean_age_seconds
FROM staleness WHERE run = '{run}' ORDER BY step DESC LIMIT 100""",
    "searchers": """SELECT sender, host, trajectories, errors, mean_reward
FROM clients WHERE run = '{run}' AND role = 'searcher'""",
    "most frequent errors": """SELECT error, COUNT(*) AS trajectories, MAX(id) AS newest
FROM (SELECT id, error FROM trajectories WHERE run = '{run}' ORDER BY received_at DESC LIMIT 20000)
WHERE error IS NOT NULL GROUP BY error ORDER BY trajectories DESC LIMIT 20""",
    "responses used most often": """SELECT c.trajectory, COUNT(*) AS slots, MIN(c.step) AS first_step,
    MAX(c.step) AS last_step, t.reward, t.text
FROM (SELECT trajectory, step FROM consumption WHERE run = '{run}' ORDER BY step DESC LIMIT 20000) c
JOIN trajectories t ON t.id = c.trajectory GROUP BY c.trajectory ORDER BY slots DESC LIMIT 20""",
    "groups without variance of the reward": """SELECT prompt, epoch, visit, trajectories, mean_reward, policy_versions
FROM groups WHERE run = '{run}' AND done_at IS NOT NULL AND reward_variance = 0 LIMIT 100""",
    "waste by step": "SELECT * FROM waste WHERE run = '{run}' ORDER BY step DESC LIMIT 50",
    "use by length of the response": "SELECT * FROM lengths WHERE run = '{run}' ORDER BY least_tokens",
    "evaluations": """SELECT step, version, held_out_prompts, accuracy, accuracy_low, accuracy_high, reward, kl,
    not_measured FROM evaluations WHERE run = '{run}' ORDER BY step""",
}


def page(request: Request) -> Response:
    run = run_of(request)
    saved = queries(run)
    with run.rows() as rows:
        schema = rows.all(_SCHEMA)
    sql, name = _asked(request, saved)
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
        numbers=_numbers(result.rows) if result is not None else {},
        sentence=sentence,
        name=name,
        built_in=list(_BUILT_IN),
        own=[name for name in saved if name not in _BUILT_IN],
        schema=schema,
        directory=run.directory / DIRECTORY,
        seconds=SECONDS,
    )


def _numbers(rows: Sequence[Sequence[Any]]) -> dict[int, list[str]]:
    """Return the columns of numbers by their place, the others of a column with a fraction with as many decimals."""
    found = {}
    for place, values in enumerate(zip(*rows, strict=True)):
        kinds = {type(value) for value in values} - {type(None)}
        if kinds and kinds <= {int, float}:
            shown = column(rows, place) if float in kinds else [str(value) for value in values]
            found[place] = [text.replace(",", "") for text in shown]
    return found


def csv_file(request: Request) -> Response:
    run = run_of(request)
    try:
        sql, _ = _asked(request, queries(run))
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


def queries(run: Run) -> dict[str, str]:
    """Return the statements of tba, then those of the user by the names of their files.

    Only regular files are read, since links could leak others.
    """
    folder = run.directory / DIRECTORY
    found = [] if folder.is_symlink() else sorted(folder.glob("*.sql"))[:_MOST_FILES]
    own = {path.stem: text for path in found if _FILE_NAME.fullmatch(path.name) and (text := _text(path)) is not None}
    # A quote in the name of a run is doubled in SQL.
    name = run.name.replace("'", "''")
    return {title: text.replace("{run}", name) for title, text in (_BUILT_IN | own).items()}


def _text(path: Path) -> str | None:
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
            return None
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
