"""The application: addresses, errors, and the files that pages load."""

from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tba.buffer.tools.query import limit_memory
from tba.common.errors import StorageError, TbaError, UsageError
from tba.common.terminal import note
from tba.ui.pages import compare, prompts, run, sql, steps, trajectories
from tba.ui.runs import find_runs
from tba.ui.security import Guard
from tba.ui.site import FOLDER, LARGEST_NUMBER, Site, make_environment, site_of

# The status of a database that is no buffer, or whose values are malformed.
_UNREADABLE = 503


class _RowConvertor(IntegerConvertor):
    """A number in an address. Python refuses to read one of thousands of digits, and SQLite has 64 bits."""

    regex = "[0-9]{1,100}"

    def convert(self, value: str) -> int:
        return min(int(value), LARGEST_NUMBER)


register_url_convertor("row", _RowConvertor())


def make_app(paths: Sequence[Path], *, token: str | None = None, report: Callable[[str], None] = note) -> Starlette:
    """Return the application over runs; `report` receives what is left out. Raises UsageError or StorageError."""
    site = Site(runs={run.key: run for run in find_runs(paths, report)}, environment=make_environment())
    limit_memory(next(iter(site.runs.values())).database)
    routes = [
        Route("/", home),
        Route("/r/{run}", run.page, name="run"),
        Route("/r/{run}/live", run.live),
        Route("/r/{run}/charts.json", run.charts),
        Route("/r/{run}/config", run.config),
        Route("/r/{run}/steps", steps.listing),
        Route("/r/{run}/steps/{step:row}", steps.page),
        Route("/r/{run}/prompts", prompts.listing),
        Route("/r/{run}/prompts/{prompt:row}", prompts.page),
        Route("/r/{run}/trajectories", trajectories.listing),
        Route("/r/{run}/trajectories/{trajectory:row}", trajectories.page),
        Route("/r/{run}/compare", compare.page),
        Route("/r/{run}/held-out", prompts.held_out),
        Route("/r/{run}/sql", sql.page),
        Route("/r/{run}/sql.csv", sql.csv_file),
        Mount("/static", StaticFiles(directory=FOLDER / "static")),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={HTTPException: failed, TbaError: failed},
    )
    app.state.site = site
    return app


def home(request: Request) -> Response:
    """List the runs, those with the newest step first. A single run has no list. Several marked ones are compared."""
    site = site_of(request)
    if marked := request.query_params.getlist("b"):
        return RedirectResponse(f"/r/{quote(marked[0])}/compare?{urlencode({'b': marked[1:]}, doseq=True)}", 307)
    if len(site.runs) == 1:
        return RedirectResponse(f"/r/{next(iter(site.runs))}", 307)
    rows = []
    for one in site.runs.values():
        try:
            with one.rows() as found:
                rows.append({"run": one, **run.describe(one, found)})
        except StorageError as error:
            # It hides no other run.
            nothing = dict.fromkeys(("trained_at", "reward", "steps_done", "steps", "held_out", "objective", "model"))
            nothing |= {"totals": dict.fromkeys(("trajectories", "errors")), "about": {"created_at": 0}}
            rows.append({"run": one, "state": "unreadable", "why": str(error), **nothing})
    rows.sort(key=lambda row: row["trained_at"] or row["about"]["created_at"], reverse=True)
    return site.page("runs.html", rows=rows)


def failed(request: Request, error: Exception) -> Response:
    """Show an error of an address, of a filter, or of the database."""
    status = 400 if isinstance(error, UsageError) else _UNREADABLE
    status, sentence = (error.status_code, error.detail) if isinstance(error, HTTPException) else (status, str(error))
    # Keep the navigation of the run.
    run = site_of(request).runs.get(request.path_params.get("run", ""))
    known = {"run": run} if run else {}
    title = f"Run {run.name} cannot be read" if run and status == _UNREADABLE else f"Error {status}"
    return site_of(request).page("error.html", http_status=status, title=title, sentence=sentence, **known)
