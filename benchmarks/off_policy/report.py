"""Tables of a panel, in Markdown, from the file of results."""

from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.off_policy.panels import FRESH, Cell, Panel
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


def table(panel: Panel, results: Results, cells: Sequence[Cell], seeds: Sequence[int]) -> list[str]:
    """Return the lines of the table of a panel. A cell without any run is left out.

    Gains are relative to those on fresh data with its own rate. `drift` is the mean over the run of KL(sampler ||
    policy) of whole responses.
    """
    found = {cell: _results(results, cell, seeds) for cell in cells}
    gains = {cell.objective: _gain(runs) for cell, runs in found.items() if cell.column == FRESH and runs}
    lines = [_row(HEADINGS), _row(["---"] * len(HEADINGS))]
    for cell, runs in found.items():
        if runs:
            fresh = (gains.get(cell.objective), gains.get("tb")) if FRESH in panel.columns else (None, None)
            lines.append(_row(_columns(cell, runs, *fresh)))
    start = next((runs[0] for runs in found.values() if runs), None)
    if start is not None:
        lines.append("")
        lines.append(
            f"Before the first step: reward {start.reward[0]:.3f}, greedy {start.greedy[0]:.3f}, pass@8 "
            f"{start.pass_at_8[0]:.3f}. The runs of this table took "
            f"{sum(run.cpu_seconds for runs in found.values() for run in runs) / 60:.0f} CPU minutes."
        )
    return lines


def _results(results: Results, cell: Cell, seeds: Iterable[int]) -> list[Result]:
    return [results[setting] for setting in cell.of_seeds(seeds) if setting in results]


def _gain(runs: Sequence[Result]) -> float:
    return float(np.mean([run.gain for run in runs]))


def _columns(cell: Cell, runs: Sequence[Result], own: float | None, balance: float | None) -> list[str]:
    finals = [run.reward[-1] for run in runs]
    spread = f" ± {np.std(finals, ddof=1):.3f}" if len(finals) > 1 else ""
    of_fresh = ["" if fresh is None else f"{_gain(runs) / fresh:.0%}" for fresh in (own, balance)]
    return [
        cell.objective,
        cell.column,
        f"{cell.setting.rate:.0e}" + {"own": " (own)", "given": " (not swept)"}.get(cell.kind, ""),
        str(len(runs)),
        f"{np.mean(finals):.3f}{spread}",
        *of_fresh,
        f"{np.mean([run.greedy[-1] for run in runs]):.3f}",
        f"{np.mean([run.pass_at_8[-1] for run in runs]):.3f}",
        f"{np.mean([run.drift[1:] for run in runs]):.2f}",
        f"{np.mean([run.age[1:] for run in runs]):.0f}",
    ]


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
