"""Which trajectories to train on: pure functions of the sampling index and a random generator.

Sampling is per group, as in the paper (section 4.2): with probability m the group comes from the most
recent data, otherwise it is chosen by reward; the K trajectories of a prompt always stay together.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tba.buffer.index import Entry, SamplingIndex


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """The sampler's settings; `tba.common.config.BufferSection` documents each."""

    recency_fraction: float
    recency_window: int
    inverse_temperature: float
    max_staleness: int | None
    min_fill: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """There is not enough to sample from, in words."""

    reason: str


def sample_groups(
    index: SamplingIndex,
    rules: SamplingRules,
    *,
    step: int,
    groups: int,
    samples: int,
    rng: np.random.Generator,
) -> list[list[Entry]] | Shortage:
    """`groups` prompts with `samples` entries each, for the given optimiser step.

    Prompts are drawn uniformly without replacement. The recency rule takes prompts with recent data that
    was never trained on, then those with recent data, then any; the reward rule takes any prompt.
    """
    eligible = _eligible(index, rules, step)
    if len(index) < rules.min_fill:
        return Shortage(f"{len(index)} of {rules.min_fill} trajectories for the first fill")
    if len(eligible) < groups:
        fresh = "" if rules.max_staleness is None else f" at staleness <= {rules.max_staleness}"
        return Shortage(f"{len(eligible)} of {groups} prompts have trajectories{fresh}")
    return [
        _draw_recent(entries, rules, step, samples, rng) if recent else _draw_by_reward(entries, rules, samples, rng)
        for entries, recent in _choose_prompts(eligible, rules, step, groups, rng)
    ]


def _eligible(index: SamplingIndex, rules: SamplingRules, step: int) -> dict[int, list[Entry]]:
    limit = rules.max_staleness
    found = {}
    for prompt in index.prompts():
        entries = [entry for entry in index.entries(prompt) if limit is None or step - entry.step <= limit]
        if entries:
            found[prompt] = entries
    return found


def _choose_prompts(
    eligible: dict[int, list[Entry]], rules: SamplingRules, step: int, groups: int, rng: np.random.Generator
) -> list[tuple[list[Entry], bool]]:
    by_recency = [eligible[prompt] for prompt in _recency_order(eligible, rules, step, rng)]
    by_reward = [eligible[prompt] for prompt in rng.permutation(list(eligible))]
    chosen: list[tuple[list[Entry], bool]] = []
    taken: set[int] = set()
    for recent in rng.random(groups) < rules.recency_fraction:
        queue = by_recency if recent else by_reward
        entries = next(entries for entries in queue if entries[0].prompt not in taken)
        taken.add(entries[0].prompt)
        chosen.append((entries, bool(recent)))
    return chosen


def _recency_order(
    eligible: dict[int, list[Entry]], rules: SamplingRules, step: int, rng: np.random.Generator
) -> list[int]:
    """All prompts: those with recent untrained data first, then recent, then the rest; each part shuffled."""

    def rank(prompt: int) -> int:
        recent = _recent(eligible[prompt], rules, step)
        return 2 if not recent else 1 if all(entry.trained for entry in recent) else 0

    return sorted((int(prompt) for prompt in rng.permutation(list(eligible))), key=rank)


def _recent(entries: list[Entry], rules: SamplingRules, step: int) -> list[Entry]:
    return [entry for entry in entries if step - entry.step <= rules.recency_window]


def _draw_recent(
    entries: list[Entry], rules: SamplingRules, step: int, samples: int, rng: np.random.Generator
) -> list[Entry]:
    pool = _recent(entries, rules, step) or entries
    return _draw(pool, np.full(len(pool), 1 / len(pool)), samples, rng)


def _draw_by_reward(entries: list[Entry], rules: SamplingRules, samples: int, rng: np.random.Generator) -> list[Entry]:
    scores = rules.inverse_temperature * np.array([entry.reward for entry in entries])
    weights = np.exp(scores - scores.max())
    return _draw(entries, weights / weights.sum(), samples, rng)


def _draw(
    pool: list[Entry], probabilities: npt.NDArray[np.float64], samples: int, rng: np.random.Generator
) -> list[Entry]:
    """Without replacement if the pool is large enough, else with, as in the paper."""
    enough = np.count_nonzero(probabilities) >= samples
    picks = rng.choice(len(pool), size=samples, replace=not enough, p=probabilities)
    return [pool[pick] for pick in picks]
