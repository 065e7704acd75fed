"""The picture of a panel: reward over steps for each kind of data, and the final reward over drift."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.off_policy.panels import Cell
from benchmarks.off_policy.results import Result, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
