"""Which trajectories to train on: pure functions of the sampling index and a random generator.

Sampling is per group, as in the paper (section 4.2): with probability m the group comes from the most recent
data, otherwise it is chosen by priority; the K trajectories of a prompt always stay together.

A rule is a pair: how the prompt is drawn among all that are eligible, how the trajectories within it. Both use
the same words.

    word       across prompts                                    within the prompt
    uniform    every prompt alike                                every trajectory alike
    recency    recent data no batch had yet, then recent data,   the recent ones alike; if there are none, all
               then any; in each part every prompt alike
    softmax    exp(inverse_temperature x mean reward)            exp(inverse_temperature x reward)
    rank       i^-rank_exponent for the i-th highest mean        i^-rank_exponent for the i-th highest reward,
               reward, of equal ones the older prompt            of equal ones the newer trajectory

The recency rule is (recency, recency). The priority rule is (prompt_priority, trajectory_priority).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tba.buffer.index import Entry, SamplingIndex
from tba.buffer.prompt_board import PromptBoard
from tba.common.quantity import quantity

Priority = Literal["uniform", "recency", "softmax", "rank"]
Replacement = Literal["if_needed", "never", "always"]
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """The sampler's settings; `tba.common.config.BufferSection` documents each."""

    recency_fraction: float
    recency_window: int
    inverse_temperature: float
    max_staleness: int | None
    min_fill: int
    prompt_priority: Priority = "uniform"
    trajectory_priority: Priority = "softmax"
    rank_exponent: float = 1.0
    flat_group_weight: float = 1.0
    replacement: Replacement = "if_needed"
    recency_fraction_final: float | None = None
    recency_anneal_steps: int = 0

    def recency_fraction_at(self, train_step: int) -> float:
        """m for the batch of a training step: linear, then constant. None for the final one keeps the first."""
        first, final = self.recency_fraction, self.recency_fraction_final
        if final is None:
            return first
        if train_step >= self.recency_anneal_steps:
            return final
        return first + (final - first) * train_step / self.recency_anneal_steps

    def need(self, samples: int) -> int:
        """How many entries make a prompt eligible for a group of so many samples."""
        return samples if self.replacement == "never" else 1


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
    train_step: int | None = None,
) -> list[list[Entry]] | Shortage:
    """`groups` different prompts with `samples` entries each, for the given optimiser step.

    The age of data counts from `step`; m is that of `train_step`, which is another one only for a run that trains on
    another run's history.

    The same index, step and generator give the same batch, also from an index that was rebuilt: what is kept
    between calls (`index.board`) saves time and has no say.
    """
    if len(index) < rules.min_fill:
        return Shortage(f"{len(index)} of {quantity(rules.min_fill, 'trajectory', 'trajectories')} for the first fill")
    board = _board(index, rules, step, samples)
    if board.eligible < groups:
        fresh = "" if rules.max_staleness is None else f" at staleness <= {rules.max_staleness}"
        what = "trajectories" if board.need == 1 else f"{board.need} different trajectories"
        return Shortage(f"{board.eligible} of {quantity(groups, 'prompt has', 'prompts have')} {what}{fresh}")
    by_recency = rng.random(groups) < rules.recency_fraction_at(step if train_step is None else train_step)
    chances = rng.random(groups)
    drawn = board.draw(by_recency.tolist(), chances.tolist())
    return [
        _draw_group(index, place, rules, recent, step, samples, rng)
        for place, recent in zip(drawn, by_recency, strict=True)
    ]


def warm_up(index: SamplingIndex, rules: SamplingRules, *, step: int, samples: int) -> None:
    """Build what is kept between batches, so that the first batch need not wait for it."""
    _board(index, rules, step, samples)


def _board(index: SamplingIndex, rules: SamplingRules, step: int, samples: int) -> PromptBoard:
    board, need = index.board, rules.need(samples)
    if board is None or (board.rules, board.need) != (rules, need):
        board = index.board = PromptBoard(index, rules, need)
    board.advance(step)
    return board


def _draw_group(
    index: SamplingIndex,
    place: int,
    rules: SamplingRules,
    recent: bool,
    step: int,
    samples: int,
    rng: np.random.Generator,
) -> list[Entry]:
    priority = "recency" if recent else rules.trajectory_priority
    pool = index.group(place)
    if rules.max_staleness is not None:
        pool = _not_before(step - rules.max_staleness, pool, index)
    if priority == "recency":
        young = _not_before(step - rules.recency_window, pool, index)
        pool = young if len(young) >= rules.need(samples) else pool
    rewards = np.array([index.slots.reward[slot] for slot in pool])
    replace = rules.replacement == "always" or len(pool) < samples
    picks = draw(log_weights(rewards, priority, rules), samples, replace=replace, rng=rng)
    return [index.entry(pool[pick]) for pick in picks]


def _not_before(least: int, slots: list[int], index: SamplingIndex) -> list[int]:
    steps = index.slots.step
    return [slot for slot in slots if steps[slot] >= least]


def log_weights(rewards: Vector, priority: str, rules: SamplingRules) -> Vector:
    """Logarithms of the chances of a prompt's trajectories (oldest first), up to a constant."""
    if priority == "softmax":
        return rules.inverse_temperature * rewards
    if priority == "rank":
        count = len(rewards)
        ranks = np.empty(count)
        ranks[np.lexsort((-np.arange(count), -rewards))] = np.arange(1, count + 1)
        return -rules.rank_exponent * np.log(ranks)
    return np.zeros(len(rewards))


def draw(log_weights: Vector, samples: int, *, replace: bool, rng: np.random.Generator) -> list[int]:
    """Places drawn one after the other with chances proportional to exp(log_weights).

    Without replacement by the Gumbel trick: the largest of log weight plus Gumbel noise are such draws. It
    stays right where the weights themselves would be 0.
    """
    relative = log_weights - log_weights.max()
    if replace:
        sums = np.exp(relative).cumsum()
        return [int(pick) for pick in np.searchsorted(sums, rng.random(samples) * sums[-1], side="right")]
    noisy = relative + rng.gumbel(size=len(relative))
    return [int(pick) for pick in np.argsort(-noisy, kind="stable")[:samples]]
