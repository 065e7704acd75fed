"""What every page uses: the runs, the templates, and the request's run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse

from tba.common.errors import UsageError
from tba.ui.charts import Metrics
from tba.ui.formats import FILTERS, finalize
from tba.ui.runs import Run

FOLDER = Path(__file__).parent
# The largest number that is read from an address: SQLite's integers have 64 bits.
LARGEST_NUMBER = 10**18 - 1


@dataclass
class Site:
    """The runs by their keys, with the metrics that were read so far."""

    runs: dict[str, Run]
    environment: Environment = field(repr=False)
    metrics: dict[str, Metrics] = field(default_factory=dict)

    def page(self, template: str, *, http_status: int = 200, **values: Any) -> HTMLResponse:
        html = self.environment.get_template(template).render(runs=self.runs, **values)
        return HTMLResponse(html, http_status)

    def metrics_of(self, run: Run) -> Metrics:
        return self.metrics.setdefault(run.key, Metrics(run))


def make_environment() -> Environment:
    """Return the templates. Every value is escaped, and its unprintable characters are visible."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    return environment


def site_of(request: Request) -> Site:
    site: Site = request.app.state.site
    return site


def run_of(request: Request) -> Run:
    """Return the run that the address names. Raises HTTPException if there is none."""
    return run_named(site_of(request), request.path_params["run"])


def run_named(site: Site, key: str) -> Run:
    """Return the run with a key. Raises HTTPException if there is none."""
    if key not in site.runs:
        shown = ", ".join(list(site.runs)[:20])
        raise HTTPException(404, f"there is no run {key[:100]} here: this interface shows {shown}")
    return site.runs[key]


def is_number(text: str) -> bool:
    """Whether a text from an address is a number up to `LARGEST_NUMBER`."""
    return text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST_NUMBER))


def number_in(request: Request, name: str, default: int = 0) -> int:
    """Return a number from the address of a request. Raises UsageError if it is none."""
    text = request.query_params.get(name, str(default))
    if not is_number(text):
        raise UsageError(f"{name} = {text[:100]}: give a number")
    return int(text)


def missing(what: str) -> HTTPException:
    """Return the error of an address that names a row which does not exist."""
    return HTTPException(404, f"the database has no {what}")
