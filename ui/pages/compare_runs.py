"""Two runs: their curves over each other, their results, and the settings that differ."""

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tba.ui.charts import Chart, overlay
from tba.ui.pages.run import describe, settings
from tba.ui.runs import Run
from tba.ui.site import Site, run_named, run_of, site_of

# The metrics of single steps are noisy.
_LAST_STEPS = 10


def page(request: Request) -> Response:
    """Compare the run of the address with the run whose key is `b`; without it, ask for one."""
    run, site = run_of(request), site_of(request)
    other = _other(request)
    values: dict[str, Any] = {"sides": []}
    if other is not None:
        sides = [_side(site, one) for one in (run, other)]
        keys = [{key["key"]: key["value"] for key in side["settings"]} for side in sides]
        names = list(dict.fromkeys([*keys[0], *keys[1]]))
        differences = [(name, *(side.get(name) for side in keys)) for name in names]
        different = [row for row in differences if row[1] != row[2]]
        values = {
            "sides": sides,
            "ends": list(dict.fromkeys([*sides[0]["ends"], *sides[1]["ends"]])),
            "last_steps": _LAST_STEPS,
            "differences": different,
            "equal": len(names) - len(different),
        }
    return site.page("compare_runs.html", run=run, other=other, kind="runs", given=["", ""], **values)


def charts(request: Request) -> Response:
    """Return the charts of both runs, each over the other, as JSON."""
    run, site, other = run_of(request), site_of(request), _other(request)
    return JSONResponse(
        [asdict(chart) for chart in overlay([(one.key, _charts(site, one)) for one in (run, other or run)])]
    )


def _other(request: Request) -> Run | None:
    key = request.query_params.get("b", "").strip()
    return run_named(site_of(request), key) if key else None


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
