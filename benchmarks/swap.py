"""The cost of a swap of weights for a searcher on vLLM, in multiples of one flat copy of the same bytes.

A random Qwen2 of 168 million bfloat16 weights with tied embeddings, on the CPU: without oneDNN's packed weights, where
vLLM computes with its parameters and swaps in place as on a GPU, and with them (vLLM's default), where it reloads. Each
swap is prepared in a thread while a full engine generates, as in a searcher; the pause is what remains. "longest step"
is by how much the longest step meanwhile exceeds the median step before. The peer is vLLM's own `reload_weights`.
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import print_table, timed
from tba.common.config.run import ModelSection
from tba.common.config.search import SearchSection
from tba.common.weights.snapshot import Canary, Manifest, Snapshot
from tba.searcher.engines.engine import GenerationRequest, LoadReport, SamplingSettings

ROUNDS = 7
VOCABULARY = 84_000
CANARY = [np.random.default_rng(seed).integers(0, VOCABULARY, 24).tolist() for seed in range(2)]
IN_FLIGHT, TOKENS = 32, 48


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        full = [publish(Path(folder), model, version) for version, model in enumerate(two_models(), 1)]
        rows = []
        for packed in (False, True):
            engine = start(full[0].path, packed)
            name = "oneDNN on" if packed else "oneDNN off"
            # The first scoring of a process loads and compiles.
            engine.load_weights(full[1])
            engine.load_weights(full[0])
            rows.append([f"{engine.load_weights(full[1]).way}, {name}", *measure(engine, [full[0], full[1]])])
            rows.append([f"reload_weights, {name}", "", "", f"{reload(engine, full[0]):.2f}", "", ""])
            engine.close()
    headings = ["swap", "prepare, alongside", "longest step", "exchange", "canary", "pause"]
    print_table("a swap of 168 M bfloat16 weights, in flat copies of the same bytes", headings, rows)


def two_models() -> Iterator[Any]:
    """Yield a random model, and a copy with the last bit flipped in 1 % of the elements."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).bfloat16().eval()
    yield model
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.view(torch.int16)[torch.rand(parameter.shape) < 0.01] ^= 1
    yield other


def publish(folder: Path, model: Any, version: int, canary: list[list[int]] = CANARY) -> Snapshot:
    """Write a snapshot like the trainer's, without the hashes. The canary are token ids."""
    path = folder / f"v{version:08d}"
    model.save_pretrained(path)
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1) for ids in canary]
    logprobs = [
        one.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist() for one, ids in zip(logits, canary, strict=True)
    ]
    manifest = Manifest("bench", version, version, 0.0, {}, Canary(canary, logprobs))
    return Snapshot(path, manifest, [path / "model.safetensors"])


def start(model: Path, packed: bool) -> Any:
    """Start a vLLM engine on the CPU."""
    from tba.searcher.engines.vllm.engine import VllmEngine
    from tba.tests.helpers.engines import end_tokens

    search = SearchSection(max_model_len=256, max_in_flight=IN_FLIGHT, kv_cache_gib=0.5, enforce_eager=True)
    section = ModelSection(path=str(model), dtype="bfloat16")
    return VllmEngine(section, search, seed=0, canary_tolerance=0.5, stopping=end_tokens(model), pack_weights=packed)


def measure(engine: Any, snapshots: list[Snapshot]) -> list[str]:
    """Time swaps while a full engine generates. Returns medians of their parts, in copies timed right before each."""
    found: list[list[float]] = []
    for number in range(ROUNDS):
        snapshot = snapshots[number % 2]
        unit = flat_copy(snapshot.weight_files[0].stat().st_size)
        with ThreadPoolExecutor(1) as executor:
            usual = steps_until(engine, time.perf_counter() + 1.0)
            preparing = executor.submit(engine.prepare, snapshot)
            steps = steps_until(engine, preparing)
            preparing.result()
        report: LoadReport = engine.load_weights(snapshot)
        while engine.in_flight:
            engine.step()
        # Nothing is prepared for a reload, so no step may have run meanwhile.
        longest = max(steps, default=statistics.median(usual)) - statistics.median(usual)
        parts = (report.read_seconds, longest, report.exchange_seconds, report.canary_seconds, report.pause_seconds)
        found.append([part / unit for part in parts])
    return [f"{statistics.median(column):.2f}" for column in zip(*found, strict=True)]


def steps_until(engine: Any, end: float | Future[None]) -> list[float]:
    """Return the seconds of each step of an engine that is kept full until a time, or until a future is done."""
    seconds: list[float] = []
    if not engine.in_flight:
        for number in range(IN_FLIGHT):
            engine.submit(request(number))
    while not end.done() if isinstance(end, Future) else time.perf_counter() < end:
        step, finished = timed(engine.step)
        seconds.append(step.wall)
        for generation in finished:
            engine.submit(request(generation.id))
    return seconds


def request(number: int) -> GenerationRequest:
    """Return a request with a short prompt and a long response."""
    return GenerationRequest(number, np.asarray(CANARY[0][:8], np.int32), SamplingSettings(1.0, 1.0, TOKENS))


def reload(engine: Any, snapshot: Snapshot) -> float:
    """Time vLLM's own reload of all weights, with the repacked tied head, in flat copies."""
    found = []
    for _ in range(3):
        unit = flat_copy(snapshot.weight_files[0].stat().st_size)
        call = partial(engine.call, "tba_reload", [*map(str, snapshot.weight_files)], 1)
        found.append(timed(call)[0].wall / unit)
    return statistics.median(found)


def flat_copy(size: int) -> float:
    """Return the seconds to copy `size` bytes in memory: the median of five, into memory that is already mapped."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return statistics.median(timed(lambda: target.copy_(source))[0].wall for _ in range(5))


if __name__ == "__main__":
    main()
