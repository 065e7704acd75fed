"""Long responses first, and finished responses before their group: what they are worth at the pace of a node.

    python -m benchmarks.streaming [--steps 20] [--seeds 5]

A simulation in virtual time, by the constants of `benchmarks.wall_clock.pace` (long), with a real buffer: searchers
lease prompts and put groups, and the trainer asks for batches, as in a run. An engine decodes at most `slots` responses
at once, first in, first out. Synchronous is `max_staleness = 0`; asynchronous is `samples_per_insert = 1` with a slack
of two or four batches. An epoch is five batches. The first one has no history; two are not counted.

StreamRL (arXiv 2504.15930) starts long responses first, as a model ranks them. *Off* is the order of the epoch, *on* is
`curriculum.longest_first`. A prompt has half of the variance of the logarithm of a length. *Known* is the same order by
the longest response that the visit will have: what a perfect forecast would be worth. *Single* has the order of *off*
and `search.put = "sample"`. Groups have no response twice (`buffer.replacement = "never"`).

*s/step* is the mean time from step to step with its standard deviation over seeds, *staleness* that of the batches,
*waiting* the time in steps from the end of a response to the end of its group, and *first half* the mean length of the
responses that end in the first half of their group, as a share of the group's. *Length* is the mean length of the
responses of batches, as a share of all; *lost* the finished responses that a kill of a searcher loses, and *of tokens*
their share of all tokens that it loses. Rewards of a run's shorter halves:

    tba buffer query "SELECT AVG(reward) FILTER (WHERE n <= 4), AVG(reward) FROM (SELECT reward, ROW_NUMBER() OVER
        (PARTITION BY visit ORDER BY response_tokens) n FROM trajectory_rows WHERE error IS NULL)"
"""

import argparse
import heapq
import itertools
import math
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import print_table
from benchmarks.wall_clock.pace import PACES, Pace
from tba.common.config import Config
from tba.common.wire.messages import Visit
from tba.tests.helpers.buffer import ServiceHarness
from tba.tests.helpers.puts import make_trajectory

PROMPTS, SAMPLES = 32, 8
# The prompts of an epoch, and its batches.
TASK, WARM_UP = 160, 10
# The part of the variance of the logarithm of a length that its prompt has.
SHARE = 0.5
# The tokens that one token in the database stands for.
SHORTER = 64
# As `searcher.loop`: a searcher asks for prompts when it has room for this part of its load.
REFILLS = 8
ORDERS = ("off", "on", "known", "single")
# Searchers, slots, slack.
RUNS = ((3, 16, 0), (7, 16, 0), (7, 256, 0), (3, 16, 2), (7, 256, 4))


class Lengths:
    """The lengths of the responses to each visit, which do not depend on when it is leased."""

    def __init__(self, pace: Pace, seed: int) -> None:
        self._pace, self._seed = pace, seed
        self._own = np.random.default_rng(seed).normal(0, math.sqrt(SHARE), TASK)

    def of(self, epoch: int, prompt: int) -> list[float]:
        now = np.random.default_rng([self._seed, epoch, prompt]).normal(0, math.sqrt(1 - SHARE), SAMPLES)
        mu = math.log(self._pace.mean_tokens) - self._pace.sigma**2 / 2
        tokens = np.exp(mu + self._pace.sigma * (self._own[prompt] + now))
        return np.minimum(tokens, self._pace.max_tokens).tolist()


@dataclass(slots=True)
class Group:
    """The responses to a visit: lengths, the versions that began them, when each ended, in this order, and how many
    of these are put."""

    visit: Visit
    tokens: list[float]
    versions: list[int] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)
    put: int = 0


class Searcher:
    """An engine in virtual time, with its queue."""

    def __init__(self, name: str, pace: Pace, slots: int, part: int) -> None:
        self.name, self.groups, self.sent = name, dict[int, Group](), 0
        self._pace, self._slots = pace, slots
        # Twice what its engine holds, as in tba, but not more than its part of a batch: others would have none.
        self._load = min(2 * slots, part)
        self._queue: deque[tuple[int, Group]] = deque()
        # Where the clock of tokens is when a response ends, its number in its group, and the group.
        self._rows: list[tuple[float, int, int, Group]] = []
        self._clock, self._count = 0.0, itertools.count()

    @property
    def want(self) -> int:
        """How many prompts it asks for, as `Searcher._lease_prompts` of tba does."""
        want = -(-(self._load - len(self._queue) - len(self._rows)) // SAMPLES)
        return 0 if want < max(1, self._load // SAMPLES // REFILLS) else want

    def submit(self, group: Group) -> None:
        self.groups[group.visit.lease] = group
        self._queue.extend((number, group) for number in range(SAMPLES))

    def fill(self, version: int) -> None:
        while self._queue and len(self._rows) < self._slots:
            number, group = self._queue.popleft()
            group.versions.append(version)
            heapq.heappush(self._rows, (self._clock + group.tokens[number], next(self._count), number, group))

    @property
    def _token_seconds(self) -> float:
        return self._pace.decode + self._pace.decode_each * len(self._rows)

    def next_end(self) -> float:
        """Return the seconds until the next response ends."""
        return (self._rows[0][0] - self._clock) * self._token_seconds if self._rows else math.inf

    def advance(self, seconds: float, now: float) -> list[Group]:
        """Decode for some seconds. Returns the groups of which a response has ended."""
        self._clock += seconds / self._token_seconds
        groups = {}
        while self._rows and self._rows[0][0] <= self._clock + 1e-6:
            *_, number, group = heapq.heappop(self._rows)
            group.ended[number] = now
            groups[group.visit.lease] = group
        return list(groups.values())

    def lost(self) -> tuple[int, float, float]:
        """Return what a kill loses now: finished responses, their tokens, and the tokens of unfinished ones."""
        lost = [[group.tokens[n] for n in [*group.ended][group.put :]] for group in self.groups.values()]
        begun = sum(self._clock - (end - group.tokens[n]) for end, _, n, group in self._rows)
        return sum(map(len, lost)), sum(map(sum, lost)), begun


class Buffer(ServiceHarness):
    """The buffer of a run, with all prompts and the first weights."""

    def __init__(self, folder: str, slack: int, order: str, lengths: Lengths, seed: int) -> None:
        limits: Mapping[str, int | str] = {"max_staleness": 0}
        if slack:
            limits = {"samples_per_insert": 1, "samples_per_insert_slack": slack * PROMPTS * SAMPLES}
        sections = {
            "run": {"seed": seed},
            "curriculum": {"longest_first": order in ("on", "known")},
            "buffer": {"replacement": "never", **limits},
            "search": {"samples_per_prompt": SAMPLES, "put": "sample" if order == "single" else "group"},
            "train": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "publish_every": 1},
        }
        super().__init__(Path(folder, "buffer.sqlite"), Config.model_validate(sections))
        self.register(TASK)
        self.announce(0, 0)
        # Who waits for room or data, which change with a put, a batch or new weights.
        self.parked: set[str] = set()
        self._lengths, self._numbers = lengths, {f"p{number}": number for number in range(TASK)}
        if order == "known":
            self.store.trajectories.newest_lengths = self._known  # type: ignore[method-assign]

    def _known(self, prompts: Sequence[int]) -> dict[int, float]:
        state = self.service.state
        number = {one: self._numbers[state.prompt_keys[one]] for one in prompts}
        return {one: max(self._lengths.of(state.leases.epoch, number[one])) for one in prompts}

    def has_batch(self, step: int) -> bool:
        """Sample the batch of a step, unless its request is parked. Returns whether there is one."""
        if "trainer" not in self.parked and self.sample(step, PROMPTS, SAMPLES):
            self.parked.clear()
            return True
        self.parked.add("trainer")
        return False

    def give(self, searcher: Searcher, version: int) -> bool:
        """Lease what a searcher asks for, unless its request is parked. Returns whether that was anything."""
        if not searcher.want or searcher.name in self.parked:
            return False
        leases = self.lease(searcher.want, sorted(searcher.groups), version, searcher.name)
        if not leases or not leases.visits:
            self.parked.add(searcher.name)
            return False
        for visit in leases.visits:
            searcher.submit(Group(visit, self._lengths.of(visit.epoch, self._numbers[visit.prompt_key])))
        return True

    def take(self, searcher: Searcher, group: Group) -> None:
        """Put what has ended of a group, unless the rest of it is missing and groups are put."""
        closes = len(group.ended) == SAMPLES
        if not closes and self.config.search.put == "group":
            return
        self.parked.clear()
        key, lease = group.visit.prompt_key, group.visit.lease
        rows = [
            make_trajectory(key, lease, group.versions[n], tokens=[lease, n] + [0] * round(group.tokens[n] / SHORTER))
            for n in [*group.ended][group.put :]
        ]
        self.put(rows, searcher.sent, searcher.name, closes=closes)
        searcher.sent += len(rows)
        group.put += len(rows)
        if closes:
            del searcher.groups[lease]


def run(pace: Pace, *, searchers: int, slots: int, slack: int, order: str, steps: int, seed: int) -> tuple[float, ...]:
    """Return the columns after the order; `slack` is in batches, 0 is synchronous."""
    steps += WARM_UP
    part = SAMPLES * math.ceil(PROMPTS / searchers)
    engines = [Searcher(f"s{number}.1", pace, slots, part) for number in range(searchers)]
    now, published, done, asked = 0.0, 0, 0, 0
    # (time, what) of the trainer and of its publication.
    step_ends, publication, ends = math.inf, (math.inf, 0), list[float]()
    waits, halves, lost = list[float](), list[float](), list[NDArray[np.float64]]()
    with tempfile.TemporaryDirectory(prefix="tba-streaming-") as folder:
        buffer = Buffer(folder, slack, order, Lengths(pace, seed), seed)
        while done < steps:
            # An asynchronous trainer asks for the next batch while it trains.
            if asked <= done + (slack > 0 and step_ends < math.inf) and buffer.has_batch(asked):
                asked += 1
            if step_ends == math.inf and asked > done:
                step_ends = now + pace.step
            while sum(buffer.give(engine, published) for engine in engines):
                pass
            for engine in engines:
                engine.fill(published)
            wait = min([one.next_end() for one in engines] + [step_ends - now, publication[0] - now])
            now += wait
            if done >= WARM_UP:
                lost.append(wait * np.sum([one.lost() for one in engines], axis=0) / searchers)
            for engine in engines:
                for group in engine.advance(wait, now):
                    buffer.take(engine, group)
                    if len(group.ended) < SAMPLES:
                        continue
                    times = np.array([*group.ended.values()])
                    tokens = np.array(group.tokens)[[*group.ended]]
                    waits += (times[-1] - times).tolist() if done >= WARM_UP else []
                    halves.append(tokens[: SAMPLES // 2].mean() / tokens.mean())
            if now >= publication[0] - 1e-9:
                published, publication = publication[1], (math.inf, 0)
                buffer.announce(published, published)
                buffer.parked.clear()
            if now >= step_ends - 1e-9:
                buffer.report(done)
                done, step_ends = done + 1, math.inf
                publication = (now + pace.publish, done)
                ends.append(now)
        sql = """SELECT AVG(c.staleness), AVG(t.response_tokens) / (SELECT AVG(response_tokens) FROM trajectory_rows)
            FROM consumption c JOIN trajectory_rows t ON t.id = c.trajectory WHERE c.step >= ?"""
        staleness, length = buffer.store.database.one(sql, WARM_UP)
        buffer.store.close()
    total = ends[-1] - ends[WARM_UP - 1]
    seconds = total / (len(ends) - WARM_UP)
    responses, finished, begun = np.sum(lost, axis=0) / total
    waiting, half = float(np.mean(waits)) / seconds, float(np.mean(halves))
    return seconds, staleness, waiting, half, length, responses, finished / (finished + begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for (searchers, slots, slack), order in itertools.product(RUNS, ORDERS):
        settings = {"searchers": searchers, "slots": slots, "slack": slack, "order": order, "steps": options.steps}
        found = np.array([run(PACES["long"], **settings, seed=seed) for seed in range(options.seeds)])
        cells = [f"{mean:.2f} ± {sd:.2f}" for mean, sd in zip(found.mean(axis=0), found.std(axis=0), strict=True)]
        rows.append([f"{slack} batches" if slack else "synchronous", searchers, slots, order, *cells])
        print(*rows[-1], flush=True)
    headings = ["slack", "searchers", "slots", "order", "s/step", "staleness", "waiting", "first half"]
    headings += ["length", "lost", "of tokens"]
    print_table("Long responses first", headings, rows)


if __name__ == "__main__":
    main()
