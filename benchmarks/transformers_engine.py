"""Tokens per second of the Transformers engine against `model.generate` in groups.

    python -m benchmarks.transformers_engine [--model small|large|both] [--rounds 3] [--profile]

Both answer the same 256 requests, on one thread of a CPU: prompts of 8 to 64 tokens, and for each request a number of
tokens to generate, geometric with mean 60, at most 256. `generate` takes them in groups of 64, left-padded, and runs
until the longest of a group is done; the engine has 64 places and all requests in its queue. Both sample at temperature
1; `generate` is not asked for log-probabilities, which the engine always gives. They run in turns, in one process.

The end is in the figures: the engine's last responses run in an ever emptier batch, as a searcher's never do.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.table import print_table
from tba.searcher.engine import GenerationRequest, SamplingSettings

if TYPE_CHECKING:
    from tba.searcher.engine_transformers import TransformersEngine

IN_FLIGHT = 64
REQUESTS = 256
MEAN_TOKENS = 60
MAX_TOKENS = 256
CONTEXT = 512

SHAPES = {
    "small": {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 2048,
    },
    "large": {
        "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 16_000,
    },
}  # fmt: skip


def main() -> None:
    options = _options()
    rows = []
    for name in SHAPES if options.model == "both" else [options.model]:
        with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
            rows.append(measure(name, Path(folder), options))
    headings = ["model", "parameters", "generate, tokens/s", "engine, tokens/s", "ratio", "lowest", "highest"]
    title = f"{REQUESTS} requests, {IN_FLIGHT} in flight, medians of {options.rounds} rounds"
    print_table(title, headings, rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the Transformers engine against model.generate")
    parser.add_argument("--model", choices=[*SHAPES, "both"], default="both", help="1 M or 20 M parameters")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--profile", action="store_true", help="also say where the engine's time goes")
    return parser.parse_args()


def measure(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """One row of the table."""
    import torch
    from transformers import AutoModelForCausalLM

    from tba.searcher.engine_transformers import TransformersEngine

    torch.set_num_threads(1)
    make_model(name, folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = TransformersEngine(
        str(folder), dtype="float32", device="cpu", max_in_flight=IN_FLIGHT, seed=0, canary_tolerance=1e-3
    )
    requests = make_requests(SHAPES[name]["vocab_size"])
    few = requests[:8]
    by_generate(model, few)
    by_engine(engine, few)
    pairs = []
    for _ in range(options.rounds):
        pairs.append((rate(lambda: by_generate(model, requests)), rate(lambda: by_engine(engine, requests))))
        print(f"{name}: generate {pairs[-1][0]:,.0f}, engine {pairs[-1][1]:,.0f} tokens/s", file=sys.stderr, flush=True)
    if options.profile:
        profile(lambda: by_engine(engine, requests))
    ratios = [ours / theirs for theirs, ours in pairs]
    theirs, ours = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return [
        name, f"{millions:.1f} M", f"{theirs:,.0f}", f"{ours:,.0f}",
        *(f"{number:.2f}" for number in (statistics.median(ratios), min(ratios), max(ratios))),
    ]  # fmt: skip


def make_model(name: str, folder: Path) -> None:
    """A random Llama that never ends a response itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(tie_word_embeddings=True, max_position_embeddings=CONTEXT, **(SHAPES[name] | special))
    LlamaForCausalLM(config).save_pretrained(folder)


def make_requests(vocabulary: int) -> list[GenerationRequest]:
    """The requests that both answer."""
    random = np.random.default_rng(0)
    tokens = np.minimum(random.geometric(1 / MEAN_TOKENS, REQUESTS), MAX_TOKENS).tolist()
    return [
        GenerationRequest(
            number,
            random.integers(1, vocabulary, random.integers(8, 65)).astype(np.int32),
            SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=count, seed=number),
        )
        for number, count in enumerate(tokens)
    ]


def rate(answer: Callable[[], int]) -> float:
    """Tokens per second."""
    start = time.perf_counter()
    tokens = answer()
    return tokens / (time.perf_counter() - start)


def by_engine(engine: "TransformersEngine", requests: Sequence[GenerationRequest]) -> int:
    """Answer all with the engine. Returns the number of tokens."""
    for request in requests:
        engine.submit(request)
    tokens = 0
    while engine.in_flight:
        tokens += sum(len(generation.response_ids) for generation in engine.step())
    return tokens


def by_generate(model: Any, requests: Sequence[GenerationRequest]) -> int:
    """Answer all with `model.generate`. Returns the number of tokens that were asked for."""
    import torch

    for first in range(0, len(requests), IN_FLIGHT):
        group = requests[first : first + IN_FLIGHT]
        longest = max(len(request.prompt_ids) for request in group)
        ids = torch.zeros(len(group), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(group):
            ids[row, longest - len(request.prompt_ids) :] = torch.from_numpy(request.prompt_ids.astype(np.int64))
            mask[row, longest - len(request.prompt_ids) :] = 1
        count = max(request.sampling.max_tokens for request in group)
        # top_k is 50 unless told: it would sample from another distribution, and sort for it.
        out = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=count)
        assert out.shape == (len(group), longest + count)
    return sum(request.sampling.max_tokens for request in requests)


def profile(run: Callable[[], int]) -> None:
    """Print the functions that take the most time."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
