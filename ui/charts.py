"""The charts of a run: metrics by optimiser step, as the trainer reported them to the buffer."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from tba.buffer.store.storage_errors import stored_object
from tba.buffer.tools.query import PageRows
from tba.common.evaluations import read_evaluations
from tba.ui.runs import Run

# A chart is at most about a thousand pixels wide.
_MAX_POINTS = 1000
# Title, unit, and the metrics of docs/metrics.md with their labels.
_CHARTS = (
    ("Reward", "reward", {"reward_mean": "training batch"}),
    ("Staleness", "optimiser steps", {"staleness_mean": "mean", "staleness_max": "maximum"}),
    ("Throughput of the trainer", "tokens/s", {"tokens_per_second": "tokens/s"}),
    ("Loss", "", {"loss": "loss"}),
    ("KL to the reference", "nats per response", {"kl": "KL"}),
    ("Entropy", "nats per token", {"entropy": "entropy"}),
    ("Gradient norm", "", {"grad_norm": "before clipping"}),
    ("Response length", "tokens", {"response_tokens_mean": "mean"}),
)
_CHARTED = frozenset(name for _, _, names in _CHARTS for name in names)
_HELD_OUT = "held-out greedy accuracy"
# With the prompts and settings of the newest snapshot that was evaluated, as `read_evaluations` chooses them.
_EVALUATIONS = """SELECT step, accuracy FROM evaluations WHERE run = ? AND accuracy IS NOT NULL
    AND (prompt_set, settings) = (SELECT prompt_set, settings FROM evaluations WHERE run = ?
    ORDER BY step DESC, held_out_prompts DESC, evaluated_at DESC LIMIT 1) ORDER BY step"""


@dataclass(frozen=True)
class Series:
    """The values of one line, None where there is none. `dots` shows each value, for lines with few of them."""

    label: str
    values: list[float | None]
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart over optimiser steps."""

    title: str
    unit: str
    steps: list[int]
    series: list[Series]


@dataclass
class Metrics:
    """The charted metrics of a run, read step by step. Thread-safe."""

    run: Run
    _steps: dict[int, dict[str, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def steps(self, rows: PageRows) -> dict[int, dict[str, float]]:
        """Return the metrics by step. Only new steps are read."""
        with self._lock:
            sql = (
                "SELECT step, metrics FROM batches WHERE run = ? AND step > ? AND trained_at IS NOT NULL ORDER BY step"
            )
            for row in rows.all(sql, self.run.id, max(self._steps, default=-1)):
                self._steps[row["step"]] = _charted(row["metrics"])
            return dict(self._steps)

    def charts(self, rows: PageRows) -> list[Chart]:
        """Return the charts that have values."""
        by_step = self.steps(rows)
        # Without a server, `tba eval` writes its results into the directory only.
        evaluations = rows.all(_EVALUATIONS, self.run.name, self.run.name) or read_evaluations(
            self.run.directory, self.run.name
        )
        held_out = {row["step"]: row["accuracy"] for row in evaluations if "accuracy" in row}
        shown = _thinned(sorted(by_step))
        charts = []
        for title, unit, names in _CHARTS:
            steps = sorted({*shown, *held_out}) if title == "Reward" else shown
            series = [Series(label, [by_step.get(s, {}).get(name) for s in steps]) for name, label in names.items()]
            if title == "Reward" and held_out:
                series.append(Series(_HELD_OUT, [held_out.get(step) for step in steps], dots=True))
            series = [one for one in series if any(value is not None for value in one.values)]
            if series:
                charts.append(Chart(title, unit, steps, series))
        return charts


def overlay(runs: Sequence[tuple[str, list[Chart]]]) -> list[Chart]:
    """Return the charts of several runs as one list: curves of one title share a chart, and are named by their run."""
    titles = dict.fromkeys(chart.title for _, charts in runs for chart in charts)
    return [
        _overlaid([(name, one) for name, charts in runs for one in charts if one.title == title]) for title in titles
    ]


def _overlaid(parts: list[tuple[str, Chart]]) -> Chart:
    steps = sorted({step for _, chart in parts for step in chart.steps})
    series = []
    for name, chart in parts:
        for one in chart.series:
            known = dict(zip(chart.steps, one.values, strict=True))
            series.append(Series(f"{name}: {one.label}", [known.get(step) for step in steps], one.dots))
    return Chart(parts[0][1].title, parts[0][1].unit, steps, series)


def _charted(text: str | None) -> dict[str, float]:
    return {
        name: value
        for name, value in stored_object(text).items()
        if name in _CHARTED and isinstance(value, int | float) and math.isfinite(value)
    }


def _thinned(steps: list[int]) -> list[int]:
    """Return at most about a thousand steps, evenly spaced, with the last one."""
    stride = -(-len(steps) // _MAX_POINTS) or 1
    thinned = steps[::stride]
    return thinned if not steps or thinned[-1] == steps[-1] else [*thinned, steps[-1]]
