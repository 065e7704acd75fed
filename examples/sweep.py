"""Several runs in turn: configurations x settings x seeds. Prints what they reached, and draws a picture for each.

    python examples/sweep.py tba.toml --settings train.learning_rate=1e-5 train.learning_rate=3e-5 --seeds 0 1 2

Each run is `tba run CONFIG` in a directory of its own below --out, and one that has finished is not repeated. A setting
may have several keys, separated by commas. Numbers are means over the seeds: accuracy, with its standard deviation, of
the greedy answers to held-out prompts; the reward of the batches at a quarter, half and the end of the steps (each a
mean over a tenth of them); `reuse_mean` over all steps; seconds from the first step to the last; generated tokens.
"""

import argparse
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from statistics import mean, pstdev

HEADINGS = ("configuration", "setting", "before", "after", "±", "reward ¼", "½", "end", "reuse", "s", "tokens")
TBA = (sys.executable, "-m", "tba")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="+", type=Path, metavar="CONFIG")
    parser.add_argument("--settings", nargs="+", default=[""], help='KEY=VALUE,...; "": the configuration as it is')
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of each run; default: those of the configuration")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    options = parser.parse_args()
    rows = []
    for file in options.configurations:
        drawn = []
        for setting in options.settings:
            runs = [run(file, setting, seed, options) for seed in options.seeds]
            rows.append((name_of(file), setting or "-", *numbers_of([read(one) for one in runs])))
            drawn += runs
        subprocess.run([*TBA, "report", *drawn, "--out", options.out / f"{name_of(file)}.png"], check=True)
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))


def name_of(file: Path) -> str:
    """Return the name of a configuration, or of its directory where many have the same."""
    return file.resolve().parent.name if file.stem in ("demo", "tba") else file.stem


def run(file: Path, setting: str, seed: int, options: argparse.Namespace) -> Path:
    """Train, unless that was done, and return the directory."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{name_of(file)}-{setting or 'default'}-{seed}")
    directory: Path = options.out / name
    if not (directory / "finished").exists():
        steps = [f"train.steps={options.steps}"] if options.steps else []
        sets = [f"run.dir={directory}", f"run.name={name}", f"run.seed={seed}", "eval.at_end=true", *steps]
        sets += filter(None, setting.split(","))
        # A run that was stopped continues.
        resumed = ["--resume"] if (directory / "buffer.sqlite").exists() else []
        subprocess.run([*TBA, "run", file, *resumed, *(part for one in sets for part in ("--set", one))], check=True)
        (directory / "finished").touch()
    return directory


def read(directory: Path) -> list[float]:
    """Return the numbers of a run in the order of the table, without the deviation."""
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    tests = sorted(
        (json.loads(line) for line in (directory / "eval.jsonl").read_text().splitlines()), key=lambda e: e["step"]
    )
    rewards, width = [one.get("reward_mean", 0.0) for one in steps], max(1, len(steps) // 10)
    ends = (len(steps) // 4, len(steps) // 2, len(steps))
    database = sqlite3.connect(f"file:{directory / 'buffer.sqlite'}?mode=ro", uri=True)
    ((tokens,),) = database.execute("SELECT SUM(response_tokens) FROM clients").fetchall()
    database.close()
    return [
        *(one.get("accuracy", one["reward"]) for one in (tests[0], tests[-1])),
        *(mean(rewards[max(0, end - width) : max(1, end)]) for end in ends),
        mean(one.get("reuse_mean", 0.0) for one in steps),
        steps[-1]["time"] - steps[0]["time"],
        tokens or 0,
    ]


def numbers_of(runs: list[list[float]]) -> list[str]:
    """Return the cells of a row, from the numbers of its runs."""
    before, after, *rest, seconds, tokens = map(mean, zip(*runs, strict=True))
    spread = pstdev(one[1] for one in runs)
    return [
        f"{before:.1%}",
        f"{after:.1%}",
        f"{spread:.1%}",
        *(f"{one:.2f}" for one in rest),
        f"{seconds:.0f}",
        f"{tokens:,.0f}",
    ]


if __name__ == "__main__":
    main()
