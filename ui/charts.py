"""The charts of a run: metrics by optimiser step as data for the script of a page, and small pictures as inline SVG.

A chart over steps can be zoomed, smoothed, and a point of it opened: that takes the script. A report has none, and
histograms, bars and points of few values need none: they are SVG.
"""

import math
import threading
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from tba.buffer.store.storage_errors import stored_object
from tba.buffer.tools.query import PageRows
from tba.common.evaluations import read_evaluations
from tba.ui.formats import number
from tba.ui.runs import Run

# A chart is at most about a thousand pixels wide.
_MAX_POINTS = 1000
# Title, unit, and the metrics of docs/metrics.md with their labels.
_CHARTS = (
    ("Reward", "reward", {"reward_mean": "training batch", "plain_reward_mean": "not guided"}),
    ("Loss", "", {"loss": "loss"}),
    ("KL to the reference", "nats per response", {"kl": "estimate from stale samples, may be negative"}),
    ("Entropy", "nats per token", {"entropy": "entropy"}),
    ("Gradient norm", "", {"grad_norm": "before clipping"}),
    ("Learning rate", "", {"learning_rate": "learning rate"}),
    ("Response length", "tokens", {"response_tokens_mean": "mean"}),
    ("Staleness", "optimiser steps", {"staleness_mean": "mean", "staleness_max": "maximum"}),
    ("Reuse of data", "earlier batches", {"reuse_mean": "mean"}),
    ("Throughput of the trainer", "tokens/s", {"tokens_per_second": "tokens/s"}),
)
_CHARTED = frozenset(name for _, _, names in _CHARTS for name in names)
# Of a file of other origin, which may name any number.
_MOST_METRICS = 500
_HELD_OUT = "held-out greedy accuracy"
# With the prompts and settings of the newest snapshot that was evaluated, as `read_evaluations` chooses them.
_EVALUATIONS = """SELECT step, accuracy FROM evaluations WHERE run = ? AND accuracy IS NOT NULL
    AND (prompt_set, settings) = (SELECT prompt_set, settings FROM evaluations WHERE run = ?
    ORDER BY step DESC, held_out_prompts DESC, evaluated_at DESC LIMIT 1) ORDER BY step"""
WIDTH, HEIGHT = 460, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 24
_BINS = 20
_LARGEST = 1e300
# Few bars are drawn as narrow as this many.
_LEAST_BINS = 6


@dataclass(frozen=True)
class Series:
    """The values of one line, None where there is none. `dots` shows each value, for lines with few of them."""

    label: str
    values: list[float | None]
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart, whose series have a value for each step of `Charts`."""

    title: str
    unit: str
    series: list[Series]


@dataclass(frozen=True)
class Charts:
    """The charts of a run over the same optimiser steps, and what else the horizontal axis may be.

    `hours` are those since the first step, `tokens` those trained on; `restarts` are steps. The steps after `last`, the
    last trained one, are of evaluations and restarts.
    """

    steps: list[int]
    hours: list[float]
    tokens: list[float]
    restarts: list[int]
    last: int
    charts: list[Chart]


@dataclass
class Metrics:
    """The metrics of a run, read step by step. Thread-safe."""

    run: Run
    _steps: list[int] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)
    # Of all steps before.
    _tokens: list[float] = field(default_factory=lambda: [0.0])
    # Arrays, not a map for each step: a long run has sixty metrics of a hundred thousand steps.
    _columns: dict[str, "array[float]"] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def _read(self, rows: PageRows) -> None:
        sql = """SELECT step, MAX(MIN(trained_at, 1e300), 0) AS trained_at, metrics FROM batches
            WHERE run = ? AND step > ? AND trained_at IS NOT NULL ORDER BY step"""
        for row in rows.all(sql, self.run.id, self._steps[-1] if self._steps else -1):
            known = _numbers(row["metrics"])
            for name in list(known)[: _MOST_METRICS - len(self._columns)]:
                self._columns.setdefault(name, array("d", [math.nan]) * len(self._steps))
            for name, column in self._columns.items():
                column.append(known.get(name, math.nan))
            self._steps.append(row["step"])
            self._times.append(row["trained_at"])
            self._tokens.append(self._tokens[-1] + known.get("tokens", 0.0))

    def names(self, rows: PageRows) -> list[str]:
        """Return the metrics that the run has besides those that are always charted."""
        with self._lock:
            self._read(rows)
            return sorted(self._columns.keys() - _CHARTED)

    def charts(self, rows: PageRows, more: Sequence[str] = ()) -> Charts:
        """Return the charts that have values: the usual ones, and one for each metric in `more`."""
        # Without a server, `tba eval` writes its results into the directory only.
        evaluations = rows.all(_EVALUATIONS, self.run.name, self.run.name) or read_evaluations(
            self.run.directory, self.run.name
        )
        held_out = {row["step"]: row["accuracy"] for row in evaluations if isinstance(row.get("accuracy"), int | float)}
        restarts = [start.step for start in self.run.starts(rows)[1:]]
        wanted = (*_CHARTS, *((name, "", {name: name}) for name in more if name not in _CHARTED))
        with self._lock:
            self._read(rows)
            steps = sorted({*_thinned(self._steps), *held_out, *restarts})
            # Of each step, the number of those reported before it and with it.
            until = [bisect_right(self._steps, step) for step in steps]
            charts = [Chart(title, unit, self._series(names, steps, until)) for title, unit, names in wanted]
            hours = [(self._times[n - 1] - self._times[0]) / 3600 if n else 0.0 for n in until]
            tokens = [self._tokens[n] for n in until]
            last = self._steps[-1] if self._steps else -1
        if held_out:
            charts[0].series.append(Series(_HELD_OUT, [held_out.get(step) for step in steps], dots=True))
        return Charts(steps, hours, tokens, restarts, last, [chart for chart in charts if chart.series])

    def _series(self, names: dict[str, str], steps: Sequence[int], until: Sequence[int]) -> list[Series]:
        """Return the series of the metrics in `names`, with their labels, that have a value at one of the steps."""
        found = []
        for name, label in names.items():
            column = self._columns.get(name, ())
            places = [
                n - 1 if column and n and self._steps[n - 1] == at else None for n, at in zip(until, steps, strict=True)
            ]
            values = [None if n is None or math.isnan(column[n]) else column[n] for n in places]
            if any(value is not None for value in values):
                found.append(Series(label, values))
        return found


def _numbers(text: str | None) -> dict[str, float]:
    known = stored_object(text).items()
    return {name: value for name, value in known if isinstance(value, int | float) and abs(value) <= _LARGEST}


def _thinned(steps: list[int]) -> list[int]:
    """Return at most about a thousand steps, evenly spaced, with the last one."""
    stride = -(-len(steps) // _MAX_POINTS) or 1
    thinned = steps[::stride]
    return thinned if not steps or thinned[-1] == steps[-1] else [*thinned, steps[-1]]


class _Scale:
    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x0, self.x1 = _span(xs)
        self.y0, self.y1 = _span(ys)

    def x(self, value: float) -> float:
        return round(_LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - _TOP - _BOTTOM), 1)


def line_chart(chart: Chart, over: Charts) -> Markup:
    """Draw one of the charts of a run over optimiser steps, with its restarts."""
    values = [value for series in chart.series for value in series.values if value is not None]
    scale = _Scale(over.steps, values)
    xs = map(scale.x, over.restarts)
    parts = [f'<line class="restart" x1="{x}" x2="{x}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>' for x in xs]
    for position, series in enumerate(chart.series):
        pairs = zip(over.steps, series.values, strict=True)
        points = [(scale.x(step), scale.y(value)) for step, value in pairs if value is not None]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline class="line s{position}" points="{path}"/>')
        # A line of one point has no length.
        if series.dots or len(points) == 1:
            parts += [f'<circle class="dot s{position}" cx="{x}" cy="{y}" r="3"/>' for x, y in points]
    names = (over.steps[0], over.steps[-1])
    return _figure(f"{chart.title} over optimiser steps", [*parts, *_axes(scale, names)])


def histogram(values: Sequence[float], title: str) -> Markup:
    """Draw a histogram: one bar per value if they are few integers, else twenty bars."""
    # So that a range is finite.
    values = [min(max(value, -_LARGEST), _LARGEST) for value in values]
    low, high = names = min(values), max(values)
    is_whole = all(float(value).is_integer() for value in values) and high - low < 2 * _BINS
    width, bins = (1.0, int(high - low) + 1) if is_whole else ((high - low) / _BINS or 1.0, _BINS)
    low -= 0.5 * is_whole
    counts = Counter(min(int((value - low) / width), bins - 1) for value in values)
    margin = max(_LEAST_BINS - bins, 0) / 2 * width
    scale = _Scale([low - margin, low + bins * width + margin], [0, max(counts.values())])
    parts = []
    for position, count in sorted(counts.items()):
        left, right = scale.x(low + position * width), scale.x(low + (position + 1) * width)
        top, base = scale.y(count), scale.y(0)
        name = f"{number(round(low + (position + 0.5) * width, 6))}: {count:,}"
        parts.append(
            f'<rect class="bar" x="{left + 0.5}" y="{top}" width="{max(right - left - 1, 1):.1f}" '
            f'height="{max(base - top, 0):.1f}"><title>{name}</title></rect>'
        )
    return _figure(title, [*parts, *_axes(scale, names)])


def sparkline(values: Sequence[float]) -> Markup:
    """Draw a line of fractions from 0 to 1, as small as a word."""
    if not values:
        return Markup("")
    step = 76 / max(len(values) - 1, 1)
    points = [(round(2 + position * step, 1), round(18 - 16 * value, 1)) for position, value in enumerate(values)]
    path = " ".join(f"{x},{y}" for x, y in points)
    x, y = points[-1]
    return Markup(  # noqa: S704
        '<svg class="spark" viewBox="0 0 80 20" width="80" height="20" aria-hidden="true">'
        f'<polyline class="line s0" points="{path}"/><circle class="dot s0" cx="{x}" cy="{y}" r="2"/></svg>'
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if not math.isfinite(high - low):
        return -_LARGEST, _LARGEST
    half = max(0.5, abs(low) / 1000)
    return (low, high) if high > low else (low - half, low + half)


def _axes(scale: _Scale, names: Sequence[float]) -> list[str]:
    """Return the lines of the axes with the ends of the vertical one; `names` are values to write at the other."""
    base, left = HEIGHT - _BOTTOM, _LEFT
    lines = [f'<line class="axis" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>']
    for value, y in ((scale.y0, base), (scale.y1, _TOP + 8)):
        lines.append(f'<text class="tick" x="{left - 5}" y="{y}" text-anchor="end">{_short(value)}</text>')
    for value in dict.fromkeys(names):
        x = min(max(scale.x(value), left + 8), WIDTH - _RIGHT - 12)
        lines.append(f'<text class="tick" x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{_short(value)}</text>')
    return lines


def _short(value: float) -> str:
    """Format the value at a tick: three digits, or all of an integer."""
    return number(value if float(value).is_integer() else float(f"{value:.3g}"))


def _figure(title: str, parts: Sequence[str]) -> Markup:
    """Return the picture. Its parts are numbers and escaped addresses, no text of a run."""
    return Markup(  # noqa: S704
        f'<svg class="figure" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
