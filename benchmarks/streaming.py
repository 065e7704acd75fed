"""Long responses first, and finished responses before their group: what they would be worth at the pace of a node.

    python -m benchmarks.streaming [--steps 60] [--seeds 5]

A simulation in virtual time, by the constants of `benchmarks.wall_clock.pace` (long): searchers lease prompts as tba's
do, an engine decodes at most `slots` responses at once, and the trainer waits for complete groups. Synchronous is
`max_staleness = 0`; asynchronous is `samples_per_insert = 1` with a slack of two or four batches.

StreamRL (arXiv 2504.15930) starts long responses first, as a model ranks them. Here the prompts of a batch are leased
by descending forecast, and a searcher's queue is in that order. *History*: the mean logarithm of the last eight lengths
of the prompt, which has half of the variance of the logarithm. *Known*: the length of each response itself.

*s/step* is the mean time from step to step with its standard deviation over seeds, *staleness* that of the data, and
*waiting* the time in steps from the end of a response to the end of its group: what putting responses one by one could
take away from their age at most.
"""

import argparse
import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.harness import print_table
from benchmarks.wall_clock.pace import PACES, Pace

PROMPTS, SAMPLES = 32, 8
# The part of the variance of the logarithm of a length that its prompt has.
SHARE = 0.5
ORDERS = ("as it comes", "history", "known")


@dataclass(slots=True)
class Group:
    """The responses to a prompt: their lengths, the step whose weights began them, and when each ended."""

    forecast: float
    tokens: list[float]
    step: int = 0
    ended: list[float] = field(default_factory=list)


def prompts(pace: Pace, order: str, seed: int) -> Iterator[Group]:
    """Yield prompts without end, those of a batch in an `order` of ORDERS."""
    rng = np.random.default_rng(seed)
    mu = math.log(pace.mean_tokens) - pace.sigma**2 / 2
    while True:
        batch = []
        for own in rng.normal(0, math.sqrt(SHARE), PROMPTS):
            now, before = rng.normal(0, math.sqrt(1 - SHARE), (2, SAMPLES))
            tokens = np.minimum(np.exp(mu + pace.sigma * (own + now)), pace.max_tokens).tolist()
            batch.append(Group(own + before.mean() if order == "history" else max(tokens), tokens))
        yield from batch if order == "as it comes" else sorted(batch, key=lambda one: -one.forecast)


class Searcher:
    """An engine in virtual time, with its queue."""

    def __init__(self, pace: Pace, slots: int, order: str) -> None:
        self._pace, self._order, self.slots = pace, order, slots
        # What comes first, tokens, group.
        self._queue: list[tuple[float, int, float, Group]] = []
        # Where the clock of tokens is when a response ends, and its group.
        self._rows: list[tuple[float, int, Group]] = []
        self._clock, self._count = 0.0, itertools.count()

    @property
    def load(self) -> int:
        return len(self._queue) + len(self._rows)

    def submit(self, group: Group) -> None:
        for tokens in group.tokens:
            first = {"history": -group.forecast, "known": -tokens}.get(self._order, 0.0)
            heapq.heappush(self._queue, (first, next(self._count), tokens, group))

    def fill(self) -> None:
        while self._queue and len(self._rows) < self.slots:
            *_, tokens, group = heapq.heappop(self._queue)
            heapq.heappush(self._rows, (self._clock + tokens, next(self._count), group))

    @property
    def _token_seconds(self) -> float:
        return self._pace.decode + self._pace.decode_each * len(self._rows)

    def next_end(self) -> float:
        """Return the seconds until the next response ends."""
        return (self._rows[0][0] - self._clock) * self._token_seconds if self._rows else math.inf

    def advance(self, seconds: float, now: float) -> list[Group]:
        """Decode for some seconds. Returns the groups that are complete."""
        self._clock += seconds / self._token_seconds
        complete = []
        while self._rows and self._rows[0][0] <= self._clock + 1e-6:
            *_, group = heapq.heappop(self._rows)
            group.ended.append(now)
            complete += [group] if len(group.ended) == SAMPLES else []
        return complete


def run(
    pace: Pace, *, searchers: int, slots: int, slack: int, order: str, steps: int, seed: int
) -> tuple[float, float, float]:
    """Return (seconds a step, staleness, waiting in steps); `slack` is in batches, 0 is synchronous."""
    source = prompts(pace, order, seed)
    engines = [Searcher(pace, slots, order) for _ in range(searchers)]
    now, leased, published, done = 0.0, 0, 0, 0
    ready: deque[Group] = deque()
    # (time, what) of the trainer and of its publication.
    step_ends, publication, ends = math.inf, (math.inf, 0), []
    ages, waits = [], []
    while done < steps:
        if step_ends == math.inf and len(ready) >= PROMPTS:
            batch = [ready.popleft() for _ in range(PROMPTS)]
            ages += [done - group.step for group in batch]
            waits += [max(group.ended) - end for group in batch for end in group.ended]
            step_ends = now + pace.step
        # Batches that are begun count as sampled, as in the buffer: the next one is asked for meanwhile.
        begun = done + (step_ends < math.inf)
        for engine in itertools.cycle(engines):
            room = PROMPTS * (begun + max(slack, 1)) - leased if slack or published == begun else 0
            hungry = [one for one in engines if one.load + SAMPLES <= 2 * max(one.slots, SAMPLES)]
            if room <= 0 or not hungry:
                break
            if engine in hungry:
                group = next(source)
                group.step, leased = published, leased + 1
                engine.submit(group)
        for engine in engines:
            engine.fill()
        wait = min([one.next_end() for one in engines] + [step_ends - now, publication[0] - now])
        now += wait
        ready.extend(group for engine in engines for group in engine.advance(wait, now))
        if now >= publication[0] - 1e-9:
            published, publication = publication[1], (math.inf, 0)
        if now >= step_ends - 1e-9:
            done, step_ends = done + 1, math.inf
            publication = (now + pace.publish, done)
            ends.append(now)
    seconds = (ends[-1] - ends[4]) / (len(ends) - 5)
    return seconds, float(np.mean(ages)), float(np.mean(waits)) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for slack, searchers, slots in itertools.product((0, 2, 4), (3, 7), (16, 256)):
        cells = []
        for order in ORDERS:
            settings = {"searchers": searchers, "slots": slots, "slack": slack, "order": order, "steps": options.steps}
            found = np.array([run(PACES["long"], **settings, seed=seed) for seed in range(options.seeds)])
            seconds, staleness, waiting = found.mean(axis=0)
            cells += [f"{seconds:.1f} ± {found[:, 0].std():.1f}", f"{staleness:.2f}", f"{waiting:.2f}"]
        rows.append([f"{slack} batches" if slack else "synchronous", searchers, slots, *cells])
        print(rows[-1], flush=True)
    headings = [f"{name}, {order}" for order in ORDERS for name in ("s/step", "staleness", "waiting")]
    print_table("Long responses first", ["slack", "searchers", "slots", *headings], rows)


if __name__ == "__main__":
    main()
