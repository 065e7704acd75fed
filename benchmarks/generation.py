"""Tokens per second of a whole searcher against a bare `vllm.LLM.generate`.

    python -m benchmarks.generation [--model small|large|both] [--cycles 5] [--seconds 10] [--core 1] [--rest-on other]
        [--packing on]

The searcher is `tba search` as users start it, with all its work: prompts by lease from a real buffer server,
log-probabilities, version per token, text, the reward of GSM8K, acknowledged puts, and, in one of its two rows, a new
snapshot to load every 10 s. The bare peer has the same model, prompts (as token ids), sampling settings and number in
flight, more prompts than rows, and returns token ids only; in a second row also log-probabilities.

- All four are started once, and then run for short periods, in the order ABCD DCBA, while the others are stopped by
  SIGSTOP. So a machine whose speed drifts by a factor of two over minutes affects all of them alike, and a drift that
  is even over one cycle cancels out of its ratios. The reported ratio is the cycles' median, with quartiles.
- Tokens are counted as vLLM's steps produce them, by the same code for both (counted.py), from the end of one step to
  the end of another. The first second of a period does not count.
- The threads that step an engine are bound to one core. The other cores are for everything else, as on a machine whose
  engines are on GPUs: the searcher's other threads and reward workers, and the buffer servers. With `--rest-on same`
  the searcher does all its work on the core of its engine.
- With `--packing off` all engines compute with their parameters, as on a GPU, and a swap is in place. By default vLLM
  on a CPU packs weights, and a swap is a reload.
- One snapshot per period is published when the searcher's seconds begin to count, so every `--seconds` of them.
- *per CPU second* divides by the processor time of the engine's own process, without its reward workers.
- Models are random: several token ids end a response, so that lengths are distributed geometrically, up to a limit.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import serving
from benchmarks.alternating import Program
from benchmarks.counted import Counter, Progress
from benchmarks.publisher import Publisher
from benchmarks.random_model import CONTEXT, SAMPLES, SIZES, make_canary, make_model, mean_tokens
from benchmarks.table import print_table

KINDS = (
    "LLM.generate, tokens only",
    "LLM.generate, log-probabilities",
    "tba search, no swaps",
    "tba search, a swap every {:g} s",
)
# Tokens per second for which the bare peers have enough prompts.
_FASTEST = {"small": 16_000, "large": 2_000}
# For time limits that a stopped process would exceed.
_LONG_SECONDS = 36_000.0
# One entry for each kind.
Cycle = list[Progress]


def main() -> None:
    # By an exception, so that the processes that it has stopped are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = _options()
    if others := os.sched_getaffinity(0) - {options.core}:
        # All started processes inherit it; the stepping threads bind themselves.
        os.sched_setaffinity(0, others)
    for name in SIZES if options.model == "both" else [options.model]:
        with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
            Generation(name, Path(folder), options).run()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a searcher against a bare LLM.generate")
    parser.add_argument("--model", choices=[*SIZES, "both"], default="both", help="1 M or 107 M parameters")
    parser.add_argument("--cycles", type=int, default=5, help="cycles of two periods for each program")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of a period that count")
    parser.add_argument("--core", type=int, default=1, help="the core that engines are stepped on")
    parser.add_argument("--rest-on", choices=("other", "same"), default="other", help="cores for everything else")
    parser.add_argument("--packing", choices=("on", "off"), default="on", help="vLLM's packed copies of weights")
    return parser.parse_args()


class Generation:
    """All programs that generate with one model."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        self._name = name
        self._size = SIZES[name]
        self._folder = folder
        self._options = options
        self._model = make_model(self._size, folder)
        self._canary = make_canary(self._model, self._size)
        self._ending = contextlib.ExitStack()

    def run(self) -> None:
        """Measure and print."""
        with self._ending:
            programs = [self._bare(logprobs=False), self._bare(logprobs=True)]
            programs.append(self._searcher("stays")[0])
            swapping, publisher = self._searcher("swaps")
            cycles = [self._cycle([*programs, swapping], publisher) for _ in range(self._options.cycles)]
        swaps = (self._folder / "swaps" / "engine.log").read_text().count("weights loaded") - 1
        self._print(cycles, swaps)

    def _cycle(self, programs: list[Program], publisher: Publisher) -> Cycle:
        """Run all in the order ABCD DCBA, with a snapshot in each period of D."""
        *others, swapping = programs

        def with_a_swap() -> Progress:
            return swapping.run_for(self._options.seconds, partial(publisher.publish, publisher.make()))

        periods: list[Callable[[], Progress]] = [partial(one.run_for, self._options.seconds) for one in others]
        periods.append(with_a_swap)
        first = [period() for period in periods]
        second = [period() for period in reversed(periods)]
        done = [a + b for a, b in zip(first, reversed(second), strict=True)]
        print(*(f"{progress.tokens / progress.wall:,.0f}" for progress in done), file=sys.stderr, flush=True)
        return done

    def _print(self, cycles: list[Cycle], swaps: int) -> None:
        rates = np.array([[(done.tokens / done.wall, done.tokens / done.cpu) for done in cycle] for cycle in cycles])
        rows = []
        for number, kind in enumerate(KINDS):
            to_bare = [_spread(rates[:, number, clock] / rates[:, 0, clock]) for clock in (0, 1)]
            to_logprobs = [_spread(rates[:, number, clock] / rates[:, 1, clock]) for clock in (0, 1)]
            medians = [f"{median:,.0f}" for median in np.median(rates[:, number], axis=0)]
            rows.append([kind.format(self._options.seconds), *medians, *to_bare, *to_logprobs])
        headings = ["", "tokens/s", "per CPU s", "of bare", "by CPU", "of bare with log-probs", "by CPU"]
        size = self._size
        title = f"{self._name} model, {size.in_flight} in flight, {SAMPLES} per prompt, {size.dtype}"
        print_table(f"{title}; medians (and quartiles) of {len(cycles)} cycles; {swaps} swaps", headings, rows)

    def _bare(self, *, logprobs: bool) -> Program:
        """Start `LLM.generate` with more prompts than it has time for."""
        seconds = 2 * self._options.cycles * (self._options.seconds + 2) + 30
        count = int(seconds * _FASTEST[self._name] / mean_tokens(self._size))
        task = {"size": self._name, "model": str(self._model), "logprobs": logprobs, "count": count}
        folder = self._folder / f"bare-{logprobs}"
        folder.mkdir()
        return self._started(folder, ["bare", json.dumps(task)], [])

    def _searcher(self, name: str) -> tuple[Program, Publisher]:
        """Start `tba search` with a buffer server, after one snapshot was published."""
        folder, size = self._folder / name, self._size
        folder.mkdir()
        settings = {
            "model.path": self._model, "model.dtype": size.dtype, "task.name": "gsm8k", "run.dir": folder / "run",
            "task.train": self._model.parent / "prompts.jsonl", "search.samples_per_prompt": SAMPLES,
            "search.max_in_flight": size.in_flight, "search.max_tokens": size.max_tokens, "search.gpus": "cpu",
            "search.max_model_len": CONTEXT, "buffer.dedup": False, "buffer.lease_seconds": _LONG_SECONDS,
            "task.reward_seconds": _LONG_SECONDS,
        }  # fmt: skip
        options = [f"{key}={value}" for key, value in settings.items()]
        server, address = self._ending.enter_context(serving.serving(folder / "run", *options))
        publisher = Publisher(address, self._model, self._canary, folder / "snapshots")
        publisher.publish(publisher.make())
        sets = [part for option in (*options, f"buffer.address={address}") for part in ("--set", option)]
        return self._started(folder, ["tba", "search", *sets], [server]), publisher

    def _started(self, folder: Path, arguments: list[str], servers: list["subprocess.Popen[bytes]"]) -> Program:
        """Start a program, and stop it when its batch is full of requests of all ages."""
        counter, log = Counter(folder / "progress"), folder / "engine.log"
        core = str(self._options.core)
        bound = ["taskset", "--cpu-list", core] if self._options.rest_on == "same" else []
        command = [*bound, sys.executable, "-m", "benchmarks.counted", str(folder / "progress"), core]
        command += [self._options.packing, *arguments]
        with log.open("wb") as output:
            engine = subprocess.Popen(command, env=_environment(), stdout=output, stderr=output)
        program = Program(engine, servers, counter, log)
        self._ending.callback(program.end)
        program.run_until(self._size.in_flight * self._size.max_tokens / 2)
        return program


def _environment() -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # In one process, like the searcher's engine: on one core the default of two processes has no advantage.
    return os.environ | threads | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def _spread(ratios: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> str:
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
