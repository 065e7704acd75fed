"""Run panels, then print their tables and draw their pictures from the file of results.

    python -m benchmarks.off_policy staleness long buffer ablations [--task copying-32] [--sweep]
    python -m benchmarks.off_policy staleness --tables-only

Runs that are in the file are not repeated, so a command that was stopped goes on where it was.
"""

import argparse
import math
import time
from functools import partial
from pathlib import Path

from benchmarks.off_policy.panels import ABLATIONS, PANELS, cells, sweep
from benchmarks.off_policy.report import draw, table
from benchmarks.off_policy.results import Results, complete, load
from benchmarks.off_policy.setting import REPORT_SEEDS, objective_section

# The results that the documentation shows are in docs/images/off_policy.jsonl.
RESULTS = Path("build/evidence/off_policy.jsonl")


def main() -> None:
    options = parse_arguments()
    deadline = time.monotonic() + options.budget_minutes * 60
    for name in options.panels:
        run_panel(name, options, deadline)


def run_panel(name: str, options: argparse.Namespace, deadline: float) -> None:
    """Make the runs that are missing, print the table, draw the picture.

    The picture shows all runs of the panel that are in the file, also those not asked for. Ablations have none.
    """
    panel, file, seeds = PANELS[name], options.results, REPORT_SEEDS[: options.seeds]
    objectives = options.objectives or panel.objectives
    for objective in objectives:
        objective_section(objective)
    columns = [column for column in panel.columns if not options.columns or column in options.columns]
    run_missing = partial(complete, file, workers=options.workers, deadline=deadline)
    if options.sweep and not options.tables_only:
        run_missing(sweep(panel, options.task, objectives, columns))
    chosen = list(cells(panel, load(file), options.task, objectives, columns))
    if not options.tables_only:
        run_missing(setting for seed in seeds for cell in chosen for setting in cell.of_seeds([seed]))
    results = load(file)
    print(f"\n{name}, {options.task}" + (f". The paper: {panel.paper}." if panel.paper else ""))
    print("\n".join(table(results, chosen, seeds)))
    if name not in ABLATIONS and not options.tables_only:
        shown = cells(panel, results, options.task, objectives_of(results, options.task), list(panel.columns))
        draw(file.with_name(f"off_policy_{name}_{options.task}.png"), results, list(shown), REPORT_SEEDS)


def objectives_of(results: Results, task: str) -> list[str]:
    """Return the objectives of a task that are in the file, in the order of their first run."""
    return list(dict.fromkeys(setting.objective for setting in results if setting.task == task))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "panels", nargs="+", metavar="PANEL", help=f"{', '.join(PANELS)}, or ablations for all of those"
    )
    parser.add_argument("--task", default="arithmetic", help="arithmetic, or copying-N with N digits")
    parser.add_argument("--objectives", nargs="+", default=[], help="NAME or NAME:KEY=VALUE,...; default: the panel's")
    parser.add_argument("--columns", nargs="+", default=[], help='data, such as "D = 64"; default: all of the panel')
    counts = range(1, len(REPORT_SEEDS) + 1)
    parser.add_argument("--seeds", type=int, choices=counts, metavar="N", default=5, help="of each reported row")
    parser.add_argument("--sweep", action="store_true", help="choose rates first: 12 runs for each cell")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--budget-minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results; pictures go to its directory")
    parser.add_argument("--tables-only", action="store_true", help="run and draw nothing")
    options = parser.parse_args()
    names = [name for given in options.panels for name in (ABLATIONS if given == "ablations" else (given,))]
    unknown = [name for name in names if name not in PANELS]
    if unknown:
        parser.error(f"no panel {unknown[0]!r}: there are {', '.join(PANELS)} and ablations")
    missing = set(options.columns) - {column for name in names for column in PANELS[name].columns}
    if missing:
        parser.error(f"no panel of {', '.join(names)} has a column {missing.pop()!r}")
    options.panels = names
    return options


if __name__ == "__main__":
    main()
