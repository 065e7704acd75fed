"""Any number of runs side by side: results, curves over each other, and the settings that differ."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tba.ui.pages.run import chosen_metrics, describe, settings
from tba.ui.runs import Run
from tba.ui.site import Site, run_named, run_of, site_of

# The metrics of single steps are noisy.
_LAST_STEPS = 10
# What rewards and accuracies depend on.
_TASK = tuple(f"task.{name}" for name in ["name", "train", "test", "options", "mixture", "phases", "truncated"])


def page(request: Request) -> Response:
    """Compare the run of the address with all whose keys are a `b`."""
    site, run, chosen = site_of(request), run_of(request), chosen_metrics(request)
    named = [key.strip() for key in request.query_params.getlist("b") if key.strip()]
    found = list({one.key: one for one in [run, *(run_named(site, key) for key in named)]}.values())
    sides = [_side(site, one, chosen) for one in found]
    keys = [{key["key"]: key["value"] for key in side["settings"]} for side in sides]
    rows = [(name, [side.get(name) for side in keys]) for name in _names(keys)]
    different = [(name, row) for name, row in rows if any(value != row[0] for value in row)]
    return site.page(
        "compare.html",
        run=run,
        others=[one.key for one in found[1:]],
        sides=sides if len(sides) > 1 else [],
        ends=_names([side["ends"] for side in sides]),
        last_steps=_LAST_STEPS,
        differences=different,
        other_task=[name for name, _ in different if name in _TASK],
        equal=len(rows) - len(different),
        names=sorted({name for side in sides for name in side["names"]}),
        chosen=chosen,
    )


def _names(parts: Sequence[dict[Any, Any]]) -> list[Any]:
    """Return the keys of all parts, in the order of their first appearance."""
    return list(dict.fromkeys(name for part in parts for name in part))


def _side(site: Site, run: Run, chosen: Sequence[str]) -> dict[str, Any]:
    """Return what the page says about one run: its description, the end of each curve, its settings."""
    metrics = site.metrics_of(run)
    with run.rows() as rows:
        known = describe(run, rows) | {"names": metrics.names(rows)}
        found = metrics.charts(rows, chosen)
        shown = settings(run.starts(rows))
    ends = {(chart.title, one.label): _end(one.values, dots=one.dots) for chart in found.charts for one in chart.series}
    started, trained = known["about"]["created_at"], known["trained_at"]
    seconds = trained - started if trained else None
    return {"run": run, "settings": shown, "ends": ends, "seconds": seconds, **known}


def _end(values: list[float | None], *, dots: bool) -> float | None:
    """Return the last value of a curve: of an evaluation as it is, of a metric the mean over the last steps."""
    known = [value for value in values if value is not None][-1 if dots else -_LAST_STEPS :]
    return sum(known) / len(known) if known else None
