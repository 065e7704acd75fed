"""Asynchronous against synchronous, in time to a held-out accuracy, at the pace of a GPU node.

    python -m benchmarks.wall_clock [--pace short|long] [--searchers 1 3 7] [--steps 40] [--faster 10] [--accuracy 0.6]

Real processes: buffer server, searchers and trainer of the demo, with its model and task. Engine and trainer are paced
to the times of a node (`pace.py`), `--faster` times as fast. Synchronous is `max_staleness = 0`: each step trains on
responses of its own weights, and the searchers generate one batch of them. Asynchronous searchers are held back by
`samples_per_insert = 1` alone, four batches ahead, since here all of them share the cores on which they compute. The
snapshots of every fifth step are evaluated afterwards; the time to the accuracy is interpolated between them. *Bound*
is how many times as fast a step can be at most, by the pace alone, and *ratio* how many times as fast it was.
"""

import argparse
import math
from pathlib import Path

from benchmarks.harness import print_table
from benchmarks.wall_clock.curves import draw_ratios
from benchmarks.wall_clock.pace import PACES, step_ratio
from benchmarks.wall_clock.runs import Outcome, run

_PROMPTS = 32
_SAMPLES = 8
_KEPT_EVERY = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="asynchronous against synchronous training")
    parser.add_argument("--searchers", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--faster", type=float, default=10.0, help="how many times as fast as the node")
    parser.add_argument("--accuracy", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", choices=PACES, default="short", help="length of the responses")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw the bound over the constants, and run nothing")
    options = parser.parse_args()
    if options.draw:
        draw_ratios(options.draw)
        return
    pace = PACES[options.pace]
    rows = []
    for searchers in options.searchers:
        most = f"{step_ratio(pace, searchers, _PROMPTS * _SAMPLES):.2f}"
        settings = [_settings(searchers, options.steps, options.seed, synchronous=yes) for yes in (True, False)]
        one, other = (run(each, searchers, pace.scaled(options.faster)) for each in settings)
        rows.append([searchers, "synchronous", *_cells(one, options), most, ""])
        ratio = f"{one.seconds_step / other.seconds_step:.2f}"
        rows.append([searchers, "asynchronous", *_cells(other, options), most, ratio])
    headings = ["searchers", "", "s/step", f"s to {options.accuracy:.0%}", "last", "busy", "staleness", "late steps"]
    title = f"{options.pace} responses; seconds of the node: those measured, times {options.faster:g}"
    print_table(title, [*headings, "by the pace", "ratio"], rows)


def _cells(outcome: Outcome, options: argparse.Namespace) -> list[str]:
    reached = outcome.seconds_to(options.accuracy)
    return [
        f"{outcome.seconds_step * options.faster:.1f}",
        "not reached" if math.isnan(reached) else f"{reached * options.faster:.0f}",
        f"{outcome.accuracies[-1][1]:.1%}",
        f"{outcome.busy:.1%}",
        f"{outcome.staleness:.1f}",
        f"{outcome.late} of {outcome.steps}",
    ]


def _settings(searchers: int, steps: int, seed: int, *, synchronous: bool) -> list[str]:
    # A searcher leases twice what its engine takes, and the paced engine decodes all of it: one batch in all searchers.
    in_flight = max(1, _SAMPLES * math.ceil(_PROMPTS / searchers) // 2)
    asynchronous = [
        "buffer.max_staleness=unbounded",
        "buffer.samples_per_insert=1",
        # By default searchers stop two batches ahead, while the long responses that complete a group are still missing.
        f"buffer.samples_per_insert_slack={4 * _PROMPTS * _SAMPLES}",
    ]
    limits = ["buffer.max_staleness=0"] if synchronous else asynchronous
    return [
        *limits,
        f"run.seed={seed}",
        f"train.steps={steps}",
        f"train.keep_snapshot_every={_KEPT_EVERY}",
        f"search.max_in_flight={in_flight}",
        f"search.cpu_searchers={searchers}",
        "task.reward_workers=0",
        "train.checkpoint_every=1000000",
        "objective.name=tba_prime",
        "metrics.tensorboard=false",
    ]


if __name__ == "__main__":
    main()
