"""What the sampler knows of each prompt at an optimiser step, kept up to date from batch to batch.

Invariant: after `advance(step)` every prompt stands as the index says it does at that step. What it costs is
in proportion to the prompts that changed, or grew out of a window, since the last call: no scan of all.
"""

from array import array
from typing import TYPE_CHECKING

from tba.buffer.prompt_lotteries import Lottery, RankedPrompts, Standing, WeightedPrompts
from tba.buffer.slots import LIVE

if TYPE_CHECKING:
    from tba.buffer.index import SamplingIndex
    from tba.buffer.policy import SamplingRules

_NEVER = -(1 << 31)


class PromptBoard:
    """The eligible prompts, in a lottery for each of the two rules (one for both if they are the same).

    Eligible is a prompt with `need` entries within the staleness limit: its need-th newest step decides.
    """

    def __init__(self, index: "SamplingIndex", rules: "SamplingRules", need: int) -> None:
        self.rules, self.need = rules, need
        self.eligible = 0
        self._index = index
        self._changes = index.follow("board")
        self._recent: Lottery = _by_recency(rules)
        self._priority = self._recent if rules.prompt_priority == "recency" else _by_priority(rules)
        self._lotteries = [self._recent] if self._priority is self._recent else [self._recent, self._priority]
        self._step: int | None = None
        self._newest = array("i")  # by place, as the next five: step of the need-th newest entry
        self._untaken = array("i")  # newest step never taken for a batch
        self._score = array("d")
        self._flat = bytearray()
        self._in = bytearray()
        self._due = array("q")  # the step at which the standing changes by age alone
        self._calendar: dict[int, array[int]] = {}  # places by due step; outdated if self._due says otherwise

    def advance(self, step: int) -> None:
        """Bring every prompt's standing to this step. Going back looks at all of them."""
        if self._step is None or step < self._step:
            changed = array("i", range(self._index.places))
            self._changes.drain()
            self._calendar.clear()
            self._due = array("q", [_NEVER]) * len(self._due)
        else:
            changed = self._changes.drain()
        self._step = step
        self._extend()
        for place in changed:
            self._look_at(place)
            self._stand(place, step)
        for due in sorted(due for due in self._calendar if due <= step):
            for place in self._calendar.pop(due):
                if self._due[place] == due:
                    self._stand(place, step)

    def catch_up(self) -> None:
        """Look now at what has changed, so that the next `advance` need not."""
        if self._step is not None:
            self.advance(self._step)

    def draw(self, by_recency: list[bool], chances: list[float]) -> list[int]:
        """Different places, one for each pair of (recency or priority rule, uniform number from [0, 1)).

        One that is drawn again is kept out from then on, and what is left of the number draws another: the chances are
        those of keeping each out at once, of which most would be for nothing.
        """
        places: dict[int, None] = {}  # in their order
        try:
            for recent, chance in zip(by_recency, chances, strict=True):
                lottery = self._recent if recent else self._priority
                place, rest = lottery.draw(chance)
                while place in places:
                    lottery.hold(place)
                    place, rest = lottery.draw(rest)
                places[place] = None
        finally:
            for lottery in self._lotteries:
                lottery.release()
        return list(places)

    def buffer_bytes(self) -> int:
        """Memory of the arrays, growth slack included."""
        columns = [self._newest, self._untaken, self._score, self._flat, self._in, self._due]
        flat = sum(column.__sizeof__() for column in [*columns, *self._calendar.values()])
        return flat + sum(lottery.buffer_bytes() for lottery in self._lotteries)

    def _extend(self) -> None:
        more = self._index.places - len(self._newest)
        for column in (self._newest, self._untaken, self._due):
            column.extend([_NEVER] * more)
        self._score.extend([0.0] * more)
        self._flat.extend(bytes(more))
        self._in.extend(bytes(more))

    def _look_at(self, place: int) -> None:
        """Read a prompt's entries anew."""
        slots, group = self._index.slots, self._index.group(place)
        steps = [slots.step[slot] for slot in group]
        rewards = [slots.reward[slot] for slot in group]
        self._newest[place] = sorted(steps)[-self.need] if len(group) >= self.need else _NEVER
        untaken = [slots.step[slot] for slot in group if slots.state[slot] == LIVE]
        self._untaken[place] = max(untaken, default=_NEVER)
        self._score[place] = sum(rewards) / len(rewards) if group else 0.0
        self._flat[place] = not group or min(rewards) == max(rewards)

    def _stand(self, place: int, step: int) -> None:
        """Enter a prompt with its standing at this step, or take it out."""
        newest, limit = self._newest[place], self.rules.max_staleness
        eligible = newest != _NEVER and (limit is None or step - newest <= limit)
        self.eligible += eligible - self._in[place]
        self._in[place] = eligible
        if not eligible:
            self._due[place] = _NEVER
            for lottery in self._lotteries:
                lottery.leave(place)
            return
        age, due = self._age(place, step)
        standing = Standing(age, self._score[place], bool(self._flat[place]))
        for lottery in self._lotteries:
            lottery.enter(place, standing)
        if due is not None and due != self._due[place]:
            self._calendar.setdefault(due, array("i")).append(place)
        self._due[place] = _NEVER if due is None else due

    def _age(self, place: int, step: int) -> tuple[int, int | None]:
        """(age as in Standing, the step at which the prompt gets older or drops out; None for never)."""
        window, limit = self.rules.recency_window, self.rules.max_staleness
        newest = self._newest[place]
        unseen = min(newest, self._untaken[place])
        if step - unseen <= window:
            age, end = 0, unseen + window
        elif step - newest <= window:
            age, end = 1, newest + window
        else:
            age, end = 2, None
        last = end if limit is None else newest + limit if end is None else min(end, newest + limit)
        return age, None if last is None else last + 1


def _by_recency(rules: "SamplingRules") -> Lottery:
    return WeightedPrompts(inverse_temperature=0.0, by_age=True, flat_weight=rules.flat_group_weight)


def _by_priority(rules: "SamplingRules") -> Lottery:
    if rules.prompt_priority == "rank":
        return RankedPrompts(exponent=rules.rank_exponent, flat_last=rules.flat_group_weight < 1)
    inverse_temperature = rules.inverse_temperature if rules.prompt_priority == "softmax" else 0.0
    return WeightedPrompts(inverse_temperature=inverse_temperature, by_age=False, flat_weight=rules.flat_group_weight)
