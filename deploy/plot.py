"""The evaluations of a run, and its plot: reward, held-out accuracy and staleness over optimiser steps."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.common import jsonl
from tba.common.errors import MissingExtra, UsageError
from tba.common.system.durable import write_text

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "eval.jsonl"
PICTURE_FILE = "run.png"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file, [] if there is none. An unfinished last line is skipped."""
    if not path.exists():
        return []
    return [row for _, row in jsonl.read(path, skip_malformed=True)]


def record_evaluations(directory: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add evaluations to the file of a run. They replace earlier ones of the same snapshot on the same prompts."""
    directory.mkdir(parents=True, exist_ok=True)
    all_rows = (*read_json_lines(directory / EVALUATIONS_FILE), *rows)
    merged = {(row["run"], row["version"], row["prompt_set"]): row for row in all_rows}
    lines = [json.dumps(merged[key]) for key in sorted(merged)]
    write_text(directory / EVALUATIONS_FILE, "\n".join(lines) + "\n")


def read_evaluations(directory: Path, run: str) -> list[dict[str, Any]]:
    """Return the evaluations of a run on one set of prompts, by step: the largest set of its newest snapshot."""
    rows = [row for row in read_json_lines(directory / EVALUATIONS_FILE) if row["run"] == run]
    if not rows:
        return []
    chosen = max(rows, key=lambda row: (row["step"], row["prompts"]))["prompt_set"]
    return sorted((row for row in rows if row["prompt_set"] == chosen), key=lambda row: row["step"])


def draw(directory: Path, *, run: str) -> Path:
    """Draw `run.png` in the directory of the run of this name, and return its path.

    Raises UsageError if nothing was trained there.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise MissingExtra("matplotlib", "train") from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    metrics = read_json_lines(directory / METRICS_FILE)
    if not metrics:
        raise UsageError(f"{directory} has no {METRICS_FILE}: train first")
    evaluations = read_evaluations(directory, run)
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
    steps = [row["step"] for row in metrics]
    rewards = [row["reward_mean"] for row in metrics]
    upper.plot(steps, rewards, label="mean reward of the batch", alpha=0.6)
    if evaluations:
        points = [(row["step"], row["accuracy"]) for row in evaluations]
        upper.plot(*zip(*points, strict=True), marker="o", label="held-out greedy accuracy")
    # The same axis for all runs whose rewards are fractions.
    if all(0 <= reward <= 1 for reward in rewards):
        upper.set_ylim(0, 1)
    upper.legend(loc="lower right")
    upper.set_title(run)
    lower.plot(steps, [row["staleness_mean"] for row in metrics], label="mean", color="tab:green")
    lower.plot(steps, [row["staleness_max"] for row in metrics], label="maximum", color="tab:green", alpha=0.35)
    lower.legend(loc="lower right")
    lower.set(xlabel="optimiser step", ylabel="staleness (steps)")
    figure.tight_layout()
    figure.savefig(directory / PICTURE_FILE, dpi=120)
    plt.close(figure)
    return directory / PICTURE_FILE
