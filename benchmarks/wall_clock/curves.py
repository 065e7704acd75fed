"""`step_ratio` over what it depends on, with the runs of docs/evidence.md marked."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.wall_clock.pace import PACES, step_ratio

# How many times as soon the runs with this pace reached 55 %.
_RUNS = {"long": (4.1, 4.2), "short": (2.0,)}
# Decoding on an H100 as AISimulate projects it, without overheads.
_PROJECTED = {"long": {"decode": 0.0021}, "short": {"decode": 0.00575, "decode_each": 3.1e-5}}
# The share of the peak that the paces assume for a step, and those that 1.5 B parameters reached on an H200 (docs/gpu).
_ASSUMED, _MEASURED = 0.4, (0.17, 0.21)
# A field of the pace, its name with a unit, how many of the pace's units that is, and values.
_AXES = (
    ("decode", "decoding of one token, ms", 1e-3, np.linspace(1, 10, 60)),
    ("step", "the trainer's step, s", 1, np.linspace(10, 120, 60)),
    ("max_tokens", "cut-off, 1,000 tokens (the step stays)", 1000, np.linspace(1, 50, 60)),
)


def draw_ratios(path: Path) -> None:
    """Draw how many times as fast an asynchronous step is by the pace alone, with seven searchers.

    Stars are the runs, bands the steps at the measured shares of the peak.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, plots = plt.subplots(1, len(_AXES), figsize=(13, 4), sharey=True)
    for (name, pace), colour in zip(PACES.items(), ("C1", "C0"), strict=True):
        slow = replace(pace, step=pace.step * _ASSUMED / np.mean(_MEASURED))
        projected = replace(pace, **_PROJECTED[name])
        kinds = (pace, "-", ""), (projected, "--", ", projected decoding"), (slow, ":", ", measured step")
        for plot, (field, label, unit, values) in zip(plots, _AXES, strict=True):
            for kind, line, text in kinds:
                ratios = [
                    step_ratio(replace(kind, **{field: value * unit}), searchers=7, responses=256) for value in values
                ]
                plot.plot(values, ratios, line, color=colour, label=name + text)
            x = getattr(pace, field) / unit
            plot.plot([x] * len(_RUNS[name]), _RUNS[name], "*", color=colour, markersize=11)
            if field == "step":
                plot.axvspan(*(x * _ASSUMED / share for share in _MEASURED), color=colour, alpha=0.15)
            plot.set(xlabel=label, ylim=(1, 6))
    plots[0].set_ylabel("asynchronous steps per synchronous one")
    plots[1].legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
