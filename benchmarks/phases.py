"""The trainer's time by phase in a complete run: the demo without a limit on staleness.

    python -m benchmarks.phases [--steps 60] [--set key=value ...]

This is `tba run` on examples/arithmetic: buffer, searchers and trainer share the machine. Without a limit on staleness
the searchers never wait, so the trainer has data whenever it asks. The first five steps are left out: the first one
waits for the first groups, and one-time allocations happen there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.table import print_table
from tba.trainer.metrics.stopwatch import PHASES

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "examples" / "arithmetic" / "demo.toml"
# Steps that are left out.
WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        lines = run(Path(folder) / "run", options.steps, options.settings)
    total = sum(line["seconds_step"] for line in lines)
    rows = []
    for phase in PHASES:
        seconds = sum(line[f"seconds_{phase}"] for line in lines)
        rows.append([phase, f"{1000 * seconds / len(lines):.1f}", f"{100 * seconds / total:.1f} %"])
    rows.append(["a step", f"{1000 * total / len(lines):.1f}", "100 %"])
    print_table(f"the trainer's time over {len(lines)} steps", ["phase", "ms per step", "fraction"], rows)


def run(directory: Path, steps: int, settings: list[str]) -> list[dict[str, float]]:
    """Run the demo. Returns the metrics of its steps after the warm-up."""
    settings = [
        f"run.dir={directory}",
        f"train.steps={steps}",
        "buffer.max_staleness=unbounded",
        "eval.at_end=false",
        *settings,
    ]
    flags = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "tba", "run", str(DEMO), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == steps
    return lines[WARM_UP:]


if __name__ == "__main__":
    main()
