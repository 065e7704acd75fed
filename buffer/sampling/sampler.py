"""The sampler: draws batches from the sampling index.

Sampling is per group, as in the paper (section 4.2): with probability m the group comes from the most recent data,
otherwise it is chosen by priority; the K trajectories of a group are all of one prompt.

A rule is a pair: how the prompt is drawn among all that are eligible, and how the trajectories within it. Both use
the same words.

    word       across prompts                                    within the prompt
    uniform    every prompt alike                                every trajectory alike
    recency    by tiers of age, the newest first; in a tier      those of the newest tier that has enough of them,
               data in no batch yet, then the rest; in each      alike
               part every prompt alike
    softmax    exp(inverse_temperature x mean reward)            exp(inverse_temperature x reward)
    rank       1 / i for the i-th highest mean                   1 / i for the i-th highest reward,
               reward, of equal ones the older prompt            of equal ones the newer trajectory

The recency rule is (recency, recency). The priority rule is (prompt_priority, trajectory_priority).

The first tier of age is the recency window, extended to the newest data if that is older. The next tiers end 1, 2, 4,
8, ... steps behind it. So the staleness of what is drawn grows with the lag of the data, at any lag.

Across prompts, the chance of one with flat rewards (all equal) is multiplied by `flat_group_weight`; with a weight of
0 such prompts come after all others of the same recency. By rank, they come after all others if it is below 1. Of the
same recency, or by rank of all, the `varied_fraction` whose rewards vary most comes first, with all of equal variance.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tba.buffer.sampling.index import UNTRAINED, Entry, SamplingIndex
from tba.common.config.buffer import BufferSection
from tba.common.errors import quantity
from tba.common.rewards import are_equal, level

Priority = Literal["uniform", "recency", "softmax", "rank"]
NEVER = -(1 << 31)
# Prompts that are read from the index together: their rows are a list of Python integers for a moment.
_CHUNK = 1024
Mask = npt.NDArray[np.bool_]


class PromptTable:
    """A summary of every prompt's entries, for groups that need `need` different entries of a prompt.

    newest_step      the step of the need-th newest entry: a prompt with it in a window has `need` entries there
    untrained_step   the newest step of the entries that no recorded batch has
    score            the mean reward of the entries
    flat             whether all rewards are equal
    variance         the variance of the rewards of the entries

    The steps are NEVER where there is no such entry, and also beyond the last prompt: columns grow ahead.

    Invariant: after `refresh` a row is a function of the prompt's present entries alone, in the order of their ids. It
    does not depend on how the index came to have them.
    """

    def __init__(self, index: SamplingIndex, need: int) -> None:
        self.need = need
        self._index = index
        self._seen_changes = 0
        self.newest_step = np.empty(0, np.int32)
        self.untrained_step = np.empty(0, np.int32)
        self.score = np.empty(0, np.float64)
        self.flat = np.empty(0, np.bool_)
        self.variance = np.empty(0, np.float64)

    def refresh(self) -> None:
        """Summarise the prompts that have changed since the last refresh."""
        if self._seen_changes == self._index.changes:
            return
        changed = self._index.changed_since(self._seen_changes)
        self._grow()
        for start in range(0, len(changed), _CHUNK):
            self._summarise(changed[start : start + _CHUNK])
        self._seen_changes = self._index.changes

    def with_entries_since(self, step: int, *, untrained: bool = False) -> Mask:
        """Return the prompts with `need` entries of at least this step; `untrained`: and one such in no batch."""
        least = max(NEVER + 1, step)
        found = self.newest_step >= least
        return found & (self.untrained_step >= least) if untrained else found

    def _grow(self) -> None:
        prompts, size = len(self._index.prompt_ids), len(self.score)
        if prompts <= size:
            return
        more = max(prompts - size, size // 4)
        unused = np.full(more, NEVER, np.int32)
        self.newest_step = np.concatenate([self.newest_step, unused])
        self.untrained_step = np.concatenate([self.untrained_step, unused])
        self.score = np.concatenate([self.score, np.zeros(more)])
        self.flat = np.concatenate([self.flat, np.zeros(more, np.bool_)])
        self.variance = np.concatenate([self.variance, np.zeros(more)])

    def _summarise(self, prompts: npt.NDArray[np.intp]) -> None:
        index = self._index
        rows, counts = index.rows(prompts.tolist())
        steps, rewards = index.column("step")[rows], index.column("reward")[rows]
        is_untrained = index.column("state")[rows] == UNTRAINED
        ends = counts.cumsum()
        owners = np.repeat(np.arange(len(prompts)), counts)

        enough = counts >= self.need
        newest = np.full(len(prompts), NEVER, np.int32)
        newest[enough] = steps[np.lexsort((steps, owners))][ends[enough] - self.need]
        self.newest_step[prompts] = newest

        # `reduceat` must not see empty segments. Those of the other prompts follow each other without a gap.
        held = counts > 0
        starts = (ends - counts)[held]
        untrained, flat = np.full(len(prompts), NEVER, np.int32), np.ones(len(prompts), np.bool_)
        if len(rows):
            untrained[held] = np.maximum.reduceat(np.where(is_untrained, steps, NEVER), starts)
            flat[held] = are_equal(np.minimum.reduceat(rewards, starts), np.maximum.reduceat(rewards, starts))
        self.untrained_step[prompts] = untrained
        self.flat[prompts] = flat
        # `bincount` adds one after the other, oldest first: the sum is the same to the last bit after a rebuild.
        mean = np.bincount(owners, rewards, len(prompts)) / np.maximum(counts, 1)
        self.score[prompts] = mean
        squares = np.bincount(owners, np.square(rewards - mean[owners]), len(prompts))
        self.variance[prompts] = np.where(flat, 0.0, squares / np.maximum(counts, 1))


Vector = npt.NDArray[np.float64]
Ordinals = npt.NDArray[np.intp]
# Group sizes for which a summary of all prompts is kept: the trainer's, and the one that leasing counts with.
_TABLES = 2


@dataclass(frozen=True, slots=True)
class Shortage:
    """The reason why no batch can be sampled yet, and how much of what it needs is there."""

    reason: str
    have: int


@dataclass(frozen=True, slots=True)
class Draw:
    """The groups of a batch. `recency_groups` came by recency; `recency_missed` have no data in the window (steps)."""

    groups: list[list[Entry]]
    recency_window: int
    recency_groups: int
    recency_missed: int


class Sampler:
    """Draws batches from the index, which does not know it.

    Invariant: the same index, step and generator give the same batch, also after the index was rebuilt.
    """

    def __init__(self, index: SamplingIndex, rules: BufferSection, *, publish_every: int = 1, samples: int = 1) -> None:
        """`samples` is the expected size of a group: its table is prepared, so that no batch waits for that.

        `publish_every` is the trainer's: a recency window of "auto" depends on it.
        """
        self.index = index
        self.rules = rules
        self._publish_every = publish_every
        self._tables: dict[int, PromptTable] = {}
        # The last answer of `untrained_prompts`: each searcher that asks for leases needs the same one.
        self._untrained: tuple[tuple[int, int, int], npt.NDArray[np.int64]] = ((-1, 0, 0), np.empty(0, np.int64))
        self._table(self.need(samples))

    def need(self, samples: int) -> int:
        """Return how many entries make a prompt eligible for a group of `samples`."""
        return samples if self.rules.replacement == "never" else 1

    def sample(self, *, step: int, groups: int, samples: int, rng: np.random.Generator) -> Draw | Shortage:
        """Draw `groups` different prompts with `samples` entries each, for an optimiser step, from which age counts."""
        rules = self.rules
        if len(self.index) < rules.min_fill:
            least = quantity(rules.min_fill, "trajectory", "trajectories")
            return Shortage(f"{len(self.index)} of {least} for the first fill", len(self.index))
        table = self._table(self.need(samples))
        oldest = NEVER if rules.max_staleness == "unbounded" else step - rules.max_staleness
        eligible = table.with_entries_since(oldest)
        if (found := int(np.count_nonzero(eligible))) < groups:
            limit = "" if rules.max_staleness == "unbounded" else f" at staleness <= {rules.max_staleness}"
            what = "trajectories" if table.need == 1 else f"{table.need} different trajectories"
            return Shortage(f"{found} of {quantity(groups, 'prompt has', 'prompts have')} {what}{limit}", found)
        fraction = rules.recency_fraction
        by_recency: list[bool] = (rng.random(groups) < fraction).tolist()
        window, ages = self._ages(table, eligible, step)
        prompts = self._draw_prompts(table, eligible, by_recency, ages, rng)
        recent = [prompt for prompt, is_recent in zip(prompts, by_recency, strict=True) if is_recent]
        return Draw(
            [
                self._draw_group(prompt, is_recent, oldest, ages, samples, rng)
                for prompt, is_recent in zip(prompts, by_recency, strict=True)
            ],
            recency_window=window,
            recency_groups=len(recent),
            recency_missed=int(np.count_nonzero(table.newest_step[recent] < step - window)),
        )

    def untrained_prompts(self, min_step: int, need: int) -> npt.NDArray[np.int64]:
        """Return the ids of prompts with `need` entries of at least this step, one of them in no recorded batch."""
        asked = (self.index.changes, min_step, need)
        if asked != self._untrained[0]:
            found = np.flatnonzero(self._table(need).with_entries_since(min_step, untrained=True))
            self._untrained = (asked, np.array(self.index.prompt_ids, np.int64)[found])
        return self._untrained[1]

    def _ages(self, table: PromptTable, eligible: Mask, step: int) -> tuple[int, list[int]]:
        """Return the recency window of a batch in steps, and the oldest step of each tier of age, newest first."""
        asked = self.rules.recency_window
        lag = max(0, step - int(table.newest_step[eligible].max()))
        window = lag + self._publish_every if asked == "auto" else asked
        newest = step - max(window, lag)
        tiers = [newest]
        # No data is of a step before 0: the last tier is all that is left.
        while tiers[-1] > 0:
            tiers.append(newest - (1 << len(tiers) - 1))
        return window, tiers

    def _table(self, need: int) -> PromptTable:
        if need not in self._tables:
            if len(self._tables) == _TABLES:
                self._tables.pop(next(iter(self._tables)))
            self._tables[need] = PromptTable(self.index, need)
        self._tables[need].refresh()
        return self._tables[need]

    # ------------------------------------------------------------ across prompts

    def _draw_prompts(
        self, table: PromptTable, eligible: Mask, by_recency: list[bool], ages: list[int], rng: np.random.Generator
    ) -> list[int]:
        """Return the ordinals of different prompts, one for each group: by the recency rule, or by priority.

        The order of a rule lists what it draws without replacement. A group receives the first prompt of its rule's
        order that no earlier group received. Its chances are then the declared ones, among the prompts that are left:
        an order by Gumbel noise is the order of arrival in a race of exponential clocks. These have no memory, and the
        clocks of one rule are independent of the prompts that the other rule has drawn.
        """
        words: list[Priority] = ["recency" if recent else self.rules.prompt_priority for recent in by_recency]
        orders: dict[Priority, Iterator[int]] = {
            word: iter(self._order(word, table, eligible, len(words), ages, rng)) for word in dict.fromkeys(words)
        }
        drawn: dict[int, None] = {}
        for word in words:
            drawn[next(prompt for prompt in orders[word] if prompt not in drawn)] = None
        return list(drawn)

    def _order(
        self, word: Priority, table: PromptTable, eligible: Mask, count: int, ages: list[int], rng: np.random.Generator
    ) -> list[int]:
        """Return the first `count` prompts that a rule draws without replacement, in this order."""
        rules = self.rules
        if word == "rank":
            members = map(np.flatnonzero, self._tiers(word, table, eligible, ages))
            # The highest score first, of equal ones the lowest ordinal.
            ranked = np.concatenate([each[np.argsort(-level(table.score[each]), kind="stable")] for each in members])
            return list(ranked[draw_positions(_by_rank(len(ranked)), count, replace=False, rng=rng)].tolist())
        temperature = rules.inverse_temperature if word == "softmax" else 0.0
        log_flat = math.log(rules.flat_group_weight or 1.0)
        found: list[int] = []
        for tier in self._tiers(word, table, eligible, ages):
            prompts = np.flatnonzero(tier)
            log_weights = temperature * table.score[prompts] + log_flat * table.flat[prompts]
            found += prompts[draw_positions(log_weights, count - len(found), replace=False, rng=rng)].tolist()
            if len(found) == count:
                break
        return found

    def _tiers(self, word: Priority, table: PromptTable, eligible: Mask, ages: list[int]) -> Iterator[Mask]:
        """Yield the eligible prompts in tiers: one has no chance while a prompt of an earlier tier is left.

        Only for ranks a later tier has chances, those of the lower ranks.
        """
        flat_weight = self.rules.flat_group_weight
        by_age = _by_age(table, eligible, ages) if word == "recency" else [eligible]
        for tier in (part for aged in by_age for part in _by_variance(table, aged, self.rules.varied_fraction)):
            if flat_weight == 0 or (word == "rank" and flat_weight < 1):
                yield tier & ~table.flat
                yield tier & table.flat
            else:
                yield tier

    # ------------------------------------------------------------ within a prompt

    def _draw_group(
        self, prompt: int, recent: bool, oldest: int, ages: list[int], samples: int, rng: np.random.Generator
    ) -> list[Entry]:
        index, rules = self.index, self.rules
        word: Priority = "recency" if recent else rules.trajectory_priority
        rows, _ = index.rows([prompt])
        steps = index.column("step")[rows]
        is_fresh = steps >= oldest
        rows, steps = rows[is_fresh], steps[is_fresh]
        if word == "recency":
            needed = np.sort(steps)[-self.need(samples)]
            rows = rows[steps >= next(tier for tier in ages if tier <= needed)]
        rewards = index.column("reward")[rows]
        replace = rules.replacement == "always" or len(rows) < samples
        picks = draw_positions(_log_weights(rewards, word, rules), samples, replace=replace, rng=rng)
        return [index.entry(row) for row in rows[picks].tolist()]


def _by_age(table: PromptTable, eligible: Mask, ages: list[int]) -> Iterator[Mask]:
    """Yield the eligible prompts by tiers of age: in each, those with data in no batch yet, then the others."""
    left = eligible
    for least in ages:
        found = left & table.with_entries_since(least)
        unused = found & table.with_entries_since(least, untrained=True)
        yield unused
        yield found & ~unused
        left = left & ~found


def _by_variance(table: PromptTable, tier: Mask, fraction: float) -> Iterator[Mask]:
    """Yield the prompts of a tier, first the share whose rewards vary most."""
    if fraction < 1 and (variance := table.variance[tier]).size:
        count = math.ceil(fraction * len(variance))
        # Equal ones differ by rounding, with the order of the rewards.
        most = tier & (table.variance >= np.partition(variance, -count)[-count] * (1 - 1e-9))
        yield most
        tier = tier & ~most
    yield tier


def _log_weights(rewards: Vector, word: Priority, rules: BufferSection) -> Vector:
    """Return the logarithms of the chances of a prompt's trajectories (oldest first), up to a constant."""
    if word == "softmax":
        return rules.inverse_temperature * rewards
    if word == "rank":
        log_weights = np.empty(len(rewards))
        log_weights[np.lexsort((-np.arange(len(rewards)), -level(rewards)))] = _by_rank(len(rewards))
        return log_weights
    return np.zeros(len(rewards))


def _by_rank(count: int) -> Vector:
    log_weights: Vector = -np.log(np.arange(1, count + 1))
    return log_weights


def draw_positions(log_weights: Vector, count: int, *, replace: bool, rng: np.random.Generator) -> Ordinals:
    """Return positions drawn one after the other with chances proportional to exp(log_weights), at most `count`.

    Without replacement by the Gumbel trick (Vieira, 2014): the positions of the largest sums of log weight and Gumbel
    noise, in descending order, are such draws. It stays right where weights are so different that all but the largest
    are 0 in floating point.
    """
    drawn: Ordinals
    if replace:
        sums = np.exp(log_weights - log_weights.max()).cumsum()
        drawn = np.searchsorted(sums, rng.random(count) * sums[-1], side="right")
    else:
        # Relative to the largest: added to a huge number, the noise would be rounded away.
        noisy = log_weights - log_weights.max(initial=-np.inf) + rng.gumbel(size=len(log_weights))
        top = np.argpartition(noisy, -count)[-count:] if count < len(noisy) else np.arange(len(noisy))
        drawn = top[np.argsort(-noisy[top])]
    return drawn
