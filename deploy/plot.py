"""The plot of a run: reward, held-out accuracy and staleness over optimiser steps."""

from pathlib import Path

from tba.common.errors import MissingExtra, UsageError
from tba.common.evaluations import read_evaluations, read_json_lines

METRICS_FILE = "metrics.jsonl"
PICTURE_FILE = "run.png"


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
    if any("accuracy" in row for row in evaluations):
        points = [(row["step"], row["accuracy"]) for row in evaluations if "accuracy" in row]
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
