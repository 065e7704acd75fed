"""What training does not use: tokens generated against tokens trained on by length, flat groups, time to training."""

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tba.buffer.tools.query import PageRows
from tba.ui.charts import Chart, Series
from tba.ui.runs import Run
from tba.ui.site import run_of, site_of
from tba.ui.svg import paired_bars

# The view `waste` looks up every slot of a step: these are enough for a curve.
_STEPS = 60
_CLASSES = "SELECT * FROM lengths WHERE run = ? ORDER BY least_tokens"
_SUMMED = ("trajectories", "errors", "never_trained", "response_tokens", "used_tokens", "trained_tokens")
_SPREAD = f"""SELECT step FROM (SELECT step, ROW_NUMBER() OVER (ORDER BY step) - 1 AS place, COUNT(*) OVER () AS steps
    FROM batches WHERE run = ? AND trained_at IS NOT NULL)
    WHERE place % MAX(1, steps / {_STEPS}) = 0 ORDER BY step LIMIT 2 * {_STEPS}"""  # noqa: S608


def page(request: Request) -> Response:
    """Show the classes of length and the totals."""
    run = run_of(request)
    with run.rows() as rows:
        classes = rows.all(_CLASSES, run.name)
        generated = rows.value("SELECT SUM(trajectories) FROM clients WHERE run = ?", run.name)
    totals = {name: sum(one[name] or 0 for one in classes) for name in _SUMMED}
    for one in classes:
        one["generated_share"] = _share(one["response_tokens"], totals["response_tokens"])
        one["trained_share"] = _share(one["trained_tokens"], totals["trained_tokens"])
    bars = [
        (str(one["least_tokens"]), 100 * (one["generated_share"] or 0), 100 * (one["trained_share"] or 0))
        for one in classes
    ]
    return site_of(request).page(
        "waste.html",
        run=run,
        classes=classes,
        totals=totals,
        generated=generated or 0,
        picture=paired_bars(bars, "shares of tokens by length of the response") if classes else None,
    )


def charts(request: Request) -> Response:
    """Return the charts over steps as JSON."""
    run = run_of(request)
    with run.rows() as rows:
        return JSONResponse([asdict(chart) for chart in _charts(rows, run)])


def _charts(rows: PageRows, run: Run) -> list[Chart]:
    steps = [row["step"] for row in rows.all(_SPREAD, run.id)]
    marks = ", ".join("?" * len(steps))
    known: list[dict[str, Any]] = rows.all(
        f"SELECT * FROM waste WHERE run = ? AND step IN ({marks}) ORDER BY step",  # noqa: S608
        run.name,
        *steps,
    )
    if not known:
        return []
    flat = Series("with equal rewards", [_share(row["flat_groups"], row["groups"]) for row in known])
    waits = Series("generation to training", [row["mean_seconds_to_training"] for row in known])
    return [
        Chart("Groups without variance of the reward", "share of the batch", steps, [flat]),
        Chart("Time from generation to training", "s", steps, [waits]),
    ]


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
