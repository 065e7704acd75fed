"""Turns of environments that answer at once, next to scores of single responses, both by two reward workers.

What is measured is `Rewards`: a searcher's side, the messages, and the workers. CPU time is that of all three. Then a
whole searcher, whose engine answers at once, too: it renders, plays, and delivers to a real server, whose CPU time
counts. Texts have 400 characters, about 100 tokens.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import in_turns, median_ratio, print_table
from benchmarks.serving import Server
from tba.common.config import Config, TaskSection
from tba.common.system.process import StopSignal
from tba.common.weights.snapshot import Snapshot
from tba.searcher import loop
from tba.searcher.engines.engine import Generation, GenerationRequest, LoadReport, Mismatch
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt, Reward, Turn
from tba.tests.helpers.announcer import Announcer
from tba.tests.helpers.chat_tokenizers import chat_tokenizer

IN_FLIGHT = 64
TURNS = 8
CALLS = 4_000
ROUNDS = 5
TEXT = "The answer is 5. " * 24
PROMPT = Prompt("key", TEXT)
SECONDS = 10.0


class Single:
    """Scores 1 at once. Workers load it as `benchmarks.turns:Single`."""

    name = "single"

    def prompts(self) -> Sequence[Prompt]:
        return [PROMPT, *(Prompt(f"key {n}", TEXT) for n in range(255))]

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


class Instant:
    """An engine that answers all requests with the same tokens at its next step."""

    weights_version, max_in_flight = 0, IN_FLIGHT

    def __init__(self, reply: list[int]) -> None:
        self.metrics: dict[str, float] = {}
        self._reply, self._queued = np.array(reply, np.int32), list[int]()

    @property
    def in_flight(self) -> int:
        return len(self._queued)

    def submit(self, request: GenerationRequest) -> None:
        self._queued.append(request.id)

    def step(self) -> list[Generation]:
        queued, self._queued = self._queued, []
        logprobs, runs = np.full(len(self._reply), -0.5, np.float32), np.array([[0, len(self._reply)]], np.int32)
        return [Generation(id_, self._reply, logprobs, runs, "eos", 0.0) for id_ in queued]

    def prepare(self, _: Snapshot) -> None:
        pass

    def load_weights(self, _: Snapshot) -> LoadReport:
        return LoadReport(Mismatch(0.0, 0.0, 0.0), "none", 0.0, 0.0, 0.0, 0.0)

    def close(self) -> None:
        pass


class Window(StopSignal):
    """Stops a searcher SECONDS after its first rows have arrived, and keeps what it did in that time."""

    def __init__(self, server: Server) -> None:
        super().__init__(listens=False)
        self._server, self._asked_at = server, 0.0
        self.marks: list[tuple[float, float, int]] = []

    def __call__(self) -> bool:
        now = time.perf_counter()
        if now < self._asked_at:
            return False
        rows = self._server.status().trajectories
        self._asked_at = now + (SECONDS if rows else 0.1)
        if rows:
            me = psutil.Process()
            cpu = sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))
            self.marks.append((now, cpu, rows))
        return len(self.marks) == 2


def searcher(template: str | None) -> tuple[float, float]:
    """Return turns per second and CPU microseconds per turn of a searcher, without a chat template or with one."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        model, tokenizer = Path(folder) / "model", chat_tokenizer("qwen 2.5")
        tokenizer.chat_template = template and tokenizer.chat_template
        shape: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 32}
        LlamaForCausalLM(LlamaConfig(vocab_size=512, intermediate_size=32, **shape)).save_pretrained(model)
        tokenizer.save_pretrained(model)
        reply = [*tokenizer.encode(TEXT), tokenizer.eos_token_id]
        with Server(Path(folder) / "run", "buffer.dedup=false") as server:
            sections: dict[str, Any] = {
                "run": {"dir": str(server.directory)},
                "model": {"path": str(model), "dtype": "float32"},
                "buffer": {"address": server.address},
                "task": {"name": "benchmarks.turns:Play", "reward_workers": 2},
                "search": {"max_turns": TURNS, "max_tokens": 8192, "weights_dir": f"{folder}/weights"},
            }
            config = Config.model_validate(sections | {"train": {"prompts_per_step": 1}})
            Announcer(server.address, model, Path(folder)).announce(0)
            loop.make_engine = lambda *_, **__: Instant(reply)  # type: ignore[assignment]
            window = Window(server)
            loop.search(config, device="cpu", label="cpu0", stop=window)
    (began, cpu, rows), (ended, cpu_then, rows_then) = window.marks
    turns = TURNS * (rows_then - rows)
    return turns / (ended - began), (cpu_then - cpu) / turns * 1e6


def main() -> None:
    """Print calls per second and CPU microseconds per call of both, and the ratios of each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("workers", "searcher"))
    only = parser.parse_args().only
    if only != "searcher":
        workers_alone()
    if only != "workers":
        ways = {"contents joined": None, "chat template": "qwen 2.5"}
        found = in_turns({name: lambda name=name: searcher(ways[name]) for name in ways}, 3)
        rows = [
            (name, *(f"{min(one):.0f} to {max(one):.0f}" for one in zip(*each, strict=True)))
            for name, each in found.items()
        ]
        print_table("Turns of a searcher", ("", "turns per second", "CPU µs per turn"), rows)


def workers_alone() -> None:
    """Measure what the reward workers and their messages take."""
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
