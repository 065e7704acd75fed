"""Turns of environments that answer at once, next to scores of single responses, both by two reward workers.

What is measured is `Rewards`: a searcher's side, the messages, and the workers. CPU time is that of all three.
"""

import argparse
import itertools
import time
from collections.abc import Sequence

import psutil

from benchmarks.harness import in_turns, median_ratio, print_table
from tba.common.config import TaskSection
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt, Reward, Turn

IN_FLIGHT = 64
TURNS = 8
CALLS = 4_000
ROUNDS = 5
TEXT = "x" * 400
PROMPT = Prompt("key", TEXT)


class Single:
    """Scores 1 at once. Workers load it as `benchmarks.turns:Single`."""

    name = "single"

    def prompts(self) -> Sequence[Prompt]:
        return [PROMPT]

    def held_out(self) -> Sequence[Prompt]:
        return []

    def score(self, *_: object) -> Reward:
        return Reward(1.0, {"correct": 1.0})


class Play(Single):
    """Its environments answer with a text at once, and never end."""

    def environment(self, *_: object) -> "Play":
        return self

    def reset(self, *_: object) -> list[tuple[str, str]]:
        return []

    def step(self, *_: object) -> Turn:
        return Turn([("user", TEXT)])

    def close(self) -> None:
        pass


def scores(rewards: Rewards) -> None:
    """Have CALLS responses scored, IN_FLIGHT at a time."""
    tickets = iter(range(CALLS))
    for ticket in itertools.islice(tickets, IN_FLIGHT):
        rewards.submit(ticket, PROMPT, TEXT, True)
    while rewards.waiting:
        for _, ticket in zip(rewards.wait(1.0), tickets, strict=False):
            rewards.submit(ticket, PROMPT, TEXT, True)


def turns(rewards: Rewards) -> None:
    """Play episodes of TURNS turns, IN_FLIGHT at a time, CALLS resets and turns together."""
    replies: dict[int, list[tuple[str, bool]]] = {}
    tickets = iter(range(CALLS // (TURNS + 1)))
    for ticket in itertools.islice(tickets, IN_FLIGHT):
        replies[ticket] = []
        rewards.play(ticket, PROMPT, [])
    while rewards.waiting:
        for scored in rewards.wait(1.0):
            ticket, given = scored.ticket, replies[scored.ticket]
            if len(given) == TURNS and (ticket := next(tickets, -1)) < 0:
                continue
            replies[ticket] = [] if len(given) == TURNS else [*given, (TEXT, True)]
            rewards.play(ticket, PROMPT, replies[ticket], last=len(replies[ticket]) == TURNS)


def main() -> None:
    """Print calls per second and CPU microseconds per call of both, and the ratios of each round."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    opened = {}
    for name in ("Single", "Play"):
        config = TaskSection(name=f"benchmarks.turns:{name}")
        opened[name] = Rewards(load_task(config), config)
    workers = [psutil.Process(one.process.pid) for rewards in opened.values() for one in rewards._task.workers]

    def cpu_seconds() -> float:
        return time.process_time() + sum(sum(worker.cpu_times()[:2]) for worker in workers)

    def measured(call: str) -> tuple[float, float]:
        cpu, wall = cpu_seconds(), time.perf_counter()
        {"Single": scores, "Play": turns}[call](opened[call])
        return CALLS / (time.perf_counter() - wall), (cpu_seconds() - cpu) / CALLS * 1e6

    # The first calls wait for the workers to load.
    for name in opened:
        measured(name)
    found = in_turns({name: lambda name=name: measured(name) for name in opened}, ROUNDS)
    rates, cpu = ({name: [one[n] for one in rows] for name, rows in found.items()} for n in (0, 1))
    rows = [
        (name, f"{min(rates[name]):.0f} to {max(rates[name]):.0f}", f"{min(cpu[name]):.0f} to {max(cpu[name]):.0f}")
        for name in opened
    ]
    ratios = [f"{median_ratio(numbers['Play'], numbers['Single']):.2f}" for numbers in (rates, cpu)]
    print_table(
        "Calls of reward workers", ("", "calls per second", "CPU µs per call"), [*rows, ("median ratio", *ratios)]
    )
    for rewards in opened.values():
        rewards.close()


if __name__ == "__main__":
    main()
