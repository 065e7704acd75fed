"""Tables of a panel, in Markdown, from the file of results."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from benchmarks.off_policy.panels import FRESH, Cell
from benchmarks.off_policy.results import Result, Results

HEADINGS = (
    "objective",
    "data",
    "rate",
    "seeds",
    "reward",
    "gain: of own fresh",
    "of tb's fresh",
    "greedy",
    "pass@8",
    "drift, nats",
    "mean age",
)


def table(results: Results, cells: Sequence[Cell], seeds: Sequence[int]) -> list[str]:
    """Return the lines of the table of a panel. A cell without any run is left out.

    Gains are relative to those on fresh data with its own rate, over the seeds that have both. `drift` is the mean over
    the run of KL(sampler || policy) of whole responses.
    """
    found = {cell: _results(results, cell, seeds) for cell in cells}
    fresh = {cell.objective: runs for cell, runs in found.items() if cell.column == FRESH}
    lines = [_row(HEADINGS), _row(["---"] * len(HEADINGS))]
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
