"""Runs something that generates with vLLM in its own process, and counts the tokens of its steps in a shared file.

    python -m benchmarks.counted FILE CORE tba search ...
    python -m benchmarks.counted FILE CORE bare TASK        what generation.py measures `tba search` against

Both sides are counted by the same few lines around the same call of vLLM, which cost a microsecond per step: one token
for each request that a step gave one. The thread that calls it is bound to a core, and all others stay where they were.
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
    """What an engine has done until the end of its last step."""

    wall: float = 0.0  # seconds of the monotonic clock, the same for all processes
    cpu: float = 0.0  # seconds on a processor, of all threads of the engine's process
    tokens: float = 0.0

    def __add__(self, other: "Progress") -> "Progress":
        return Progress(self.wall + other.wall, self.cpu + other.cpu, self.tokens + other.tokens)

    def __sub__(self, other: "Progress") -> "Progress":
        return Progress(self.wall - other.wall, self.cpu - other.cpu, self.tokens - other.tokens)


class Counter:
    """An engine's progress, in a file that another process reads at any time.

    Two records are written in turn, and then the number of the last one: a process that is stopped in the middle of a
    write has a whole one.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._fields = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("d")
        self._written = int(self._fields[0])
        self._tokens = 0

    def add(self, tokens: int) -> None:
        """A step has ended that made so many."""
        self._tokens += tokens
        self._written += 1
        at = 1 + self._written % _RECORDS * _FIELDS
        fields = self._fields
        fields[at], fields[at + 1], fields[at + 2] = time.monotonic(), time.process_time(), self._tokens
        fields[0] = self._written

    def read(self) -> Progress:
        """As of the last step."""
        at = 1 + int(self._fields[0]) % _RECORDS * _FIELDS
        return Progress(*self._fields[at : at + _FIELDS])


def main() -> None:
    count_steps(Counter(Path(sys.argv[1])), core=int(sys.argv[2]))
    if sys.argv[3] == "bare":
        generate(json.loads(sys.argv[4]))
        return
    from tba.cli import main as tba

    sys.argv = sys.argv[3:]
    tba()


def count_steps(counter: Counter, *, core: int) -> None:
    """Have every step of an engine in this process counted, and made on this core."""
    from vllm.v1.engine.core_client import InprocClient

    get_output, run, cores = InprocClient.get_output, threading.Thread.run, os.sched_getaffinity(0)

    def elsewhere(thread: threading.Thread) -> None:
        os.sched_setaffinity(0, cores)  # else it would be where the thread is that started it
        run(thread)

    def counting(client: Any) -> Any:
        os.sched_setaffinity(0, {core})  # of this thread alone
        outputs = get_output(client)
        counter.add(len(outputs.outputs))  # of one token each, as nothing is speculated
        return outputs

    InprocClient.get_output = counting
    threading.Thread.run = elsewhere  # type: ignore[method-assign]


def generate(task: dict[str, Any]) -> None:
    """`LLM.generate` of `count` responses to the prompts of a task, in the order in which a searcher would ask."""
    import numpy as np
    from vllm import LLM, SamplingParams

    from tba.common.config import TaskSection
    from tba.searcher.run import load_tokenizer
    from tba.searcher.tasks import load_task

    size = SIZES[task["size"]]
    prompts = load_task(TaskSection(name="gsm8k", train=str(Path(task["model"]).parent / "prompts.jsonl"))).prompts()
    tokenizer = load_tokenizer(task["model"])
    order = np.random.default_rng(0).permutation(len(prompts))
    encoded = [{"prompt_token_ids": tokenizer.encode(prompts[n].text)} for n in order]
    llm = LLM(
        task["model"], dtype=size.dtype, skip_tokenizer_init=True, max_num_seqs=size.in_flight,
        max_model_len=CONTEXT, kv_cache_memory_bytes=1 << 30, generation_config="vllm",
        # Only where it is asked for them: in this mode vLLM on a CPU computes them in any case.
        **({"logprobs_mode": "processed_logprobs"} if task["logprobs"] else {}),
    )  # fmt: skip
    asked = {"logprobs": 0, "flat_logprobs": True} if task["logprobs"] else {}
    params = SamplingParams(
        temperature=1.0, max_tokens=size.max_tokens, detokenize=False, stop_token_ids=endings(size), **asked
    )
    llm.generate([encoded[n // SAMPLES % len(encoded)] for n in range(task["count"])], params, use_tqdm=False)


if __name__ == "__main__":
    main()
