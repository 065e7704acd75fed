"""Asynchronous against synchronous, in time to a held-out accuracy, at the pace of a GPU node.

    python -m benchmarks.wall_clock [--searchers 1 3 7] [--steps 40] [--faster 10] [--accuracy 0.6]

Real processes: buffer server, searchers and trainer of the demo, with its model and task. Engine and trainer are paced
to the times of a node (`pace.py`), `--faster` times as fast. Synchronous is `max_staleness = 0`: each step trains on
responses of its own weights, and the searchers generate one batch of them. Asynchronous searchers are held back by
`samples_per_insert = 1` alone, since here all of them share the cores on which they compute. The snapshots of every
fifth step are evaluated afterwards; the time to the accuracy is interpolated between them.
"""

import argparse

from benchmarks.table import print_table
from benchmarks.wall_clock.pace import H100
from benchmarks.wall_clock.runs import Outcome, run

_BATCH = 256
_KEPT_EVERY = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="asynchronous against synchronous training")
    parser.add_argument("--searchers", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--faster", type=float, default=10.0, help="how many times as fast as the node")
    parser.add_argument("--accuracy", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    for searchers in options.searchers:
        for synchronous in (True, False):
            settings = _settings(searchers, options.steps, options.seed, synchronous=synchronous)
            outcome = run(settings, searchers, H100.scaled(options.faster))
            rows.append([searchers, "synchronous" if synchronous else "asynchronous", *_cells(outcome, options)])
    headings = ["searchers", "", "s/step", f"s to {options.accuracy:.0%}", "last", "busy", "staleness", "late steps"]
    print_table(f"seconds of the node: those measured, times {options.faster:g}", headings, rows)


def _cells(outcome: Outcome, options: argparse.Namespace) -> list[str]:
    reached = outcome.seconds_to(options.accuracy)
    return [
        f"{outcome.seconds_step * options.faster:.1f}",
        "not reached" if reached is None else f"{reached * options.faster:.0f}",
        f"{outcome.accuracies[-1][1]:.1%}",
        f"{outcome.busy:.1%}",
        f"{outcome.staleness:.1f}",
        f"{outcome.late} of {outcome.steps}",
    ]


def _settings(searchers: int, steps: int, seed: int, *, synchronous: bool) -> list[str]:
    limits = (
        ["buffer.max_staleness=0"] if synchronous else ["buffer.max_staleness=unbounded", "buffer.samples_per_insert=1"]
    )
    return [
        *limits,
        f"run.seed={seed}",
        f"train.steps={steps}",
        f"train.keep_snapshot_every={_KEPT_EVERY}",
        f"search.max_in_flight={max(8, _BATCH // searchers)}",
        f"search.cpu_searchers={searchers}",
        "task.reward_workers=0",
        "train.checkpoint_every=1000000",
        "objective.name=tba_prime",
        "metrics.tensorboard=false",
    ]


if __name__ == "__main__":
    main()
