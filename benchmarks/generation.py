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
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.counted import CONTEXT, SAMPLES, SIZES, Counter, Size
from benchmarks.harness import in_turns, print_table
from benchmarks.serving import PATIENCE_SECONDS, Server
from tba.common.system.durable import temporary_directory
from tba.common.weights.snapshot import Canary, Manifest, describe_files, directory_name, seal
from tba.common.wire import messages

PROMPTS = 400
# For time limits that a stopped process would exceed.
_LONG_SECONDS = 36_000.0
_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SIZES, "both"], default="both", help="1 M or 107 M parameters")
    parser.add_argument("--cycles", type=int, default=5, help="cycles of two periods for each program")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of a period that count")
    parser.add_argument("--core", type=int, default=1, help="the core that engines are stepped on")
    parser.add_argument("--rest-on", choices=("other", "same"), default="other", help="cores for everything else")
    parser.add_argument("--packing", choices=("on", "off"), default="on", help="vLLM's packed copies of weights")
    options = parser.parse_args()
    # By an exception, so that the processes that it has stopped are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if others := os.sched_getaffinity(0) - {options.core}:
        # All started processes inherit it; the stepping threads bind themselves.
        os.sched_setaffinity(0, others)
    for name in SIZES if options.model == "both" else [options.model]:
        with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder, contextlib.ExitStack() as ending:
            make_model(SIZES[name], Path(folder))
            Generation(name, Path(folder), options, ending).run()


class Generation:
    """All programs that generate with the model in a folder. They are ended by `ending`."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace, ending: contextlib.ExitStack) -> None:
        self._name, self._size = name, SIZES[name]
        self._folder, self._model = folder, folder / "model"
        self._options, self._ending = options, ending

    def run(self) -> None:
        """Measure and print."""
        seconds, periods = self._options.seconds, 2 * self._options.cycles
        peers = [self._bare(logprobs=False), self._bare(logprobs=True), self._searcher("stays")[0]]
        swapping, publisher = self._searcher("swaps")

        def with_a_swap() -> NDArray[np.float64]:
            return swapping.run_for(seconds, partial(publisher.publish, publisher.make()))

        names = ("LLM.generate, tokens only", "LLM.generate, log-probabilities", "tba search, no swaps")
        ways: dict[str, Callable[[], NDArray[np.float64]]] = {
            name: partial(one.run_for, seconds) for name, one in zip(names, peers, strict=True)
        }
        done = in_turns(ways | {f"tba search, a swap every {seconds:g} s": with_a_swap}, periods)
        swaps = (self._folder / "swaps" / "engine.log").read_text().count("weights loaded") - 1
        self._print(done, swaps)

    def _print(self, done: dict[str, list[NDArray[np.float64]]], swaps: int) -> None:
        """Print tokens per second of wall clock and CPU time, by cycles of two periods in opposite orders."""
        cycles = {name: np.array(periods).reshape(-1, 2, 3).sum(axis=1) for name, periods in done.items()}
        rates = {name: progress[:, :1] / progress[:, 1:] for name, progress in cycles.items()}
        bare, with_logprobs, *_ = rates.values()
        rows = []
        for name, rate in rates.items():
            medians = [f"{median:,.0f}" for median in np.median(rate, axis=0)]
            ratios = [_spread(column) for peer in (bare, with_logprobs) for column in (rate / peer).T]
            rows.append([name, *medians, *ratios])
        headings = ["", "tokens/s", "per CPU s", "of bare", "by CPU", "of bare with log-probs", "by CPU"]
        title = f"{self._name} model, {self._size.in_flight} in flight, {SAMPLES} per prompt, {self._size.dtype}"
        count = self._options.cycles
        print_table(f"{title}; medians (and quartiles) of {count} cycles; {swaps} swaps", headings, rows)

    def _bare(self, *, logprobs: bool) -> "Program":
        """Start `LLM.generate` with more prompts than it has time for."""
        seconds = 2 * self._options.cycles * (self._options.seconds + 2) + 30
        count = int(seconds * self._size.fastest / self._size.mean_tokens)
        task = {"size": self._name, "model": str(self._model), "logprobs": logprobs, "count": count}
        return self._started(self._folder / f"bare-{logprobs}", ["bare", json.dumps(task)], [])

    def _searcher(self, name: str) -> tuple["Program", "Publisher"]:
        """Start `tba search` with a buffer server, after one snapshot was published."""
        folder, size = self._folder / name, self._size
        settings = {
            "model.path": self._model, "model.dtype": size.dtype, "task.name": "gsm8k", "run.dir": folder / "run",
            "task.train": self._folder / "prompts.jsonl", "search.samples_per_prompt": SAMPLES,
            "search.max_in_flight": size.in_flight, "search.max_tokens": size.max_tokens, "search.gpus": "cpu",
            "search.max_model_len": CONTEXT, "buffer.dedup": False, "buffer.lease_seconds": _LONG_SECONDS,
            "task.reward_seconds": _LONG_SECONDS,
        }  # fmt: skip
        options = [f"{key}={value}" for key, value in settings.items()]
        server = self._ending.enter_context(Server(folder / "run", *options))
        publisher = Publisher(server, self._model, make_canary(self._model, size))
        publisher.publish(publisher.make())
        sets = [part for option in (*options, f"buffer.address={server.address}") for part in ("--set", option)]
        return self._started(folder, ["tba", "search", *sets], [server.process]), publisher

    def _started(self, folder: Path, arguments: list[str], servers: list["subprocess.Popen[bytes]"]) -> "Program":
        """Start a program, and stop it when its batch is full of requests of all ages."""
        folder.mkdir(exist_ok=True)
        core, options = str(self._options.core), self._options
        bound = ["taskset", "--cpu-list", core] if options.rest_on == "same" else []
        command = [*bound, sys.executable, "-m", "benchmarks.counted", str(folder / "progress"), core, options.packing]
        # In one process, like the searcher's engine: on one core the default of two processes has no advantage.
        environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        log = folder / "engine.log"
        with log.open("wb") as output:
            command += arguments
            engine = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
        program = Program(engine, servers, Counter(folder / "progress"), log)
        self._ending.callback(program.end)
        program.run_until(self._size.in_flight * self._size.max_tokens / 2)
        return program


class Program:
    """The process of an engine and the servers that it needs, which are stopped while another program runs."""

    def __init__(
        self, engine: "subprocess.Popen[bytes]", servers: list["subprocess.Popen[bytes]"], counter: Counter, log: Path
    ) -> None:
        self._engine, self._servers = engine, servers
        self._counter, self._log = counter, log

    def run_until(self, tokens: float) -> None:
        """Wait until this many tokens have been generated since the start, then stop."""
        while self._counter.read()[0] < tokens:
            self._check()
            time.sleep(_POLL_SECONDS)
        self._signal("suspend", [self._engine, *self._servers])

    def run_for(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> NDArray[np.float64]:
        """Return the progress within this period, which starts after one second; `meanwhile` is called at its start."""
        self._resume()
        time.sleep(_SETTLE_SECONDS)
        start, until = self._counter.read(), time.monotonic() + seconds
        meanwhile()
        time.sleep(max(0.0, until - time.monotonic()))
        self._check()
        # The engine first: its servers then have no open request.
        self._signal("suspend", [self._engine, *self._servers])
        return self._counter.read() - start

    def end(self) -> None:
        """Terminate the engine, and kill it if it does not end. The caller ends the servers that it started."""
        self._resume()
        members = list(_family(self._engine))
        self._engine.terminate()
        try:
            self._engine.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            self._engine.wait()

    def _resume(self) -> None:
        # The engine last: the replies that it waits for have then arrived.
        self._signal("resume", [*self._servers, self._engine])

    def _signal(self, method: str, processes: list["subprocess.Popen[bytes]"]) -> None:
        for member in (member for process in processes for member in _family(process)):
            # It may have just ended.
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(member, method)()

    def _check(self) -> None:
        if (code := self._engine.poll()) is not None:
            raise RuntimeError(f"the engine's process ended with {code}: {self._log.read_text()[-3000:]}")


def _family(process: "subprocess.Popen[bytes]") -> Iterator[psutil.Process]:
    """Yield the process, then its descendants; nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        yield root
        yield from root.children(recursive=True)


class Publisher:
    """Publishes the same weights under new versions: the cost of a swap does not depend on their values."""

    def __init__(self, server: Server, model: Path, canary: Canary) -> None:
        self._server, self._model, self._canary = server, model, canary
        self._versions = itertools.count()

    def make(self) -> messages.WeightsRef:
        """Write the next version without announcing it: this is a trainer's work, and not part of the measurement."""
        version = next(self._versions)
        final = self._server.directory.parent / "snapshots" / directory_name(version)
        final.parent.mkdir(exist_ok=True)
        temporary = temporary_directory(final)
        shutil.copytree(self._model, temporary, dirs_exist_ok=True)
        manifest = Manifest("run", version, version, time.time(), describe_files(temporary), self._canary)
        sealed = seal(temporary, final, manifest)
        return messages.WeightsRef(version=version, step=version, path=str(final), manifest_sha256=sealed)

    def publish(self, made: messages.WeightsRef) -> None:
        """Announce a version that `make` returned."""
        # A new connection each time: a permanent one would break while the server is stopped.
        with contextlib.closing(self._server.client("publisher")) as client:
            announcement = messages.AnnounceSnapshot(weights=made, bytes=0)
            client.call(announcement, messages.Done, deadline_seconds=PATIENCE_SECONDS)


def make_model(size: Size, folder: Path) -> None:
    """Write a random Llama with a tokenizer of invented words to "model", and prompts.jsonl."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    shape = size.shape | special | {"max_position_embeddings": CONTEXT, "vocab_size": size.vocabulary}
    model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **shape)).to(getattr(torch, size.dtype))
    model.generation_config.eos_token_id = size.end_ids
    model.save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(size.vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(PROMPTS):
            ids = random.integers(1, size.vocabulary - size.endings, random.integers(20, 100))
            file.write(json.dumps({"question": " ".join(f"w{n}" for n in ids), "answer": "#### 7"}) + "\n")


def make_canary(model: Path, size: Size) -> Canary:
    """Return the canary that a trainer would publish with the model: three sequences of 6 random tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from tba.trainer.publishing import canary

    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sequences = canary.canary_sequences(model, size.vocabulary, long=False)
    return canary.make_canary(made, dict(made.named_parameters()), sequences)


def _spread(ratios: NDArray[np.float64]) -> str:
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
