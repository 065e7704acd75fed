"""Tokens per second of a whole searcher against a bare `vllm.LLM.generate`.

    python -m benchmarks.generation [--model small|large|both] [--rounds 2] [--seconds 40] [--core 1]

The searcher is `tba search` as users start it, with all it does: prompts by lease from a real buffer server, log-
probabilities, version per token, text, the reward of GSM8K, acknowledged puts, and, in one of its two rows, a new
snapshot to load every 10 s. The bare peer has the same model, prompts (as token ids), sampling settings and number in
flight, more prompts than places, and is asked for token ids alone; in a second row also for log-probabilities.

- Models are random: a number of token ids end a response, so that lengths are spread geometrically, up to a limit.
- Both are measured while all places are taken: the bare one from the end of its first load until it has no more
  prompts waiting; the searcher for the given time, after its first load.
- Engines, of both kinds, are bound to one core and run one after the other, in turns. The buffer server, and who
  publishes, may use the others.
- *per CPU second* divides by the processor time of the engine's process: on a busy machine the figure to look at.
"""

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import serving
from benchmarks.table import print_table
from tba.common import wire
from tba.common.client import BufferClient
from tba.common.durable import temporary_directory
from tba.common.snapshot import Canary, Manifest, describe_files, directory_name, seal

SAMPLES = 8
SWAP_SECONDS = 10.0
PROMPTS = 400
CONTEXT = 512
_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Size:
    """A model and how it is generated with. `endings` of the `vocabulary` ids end a response."""

    shape: dict[str, int]
    vocabulary: int
    endings: int
    dtype: str
    in_flight: int
    max_tokens: int


SIZES = {
    "small": Size(
        {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2}, 2048, 16, "float32", 256, 256,
    ),
    "large": Size(
        {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_key_value_heads": 4}, 32_000, 500, "bfloat16", 64, 128,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Rate:
    """Tokens per second of wall clock, and of the engine process's time on the processor."""

    wall: float
    cpu: float


def main() -> None:
    options = _options()
    for name in SIZES if options.model == "both" else [options.model]:
        with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
            print_rates(name, measure(name, Path(folder), options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a searcher against a bare LLM.generate")
    parser.add_argument("--model", choices=[*SIZES, "both"], default="both", help="1 M or 107 M parameters")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each")
    parser.add_argument("--seconds", type=float, default=40.0, help="measured time of a searcher's turn")
    parser.add_argument("--loads", type=int, default=6, help="prompts of the bare peer, in times what is in flight")
    parser.add_argument("--core", type=int, default=1, help="the core that the engines are bound to")
    parser.add_argument("--bare", help=argparse.SUPPRESS)  # the peer's own process
    options = parser.parse_args()
    if options.bare:
        run_bare(json.loads(options.bare))
        sys.exit()
    return options


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, list[Rate]]:
    """The rates of every kind, one for each round."""
    size = SIZES[name]
    model = make_model(size, folder)
    kinds: dict[str, Callable[[Path], Rate]] = {
        "LLM.generate, tokens alone": lambda _: bare(size, model, options, logprobs=False),
        "LLM.generate, log-probabilities": lambda _: bare(size, model, options, logprobs=True),
        "tba search, weights stay": lambda place: searcher(size, model, place, options, swaps=False),
        "tba search, a swap every 10 s": lambda place: searcher(size, model, place, options, swaps=True),
    }
    rates: dict[str, list[Rate]] = {kind: [] for kind in kinds}
    for round_ in range(options.rounds):
        for number, (kind, run) in enumerate(kinds.items()):
            place = folder / f"{round_}-{number}"
            place.mkdir()
            rates[kind].append(run(place))
            print(f"{name}: {kind}: {rates[kind][-1]}", file=sys.stderr, flush=True)
    return rates


def print_rates(name: str, rates: dict[str, list[Rate]]) -> None:
    medians = {
        kind: Rate(statistics.median(r.wall for r in of_kind), statistics.median(r.cpu for r in of_kind))
        for kind, of_kind in rates.items()
    }
    plain, logprobs, *_ = medians.values()
    rows = [
        [kind, f"{rate.wall:,.0f}", f"{rate.cpu:,.0f}", f"{rate.wall / plain.wall:.2f}", f"{rate.cpu / plain.cpu:.2f}",
         f"{rate.wall / logprobs.wall:.2f}", f"{rate.cpu / logprobs.cpu:.2f}"]
        for kind, rate in medians.items()
    ]  # fmt: skip
    headings = ["", "tokens/s", "per CPU s", "ratio to bare", "CPU", "ratio to it with log-probs", "CPU"]
    size = SIZES[name]
    print_table(f"{name} model, {size.in_flight} in flight, {SAMPLES} per prompt, {size.dtype}", headings, rows)


# ---------------------------------------------------------------- what both generate with


def make_model(size: Size, folder: Path) -> Path:
    """A random Llama with a tokenizer of made-up words, and prompts.jsonl beside it."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    shape = size.shape | special | {"max_position_embeddings": CONTEXT, "vocab_size": size.vocabulary}
    model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **shape)).to(getattr(torch, size.dtype))
    model.generation_config.eos_token_id = endings(size)
    model.save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(size.vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(PROMPTS):
            ids = random.integers(1, size.vocabulary - size.endings, random.integers(20, 100))
            file.write(json.dumps({"question": " ".join(f"w{n}" for n in ids), "answer": "#### 7"}) + "\n")
    return folder / "model"


def endings(size: Size) -> list[int]:
    """The token ids that end a response."""
    return list(range(size.vocabulary - size.endings, size.vocabulary))


def on_core(core: int) -> list[str]:
    return ["taskset", "--cpu-list", str(core)]


def environment() -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # In one process, as the searcher's engine is: on one core the default, two processes, has nothing to gain.
    return os.environ | threads | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


# ---------------------------------------------------------------- the bare peer


def bare(size: Size, model: Path, options: argparse.Namespace, *, logprobs: bool) -> Rate:
    """`LLM.generate` in a process of its own."""
    task = {"model": str(model), "name": next(n for n, s in SIZES.items() if s is size), "logprobs": logprobs}
    command = [*on_core(options.core), sys.executable, "-m", "benchmarks.generation", "--bare"]
    arguments = json.dumps(task | {"loads": options.loads})
    done = subprocess.run([*command, arguments], env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return Rate(**json.loads(done.stdout.splitlines()[-1]))


def run_bare(task: dict[str, Any]) -> None:
    """Generate for several loads of prompts, and print the rate while all places were taken."""
    import numpy as np
    from vllm import LLM, SamplingParams

    from tba.common.config import TaskSection
    from tba.searcher.run import load_tokenizer
    from tba.searcher.tasks import load_task

    size = SIZES[task["name"]]
    prompts = load_task(TaskSection(name="gsm8k", train=str(Path(task["model"]).parent / "prompts.jsonl"))).prompts()
    tokenizer = load_tokenizer(task["model"])
    count = task["loads"] * size.in_flight
    order = np.random.default_rng(0).permutation(len(prompts))
    chosen = [prompts[order[n // SAMPLES % len(prompts)]] for n in range(count)]
    ids = [{"prompt_token_ids": tokenizer.encode(prompt.text)} for prompt in chosen]
    asked = {"logprobs": 0, "flat_logprobs": True} if task["logprobs"] else {}
    llm = LLM(
        task["model"], dtype=size.dtype, skip_tokenizer_init=True, max_num_seqs=size.in_flight,
        max_model_len=CONTEXT, kv_cache_memory_bytes=1 << 30, generation_config="vllm",
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    params = SamplingParams(
        temperature=1.0, max_tokens=size.max_tokens, detokenize=False, stop_token_ids=endings(size), **asked
    )
    llm.generate(ids[: size.in_flight // 8], params, use_tqdm=False)  # compiles
    steps = watched(llm.llm_engine)
    llm.generate(ids, params, use_tqdm=False)
    print(json.dumps(rate_between(steps, size.in_flight, count - size.in_flight)))


Step = tuple[float, float, int, int]  # wall seconds, CPU seconds, responses and tokens so far


def watched(engine: Any) -> list[Step]:
    """Let the engine note its progress after each step in the list."""
    steps: list[Step] = [(time.perf_counter(), time.process_time(), 0, 0)]
    step = engine.step

    def noting() -> Any:
        outputs = step()
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        steps.append((time.perf_counter(), time.process_time(), steps[-1][2] + len(outputs), steps[-1][3] + tokens))
        return outputs

    engine.step = noting
    return steps


def rate_between(steps: list[Step], first: int, last: int) -> dict[str, float]:
    """The rates from `first` to `last` finished responses."""
    start = next(step for step in steps if step[2] >= first)
    end = next(step for step in steps if step[2] >= last)
    wall, cpu, _, tokens = (b - a for a, b in zip(start, end, strict=True))
    return {"wall": tokens / wall, "cpu": tokens / cpu}


# ---------------------------------------------------------------- the searcher


def searcher(size: Size, model: Path, place: Path, options: argparse.Namespace, *, swaps: bool) -> Rate:
    """`tba search` beside a buffer server and, with `swaps`, someone who publishes."""
    settings = {
        "model.path": model, "model.dtype": size.dtype, "task.name": "gsm8k", "run.dir": place,
        "task.train": model.parent / "prompts.jsonl", "search.samples_per_prompt": SAMPLES,
        "search.max_in_flight": size.in_flight, "search.max_tokens": size.max_tokens, "search.gpus": "cpu",
        "search.max_model_len": CONTEXT, "buffer.dedup": False,
    }  # fmt: skip
    with serving.serving(place, *(f"{key}={value}" for key, value in settings.items())) as (_, address):
        publisher = Publisher(address, size, model, place / "snapshots")
        publisher.publish()
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "tba", "search", *sets, "--set", f"buffer.address={address}"]
        with (place / "search.log").open("wb") as log:
            process = subprocess.Popen(
                [*on_core(options.core), *command], env=environment(), stdout=log, stderr=subprocess.STDOUT
            )
        try:
            return _rate_of(process, place / "buffer.sqlite", size, options.seconds, publisher if swaps else None)
        finally:
            process.terminate()
            process.wait(_PATIENCE_SECONDS)
            publisher.close()


def _rate_of(
    process: "subprocess.Popen[bytes]", database: Path, size: Size, seconds: float, publisher: "Publisher | None"
) -> Rate:
    # Two loads: the first compiles and fills the places, the second mixes the ages of what is in them.
    wait_for(process, lambda: progress(database)[0] >= 2 * size.in_flight)
    start = (time.perf_counter(), cpu_seconds(process.pid), progress(database)[1])
    deadline = time.monotonic() + seconds
    stopped = threading.Event()
    thread = threading.Thread(target=publisher.publish_often, args=(stopped,)) if publisher else None
    if thread:
        thread.start()
    wait_for(process, lambda: time.monotonic() >= deadline)
    end = (time.perf_counter(), cpu_seconds(process.pid), progress(database)[1])
    if thread:
        stopped.set()
        thread.join()
    wall, cpu, tokens = (b - a for a, b in zip(start, end, strict=True))
    return Rate(tokens / wall, tokens / cpu)


def wait_for(process: "subprocess.Popen[bytes]", done: Callable[[], bool]) -> None:
    """Until it is; raises if the searcher ends before."""
    while not done():
        if process.poll() is not None:
            raise RuntimeError(f"the searcher ended with {process.returncode}")
        time.sleep(_POLL_SECONDS)


def progress(database: Path) -> tuple[int, int]:
    """Responses and tokens that the buffer has acknowledged."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        query = "SELECT COUNT(*), COALESCE(SUM(response_tokens), 0) FROM trajectory_rows WHERE error IS NULL"
        found: tuple[int, int] = connection.execute(query).fetchone()
        return found
    finally:
        connection.close()


def cpu_seconds(process: int) -> float:
    """Time on the processor of a process, all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Publisher:
    """Publishes the model's own weights again and again: what a swap costs does not depend on what they are."""

    def __init__(self, address: str, size: Size, model: Path, snapshots: Path) -> None:
        self._client = BufferClient(address, role="publisher", name="bench")
        self._client.call(
            wire.Hello(host="bench", pid=os.getpid(), software="bench"),
            wire.Welcome,
            deadline_seconds=_PATIENCE_SECONDS,
        )
        self._model = model
        self._snapshots = snapshots
        self._canary = canary(model, size)
        self._versions: Iterator[int] = iter(range(1 << 30))

    def publish(self) -> None:
        """One more version."""
        version = next(self._versions)
        self._snapshots.mkdir(exist_ok=True)
        final = self._snapshots / directory_name(version)
        temporary = temporary_directory(final)
        shutil.copytree(self._model, temporary, dirs_exist_ok=True)
        manifest = Manifest("run", version, version, time.time(), describe_files(temporary), self._canary)
        ref = wire.WeightsRef(
            version=version, step=version, path=str(final), manifest_sha256=seal(temporary, final, manifest)
        )
        self._client.call(wire.AnnounceSnapshot(weights=ref, bytes=0), wire.Done, deadline_seconds=_PATIENCE_SECONDS)

    def publish_often(self, stopped: threading.Event) -> None:
        """A version every 10 s until told to stop."""
        while not stopped.wait(SWAP_SECONDS):
            self.publish()

    def close(self) -> None:
        self._client.close()


def canary(model: Path, size: Size) -> Canary:
    """Four sequences of 64 random tokens, with log-probabilities by transformers in float32."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    ids = np.random.default_rng(1).integers(0, size.vocabulary - size.endings, (4, 64)).tolist()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor(ids)).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, torch.tensor(ids)[:, 1:, None])[..., 0]
    return Canary(ids, logprobs.tolist())


if __name__ == "__main__":
    main()
