"""Run a program that generates with vLLM in its process, and count the tokens of its steps in a shared file.

    python -m benchmarks.counted FILE CORE on|off tba search ...
    python -m benchmarks.counted FILE CORE on|off bare TASK     the peer of `tba search` in generation.py

With `off`, vLLM on a CPU computes with its parameters instead of packed copies of them, as it does on a GPU.

Both are counted by the same few lines around the same call of vLLM, which cost a microsecond per step: one token for
each request in the output of a step. The thread that makes this call is bound to a core; the others are not moved.
"""

import json
import mmap
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.random_model import CONTEXT, SAMPLES, SIZES, endings

_FIELDS = 3
_RECORDS = 2
_BYTES = 8 * (1 + _RECORDS * _FIELDS)


@dataclass(frozen=True)
class Progress:
    """The state of an engine at the end of its last step.

    `wall` is in seconds of the monotonic clock, which all processes share; `cpu` in seconds of processor time of all
    threads of the engine's process.
    """

    wall: float = 0.0
    cpu: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: "Progress") -> "Progress":
        return Progress(self.wall + other.wall, self.cpu + other.cpu, self.tokens + other.tokens)

    def __sub__(self, other: "Progress") -> "Progress":
        return Progress(self.wall - other.wall, self.cpu - other.cpu, self.tokens - other.tokens)


class Counter:
    """The progress of an engine, in a file that another process may read at any time.

    Two records are written alternately, each followed by its number: a process that is stopped in the middle of a write
    leaves the other record complete.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._fields = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("d")
        self._written = int(self._fields[0])
        self._tokens = 0

    def add(self, tokens: int) -> None:
        """Count the tokens of a step that has ended."""
        self._tokens += tokens
        self._written += 1
        offset = 1 + self._written % _RECORDS * _FIELDS
        fields = self._fields
        fields[offset], fields[offset + 1], fields[offset + 2] = time.monotonic(), time.process_time(), self._tokens
        fields[0] = self._written

    def read(self) -> Progress:
        """Return the progress as of the last step."""
        offset = 1 + int(self._fields[0]) % _RECORDS * _FIELDS
        return Progress(*self._fields[offset : offset + _FIELDS])


def main() -> None:
    count_steps(Counter(Path(sys.argv[1])), core=int(sys.argv[2]))
    if sys.argv[3] == "off":
        compute_with_parameters()
    if sys.argv[4] == "bare":
        generate(json.loads(sys.argv[5]))
        return
    from tba.cli import main as tba

    sys.argv = sys.argv[4:]
    tba()


def compute_with_parameters() -> None:
    """Patch vLLM so that no layer packs its weights."""
    from torch import nn
    from vllm.model_executor.layers import utils

    def keep(layer: nn.Module, *, remove_weight: bool) -> None:  # noqa: ARG001
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep


def count_steps(counter: Counter, *, core: int) -> None:
    """Patch vLLM so that every engine step in this process is counted, and runs on this core."""
    from vllm.v1.engine.core_client import InprocClient

    get_output, run, cores = InprocClient.get_output, threading.Thread.run, os.sched_getaffinity(0)

    def on_all_cores(thread: threading.Thread) -> None:
        # A thread inherits the affinity of the thread that starts it.
        os.sched_setaffinity(0, cores)
        run(thread)

    def counting(client: Any) -> Any:
        # Of this thread alone.
        os.sched_setaffinity(0, {core})
        outputs = get_output(client)
        # One token each: there is no speculative decoding.
        counter.add(len(outputs.outputs))
        return outputs

    InprocClient.get_output = counting
    threading.Thread.run = on_all_cores  # type: ignore[method-assign]


def generate(task: dict[str, Any]) -> None:
    """Call `LLM.generate` for `count` responses to the prompts of a task, in the order of a searcher's requests."""
    import numpy as np
    from vllm import LLM, SamplingParams

    from tba.common.config import TaskSection
    from tba.common.weights.tokenizer import load_tokenizer
    from tba.searcher.tasks import load_task

    size = SIZES[task["size"]]
    prompts = load_task(TaskSection(name="gsm8k", train=str(Path(task["model"]).parent / "prompts.jsonl"))).prompts()
    tokenizer = load_tokenizer(Path(task["model"]))
    order = np.random.default_rng(0).permutation(len(prompts))
    encoded = [{"prompt_token_ids": tokenizer.encode(prompts[n].text)} for n in order]
    llm = LLM(
        task["model"], dtype=size.dtype, skip_tokenizer_init=True, max_num_seqs=size.in_flight,
        max_model_len=CONTEXT, kv_cache_memory_bytes=1 << 30, generation_config="vllm",
        # Only with log-probabilities: in this mode vLLM on a CPU computes them for every request.
        **({"logprobs_mode": "processed_logprobs"} if task["logprobs"] else {}),
    )  # fmt: skip
    requested = {"logprobs": 0, "flat_logprobs": True} if task["logprobs"] else {}
    params = SamplingParams(
        temperature=1.0, max_tokens=size.max_tokens, detokenize=False, stop_token_ids=endings(size), **requested
    )
    llm.generate([encoded[n // SAMPLES % len(encoded)] for n in range(task["count"])], params, use_tqdm=False)


if __name__ == "__main__":
    main()
