"""The panels: which settings are compared with each other, and with which learning rates.

A panel has one column for each kind of data and one row for each objective. The first column is fresh data, except in
ablations, which vary one setting of the buffer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.off_policy.results import Results
from benchmarks.off_policy.setting import SWEEP_SEEDS, Setting
from benchmarks.off_policy.tasks import rate_and_beta

RATES = (1e-5, 3e-5, 1e-4, 3e-4)
OBJECTIVES = (
    "tb",
    "tb_stale",
    "tba_prime",
    "tba_prime:mean_kl=policy",
    "dr_grpo",
    "ppo_clip",
    "oapl",
    "online_dpo",
)
FRESH = "fresh"


@dataclass(frozen=True, slots=True)
class Panel:
    """`columns` are the changes of a setting by the label of the column; `paper` is what the paper says on it.

    `rate` is used where no sweep chose one; by default it is the task's.
    """

    columns: dict[str, dict[str, Any]]
    objectives: Sequence[str] = OBJECTIVES
    rate: float | None = None
    paper: str = ""
    common: dict[str, Any] = field(default_factory=dict)

    def template(self, task: str, objective: str, column: str) -> Setting:
        """Return the setting of a cell, with the rate that no sweep chose and the first sweep seed."""
        rate, task_beta = rate_and_beta(task)
        base = Setting(task=task, objective=objective, rate=self.rate or rate, seed=SWEEP_SEEDS[0], beta=task_beta)
        beta = {key: factor * base.beta for key, factor in self.columns[column].items() if key.startswith("beta")}
        return base.replace(**self.common | self.columns[column] | beta)


TLDR_BUFFER: dict[str, Any] = {"sync_every": 10, "recency": 0.5, "generated": 20, "fill": 62, "priority": 1.0}
GSM8K_BUFFER: dict[str, Any] = {"sync_every": 2, "recency": 0.95, "generated": 24, "fill": 4, "prompts": 7}
# A model that the demo has trained: docs/evidence.md has the commands.
TEACHER = "build/evidence/teacher"
# The buffer that ablations vary: the one of TL;DR, with smaller groups and as many responses as are trained on.
_ABLATED: dict[str, Any] = {"sync_every": 10, "recency": 0.5, "generated": 8, "fill": 16}
_ABLATED_OBJECTIVES = ("tb", "tb_stale")


def _ablation(columns: dict[str, dict[str, Any]], paper: str, objectives: Sequence[str] = _ABLATED_OBJECTIVES) -> Panel:
    return Panel(columns, objectives, rate=3e-5, paper=paper, common=_ABLATED)


# Columns that name beta give it as a multiple of the task's.
ABLATIONS = {
    "m": _ablation(
        {f"m = {m}": {"recency": m} for m in (0.25, 0.5, 0.75, 1.0)},
        "TL;DR, k = 10: win rate 0.67, 0.82 and 0.80 with m = 0.4, 0.5 and 0.6; GSM8K: m must be fairly large",
    ),
    "k": _ablation({f"k = {k}": {"sync_every": k} for k in (2, 4, 10)}, "GSM8K: smaller k is better"),
    "samples": _ablation(
        {f"K = {k}": {"samples": k, "generated": k, "prompts": 64 // k} for k in (4, 8, 16)},
        "GSM8K, the same batch: 54.6 % with K = 20, 54.9 % with K = 40",
    ),
    "beta": _ablation(
        {
            "constant": {},
            "3 to 1 times, half of the run": {"beta_first": 3.0, "anneal_steps": 64},
            "constant, 3 times": {"beta": 3.0},
            "constant, 0.3 times": {"beta": 0.3},
        },
        "annealing a large beta gives stability and accuracy; a smaller final beta is better until it is unstable",
    ),
    "reset": _ablation(
        {"never": {}, "every 50 steps": {"reset_every": 50}},
        "TBA' resets the reference every 50 steps instead of annealing beta",
        ("tb", "tba_prime"),
    ),
    "priority": _ablation(
        {
            "uniform": {"generated": 16},
            "softmax(r)": {"generated": 16, "priority": 1.0},
            "softmax(4 r)": {"generated": 16, "priority": 4.0},
        },
        "TL;DR draws responses by softmax(r), GSM8K uniformly; no comparison is given",
    ),
    "ess": Panel(
        {"D = 64": {"staleness": 64}, "D = 64, rate by ESS": {"staleness": 64, "rate_by_ess": True}},
        ("tb", "dr_grpo", "tb_stale"),
        paper="not this one: VCPO, arXiv 2602.17616, scales the rate by the root of the effective sample ratio",
    ),
    "penalty": Panel(
        {"D = 64": {"staleness": 64}, "D = 64, penalty of 0 to 0.05": {"staleness": 64, "penalty": 0.05}},
        ("tb", "tb_stale", "tb_stale:imitation=0.5,reward_floor=-0.05"),
    ),
}
PANELS = {
    "top_p": Panel({FRESH: {}, "top-p 0.9": {"top_p": 0.9}}, ("tb_stale",), common={"steps": 64}),
    "explorers": Panel(
        {FRESH: {}, "D = 4": {"staleness": 4}}
        | {f"D = 4, {kind} explorer": {"staleness": 4, "explorer": kind} for kind in ("weak", "strong")},
        ("tb", "tb_stale", "tba_prime", "dr_grpo"),
        common={"steps": 64},
    ),
    "staleness": Panel({FRESH: {}} | {f"D = {age}": {"staleness": age} for age in (4, 16, 64, 256)}),
    "long": Panel({FRESH: {}} | {f"D = {age}": {"staleness": age} for age in (64, 256)}, common={"steps": 512}),
    "buffer": Panel(
        {FRESH: {}, "k = 10, m = 0.5": TLDR_BUFFER, "k = 2, m = 0.95": GSM8K_BUFFER}, common={"samples": 20}
    ),
    "teacher": Panel(
        {
            FRESH: {},
            "teacher": {"teacher": TEACHER},
            "teacher, D = 64": {"teacher": TEACHER, "staleness": 64},
        },
        ("tb", "tb_stale", "distill"),
        paper="not this one: on-policy distillation",
    ),
} | ABLATIONS


@dataclass(frozen=True, slots=True)
class Cell:
    """One rate of one objective on one kind of data. `kind` says where the rate is from: "fresh", "own" or "given"."""

    objective: str
    column: str
    kind: str
    setting: Setting

    def of_seeds(self, seeds: Iterable[int]) -> list[Setting]:
        return [self.setting.replace(seed=seed) for seed in seeds]


def sweep(panel: Panel, task: str, objectives: Sequence[str], columns: Sequence[str]) -> Iterator[Setting]:
    """Yield the runs that choose a rate for each objective and column, seed by seed."""
    for seed in SWEEP_SEEDS:
        for objective in objectives:
            for column in columns:
                template = panel.template(task, objective, column)
                yield from (template.replace(rate=rate, seed=seed) for rate in RATES)


def best_rate(results: Results, template: Setting) -> float | None:
    """Return the rate with the highest final reward on the problems for choosing, the mean over the sweep's seeds.

    None if a run of the sweep is missing.
    """
    finals = {}
    for rate in RATES:
        runs = [template.replace(rate=rate, seed=seed) for seed in SWEEP_SEEDS]
        if any(setting not in results for setting in runs):
            return None
        finals[rate] = np.mean([results[setting].reward[-1] for setting in runs])
    return max(finals, key=finals.__getitem__)


def cells(
    panel: Panel, results: Results, task: str, objectives: Sequence[str], columns: Sequence[str]
) -> Iterator[Cell]:
    """Yield the cells of a panel: the rate of fresh data in every column, then each column's own rate if it differs."""
    for column in columns:
        for objective in objectives:
            template = panel.template(task, objective, column)
            fresh = best_rate(results, panel.template(task, objective, FRESH)) if FRESH in panel.columns else None
            first = template.replace(rate=fresh or template.rate)
            yield Cell(objective, column, "given" if fresh is None else FRESH, first)
            own = best_rate(results, template)
            if own is not None and own != first.rate:
                yield Cell(objective, column, "own", template.replace(rate=own))
