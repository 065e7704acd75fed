"""Two trajectories, two prompts, or any number of runs side by side."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tba.common.errors import UsageError
from tba.ui.charts import Chart, overlay
from tba.ui.pages.prompts import read_prompt
from tba.ui.pages.run import describe, settings
from tba.ui.pages.trajectories import read_trajectory
from tba.ui.runs import Run
from tba.ui.site import Site, is_number, run_named, run_of, site_of

# The metrics of single steps are noisy.
_LAST_STEPS = 10


def page(request: Request) -> Response:
    """Show two rows of `kind` (trajectories or prompts) with the ids `a` and `b`, or ask for them.

    With the kind runs, show the run of the address and all whose keys are a `b`.
    """
    run, kind = run_of(request), request.query_params.get("kind", "trajectories")
    if kind not in ("trajectories", "prompts", "runs"):
        raise UsageError(f"kind = {kind[:100]}: give trajectories, prompts or runs")
    values = _compared(request) if kind == "runs" else _rows(request, run, kind)
    return site_of(request).page("compare.html", run=run, kind=kind, **values)


def _rows(request: Request, run: Run, kind: str) -> dict[str, Any]:
    query = request.query_params
    given = [query.get(name, "").strip() for name in ("a", "b")]
    numbers = [int(text) for text in given if is_number(text)]
    if len(numbers) < len([text for text in given if text]):
        raise UsageError("a and b are ids: numbers, as the pages of trajectories and prompts show them")
    sides = []
    if len(numbers) == len(given):
        with run.rows() as rows:
            for number in numbers:
                one = read_prompt(rows, run, number) if kind == "prompts" else read_trajectory(run, number, query)
                sides.append({"id": number, **one})
    return {"given": given, "others": [], "sides": sides}


def _compared(request: Request) -> dict[str, Any]:
    """Return the results and the ends of the curves of all runs, and the settings that are not the same in all."""
    site, found = site_of(request), _runs(request)
    values: dict[str, Any] = {"given": ["", ""], "others": found[1:], "sides": []}
    if len(found) == 1:
        return values
    sides = [_side(site, one) for one in found]
    keys = [{key["key"]: key["value"] for key in side["settings"]} for side in sides]
    rows = [(name, [side.get(name) for side in keys]) for name in _names(keys)]
    different = [(name, row) for name, row in rows if any(value != row[0] for value in row)]
    return values | {
        "sides": sides,
        "ends": _names([side["ends"] for side in sides]),
        "last_steps": _LAST_STEPS,
        "differences": different,
        "equal": len(rows) - len(different),
    }


def charts(request: Request) -> Response:
    """Return the charts of the runs, each over the others, as JSON."""
    site = site_of(request)
    return JSONResponse([asdict(chart) for chart in overlay([(one.key, _charts(site, one)) for one in _runs(request)])])


def _runs(request: Request) -> list[Run]:
    """Return the run of the address and the others. Raises HTTPException for one that is not here."""
    named = [key.strip() for key in request.query_params.getlist("b") if key.strip()]
    found = [run_of(request), *(run_named(site_of(request), key) for key in named)]
    return list({run.key: run for run in found}.values())


def _names(parts: Sequence[dict[Any, Any]]) -> list[Any]:
    """Return the keys of all parts, in the order of their first appearance."""
    return list(dict.fromkeys(name for part in parts for name in part))


def _charts(site: Site, run: Run) -> list[Chart]:
    with run.rows() as rows:
        return site.metrics_of(run).charts(rows)


def _side(site: Site, run: Run) -> dict[str, Any]:
    """Return what the page says about one run: its description, the end of each curve, its settings."""
    with run.rows() as rows:
        known = describe(run, rows)
        found = site.metrics_of(run).charts(rows)
        sections = run.config(rows)
    ends = {(chart.title, one.label): _end(one.values, dots=one.dots) for chart in found for one in chart.series}
    started, trained = known["about"]["created_at"], known["trained_at"]
    return {
        "run": run,
        "settings": settings(sections),
        "ends": ends,
        "seconds": trained - started if trained else None,
        **known,
    }


def _end(values: list[float | None], *, dots: bool) -> float | None:
    """Return the last value of a curve: of an evaluation as it is, of a metric the mean over the last steps."""
    known = [value for value in values if value is not None][-1 if dots else -_LAST_STEPS :]
    return sum(known) / len(known) if known else None
