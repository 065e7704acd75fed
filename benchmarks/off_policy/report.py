"""The table of a panel in Markdown, and its picture, from the file of results."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.off_policy.panels import FRESH, Cell
from benchmarks.off_policy.results import Result, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = (
    "| objective | data | rate | seeds | reward | gain: of own fresh | of tb's fresh | greedy | pass@8 | drift, nats "
    "| mean age |"
)


def table(results: Results, cells: Sequence[Cell], seeds: Sequence[int]) -> list[str]:
    """Return the lines of the table of a panel. A cell without any run is left out.

    Gains are relative to those on fresh data with its own rate, over the seeds that have both. `drift` is the mean over
    the run of KL(sampler || policy) of whole responses.
    """
    found = {cell: _results(results, cell, seeds) for cell in cells}
    fresh = {cell.objective: runs for cell, runs in found.items() if cell.column == FRESH}
    lines = [HEADINGS, _row(["---"] * (HEADINGS.count("|") - 1))]
    for cell, runs in found.items():
        if runs:
            shares = [_share(runs, fresh.get(name, {})) for name in (cell.objective, "tb")]
            lines.append(_row(_columns(cell, list(runs.values()), shares)))
    start = next((run for runs in found.values() for run in runs.values()), None)
    if start is not None:
        lines.append("")
        lines.append(
            f"Before the first step: reward {start.reward[0]:.3f}, greedy {start.greedy[0]:.3f}, pass@8 "
            f"{start.pass_at_8[0]:.3f}. The runs of this table took "
            f"{sum(run.cpu_seconds for runs in found.values() for run in runs.values()) / 60:.0f} CPU minutes."
        )
    return lines


def _results(results: Results, cell: Cell, seeds: Iterable[int]) -> dict[int, Result]:
    """Return the runs of a cell by seed."""
    return {setting.seed: results[setting] for setting in cell.of_seeds(seeds) if setting in results}


def _share(runs: Mapping[int, Result], fresh: Mapping[int, Result]) -> str:
    """Return the mean gain as a share of that on fresh data, over the seeds of both. Empty if there are none."""
    both = runs.keys() & fresh.keys()
    return f"{sum(runs[seed].gain for seed in both) / sum(fresh[seed].gain for seed in both):.0%}" if both else ""


def _columns(cell: Cell, runs: Sequence[Result], shares: Sequence[str]) -> list[str]:
    finals = [run.reward[-1] for run in runs]
    spread = f" ± {np.std(finals, ddof=1):.3f}" if len(finals) > 1 else ""
    return [
        cell.objective,
        cell.column,
        f"{cell.setting.rate:.0e}" + {"own": " (own)", "given": " (not swept)"}.get(cell.kind, ""),
        str(len(runs)),
        f"{np.mean(finals):.3f}{spread}",
        *shares,
        f"{np.mean([run.greedy[-1] for run in runs]):.3f}",
        f"{np.mean([run.pass_at_8[-1] for run in runs]):.3f}",
        f"{np.mean([run.drift[1:] for run in runs]):.2f}",
        f"{np.mean([run.age[1:] for run in runs]):.0f}",
    ]


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def draw(path: Path, results: Results, cells: Sequence[Cell], seeds: Sequence[int]) -> None:
    """Draw one plot per column with a line per objective, with the rate of fresh data, and one plot over drift.

    Bands are one standard deviation over seeds. In the plot over drift there is a point for each run of each cell, own
    rates included. Columns without a run are left out; without any run there is no picture.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    found = {cell: [results[one] for one in cell.of_seeds(seeds) if one in results] for cell in cells}
    found = {cell: runs for cell, runs in found.items() if runs}
    columns = list(dict.fromkeys(cell.column for cell in found))
    if not columns:
        return
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(cell.objective for cell in cells))}
    figure, axes = plt.subplots(1, len(columns) + 1, figsize=(3.2 * (len(columns) + 1), 3.6), sharey=True)
    for cell, runs in found.items():
        colour = colours[cell.objective]
        if cell.kind != "own":
            _curve(axes[columns.index(cell.column)], cell, runs, colour)
        drifts = [np.mean(run.drift[1:]) for run in runs]
        axes[-1].scatter(drifts, [run.reward[-1] for run in runs], s=12, color=colour, label=cell.objective)
    for axis, title in zip(axes, [*columns, "final reward over drift"], strict=True):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_xlabel("optimiser step", fontsize=9)
    axes[-1].set_xscale("symlog", linthresh=0.1)
    axes[-1].set_xlabel("mean KL(sampler || policy), nats", fontsize=9)
    axes[0].set_ylabel("expected reward, held-out")
    handles, labels = axes[-1].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axes[-1].legend(named.values(), named.keys(), fontsize=7, loc="lower left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _curve(axis: "Axes", cell: Cell, runs: Sequence[Result], colour: str) -> None:
    values = np.array([run.reward for run in runs])
    steps = np.linspace(0, cell.setting.steps, values.shape[1])
    mean, spread = values.mean(axis=0), values.std(axis=0)
    axis.plot(steps, mean, color=colour)
    axis.fill_between(steps, mean - spread, mean + spread, alpha=0.15, color=colour)
