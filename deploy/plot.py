"""The plot of one run or several: reward, held-out metrics, staleness, and fronts of reward against KL and diversity.

Invariant: rows of `metrics.jsonl` are in the order of their steps, and the row of step s describes update s + 1.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.common import run_files
from tba.common.errors import MissingExtra, UsageError
from tba.common.evaluations import Row, all_evaluations, read_evaluations, read_json_lines

AXES = {"steps": "optimiser step", "seconds": "seconds since the first step", "tokens": "trained tokens"}
# The first of these that the evaluations have is drawn against the reward.
_DIVERSITY = ("embedding_distance", "distinct_4", "distinct_2", "distinct_1")


@dataclass(frozen=True, slots=True)
class Curve:
    """The records of one run. `metrics` is not empty."""

    label: str
    metrics: list[Row]
    evaluations: list[Row]

    def x(self, kind: str) -> list[float]:
        """Return the position of each row of `metrics` on an axis of `AXES`."""
        if kind == "steps":
            return [row["step"] for row in self.metrics]
        if kind == "seconds":
            return [row["time"] - self.metrics[0]["time"] for row in self.metrics]
        return list(itertools.accumulate(row.get("tokens", 0.0) for row in self.metrics))

    def evaluated_x(self, kind: str) -> list[float]:
        """Return the position of each evaluation: where the last step before it is, 0 before the first."""
        if kind == "steps":
            return [row["step"] for row in self.evaluations]
        at = {row["step"] + 1: position for row, position in zip(self.metrics, self.x(kind), strict=True)}
        return [max((x for step, x in at.items() if step <= row["step"]), default=0.0) for row in self.evaluations]


def read_curve(directory: Path, run: str | None = None) -> Curve:
    """Read a run, by default that of the newest evaluation. Raises UsageError if nothing was trained there."""
    metrics = read_json_lines(directory / run_files.METRICS)
    if not metrics:
        raise UsageError(
            f"{directory} has no {run_files.METRICS}: it is not a run directory, or nothing was trained yet"
        )
    if run is None:
        rows = all_evaluations(directory)
        run = rows[-1]["run"] if rows else directory.name
    label = run if directory.name == run else f"{directory.name} ({run})"
    return Curve(label, metrics, read_evaluations(directory, run))


def draw_curves(curves: Sequence[Curve], picture: Path, *, x: str = "steps") -> Path:
    """Draw runs on one picture over an axis of `AXES`, and return its path. Raises MissingExtra, UsageError."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise MissingExtra("matplotlib", "plot") from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    kl = _front(curves, "kl", "KL to the reference (nats per response)")
    has = {name for curve in curves for row in curve.evaluations for name in row}
    diversity = next((name for name in _DIVERSITY if name in has), "")
    fronts = [front for front in (kl, _front(curves, diversity, diversity.replace("_", " "))) if front]
    figure = plt.figure(figsize=(8 + 4 * bool(fronts), 6))
    grid = figure.add_gridspec(6, 3 if fronts else 2)
    upper = figure.add_subplot(grid[:4, :2])
    lower = figure.add_subplot(grid[4:, :2], sharex=upper)
    _draw_rewards(upper, curves, x)
    _draw_staleness(lower, curves, x)
    for number, front in enumerate(fronts):
        rows = 6 // len(fronts)
        front(figure.add_subplot(grid[number * rows : (number + 1) * rows, 2]))
    figure.tight_layout()
    try:
        figure.savefig(picture, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"{picture} cannot be written: {error}") from error
    finally:
        plt.close(figure)
    return picture


def _draw_rewards(axis: Any, curves: Sequence[Curve], x: str) -> None:
    several = len(curves) > 1
    for curve in curves:
        rewards = [row.get("reward_mean", math.nan) for row in curve.metrics]
        label = curve.label if several else "mean reward of the batch"
        (line,) = axis.plot(curve.x(x), rewards, label=label, alpha=0.6)
        name = "accuracy" if any("accuracy" in row for row in curve.evaluations) else "reward"
        points = [p for p in zip(curve.evaluated_x(x), curve.evaluations, strict=True) if name in p[1]]
        if points:
            shown = "held-out greedy accuracy" if name == "accuracy" else "held-out reward"
            colour = line.get_color() if several else None
            _draw_points(axis, points, name, "_" if several else shown, colour)
    low, high = axis.dataLim.intervaly
    # The same axis for all runs whose rewards are fractions, with room for a line at its ends.
    if low >= 0 and high <= 1:
        axis.set_ylim(-0.02, 1.02)
    axis.legend(loc="lower right")
    axis.set_title("mean reward of the batch; points: held out" if several else curves[0].label)


def _draw_points(axis: Any, points: Sequence[tuple[float, Row]], name: str, label: str, colour: Any) -> None:
    """Draw a metric of evaluations, with its intervals where the rows have them."""
    (line,) = axis.plot(
        [at for at, _ in points], [row[name] for _, row in points], marker="o", label=label, color=colour, clip_on=False
    )
    ends = [(at, *row["intervals"][name]) for at, row in points if name in row.get("intervals", {})]
    if ends:
        at, low, high = zip(*ends, strict=True)
        axis.fill_between(at, low, high, alpha=0.15, color=line.get_color(), linewidth=0)


def _draw_staleness(axis: Any, curves: Sequence[Curve], x: str) -> None:
    several = len(curves) > 1
    for number, curve in enumerate(curves):
        colour = f"C{number}" if several else "tab:green"
        mean, most = ([row.get(f"staleness_{name}", math.nan) for row in curve.metrics] for name in ("mean", "max"))
        axis.plot(curve.x(x), mean, label="_" if several else "mean", color=colour)
        axis.plot(curve.x(x), most, label="_" if several else "maximum", color=colour, alpha=0.35)
    if not several:
        # Above the axis: within it, it would hide steps.
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    axis.set(xlabel=AXES[x], ylabel="staleness (steps)")
    axis.locator_params(axis="x", integer=True)


def _front(curves: Sequence[Curve], name: str, label: str) -> Callable[[Any], None] | None:
    """Return a function that draws the reward of the sampled answers against a metric, None without such rows."""
    points = [
        [(row[name], row["sampled_reward"]) for row in curve.evaluations if name in row and "sampled_reward" in row]
        for curve in curves
    ]
    if not any(points):
        return None

    def draw_front(axis: Any) -> None:
        for number, found in enumerate(points):
            if found:
                axis.plot(*zip(*found, strict=True), marker="o", color=f"C{number}", alpha=0.8)
                # The direction of training.
                axis.plot(*found[-1], marker="s", color=f"C{number}", markersize=9)
        axis.set(xlabel=label, ylabel="reward (sampled)")

    return draw_front
