"""Run a program that generates with vLLM in its process, and count the tokens of its steps in a shared file.

    python -m benchmarks.counted FILE CORE on|off tba search ...
    python -m benchmarks.counted FILE CORE on|off bare TASK     the peer of `tba search` in generation.py

With `off`, vLLM on a CPU computes with its parameters instead of packed copies of them, as it does on a GPU.

Both are counted by the same few lines around the same call of vLLM, which cost microseconds per step: one token for
each request in the output of a step. The thread that makes this call is bound to a core; the others are not moved.
"""

import json
import os
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Responses per prompt.
SAMPLES = 8
CONTEXT = 512
_RECORD = struct.Struct("3d")


@dataclass(frozen=True)
class Size:
    """A model and its generation settings. `endings` of the `vocabulary` ids end a response: lengths are geometric.

    `fastest` is the tokens per second for which the bare peers have enough prompts.
    """

    shape: dict[str, int]
    vocabulary: int
    endings: int
    dtype: str
    in_flight: int
    max_tokens: int
    fastest: int

    @property
    def end_ids(self) -> list[int]:
        """The token ids that end a response."""
        return list(range(self.vocabulary - self.endings, self.vocabulary))

    @property
    def mean_tokens(self) -> float:
        """The mean length of a response: geometric, cut at `max_tokens`."""
        ends = self.endings / self.vocabulary
        return float((1 - (1 - ends) ** self.max_tokens) / ends)


SIZES = {
    "small": Size(
        {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2}, 2048, 16, "float32", 256, 256, 16_000,
    ),
    "large": Size(
        {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_key_value_heads": 4}, 32_000, 500, "bfloat16", 64, 128, 2_000,
    ),
}  # fmt: skip


class Counter:
    """The progress of an engine at the end of its last step, in a file that another process may read at any time.

    A record is one write of 24 bytes, which a stop signal does not divide.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._tokens = 0

    def add(self, tokens: int) -> None:
        """Count the tokens of a step that has ended."""
        self._tokens += tokens
        os.pwrite(self._file, _RECORD.pack(self._tokens, time.monotonic(), time.process_time()), 0)

    def read(self) -> NDArray[np.float64]:
        """Return the tokens, the time, and the CPU seconds of all threads of the engine's process; zeros before it."""
        return np.array(_RECORD.unpack(os.pread(self._file, _RECORD.size, 0) or bytes(_RECORD.size)))


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
    from vllm import LLM, SamplingParams

    from tba.common.config import TaskSection
    from tba.common.weights.pretrained import load_tokenizer
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
        temperature=1.0, max_tokens=size.max_tokens, detokenize=False, stop_token_ids=size.end_ids, **requested
    )
    llm.generate([encoded[n // SAMPLES % len(encoded)] for n in range(task["count"])], params, use_tqdm=False)


if __name__ == "__main__":
    main()
