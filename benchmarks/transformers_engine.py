"""Tokens per CPU second of the Transformers engine against `model.generate` in groups, and its continuous batching.

    python -m benchmarks.transformers_engine [--model small|large|both] [--rounds 3] [--requests 256]

All answer the same 256 requests on one CPU thread: prompts of 8 to 64 tokens, and for each request a number of tokens
to generate, geometric with mean 60, at most 256. `generate` gets them in groups of 64, left-padded, and runs until the
longest response of a group is done. The engine has 64 rows and all requests in its queue. All sample at temperature 1.
`generate` returns no log-probabilities, the engine always does. The third is transformers' own
`ContinuousBatchingManager` with 64 rows and log-probabilities. They alternate in one process.

The figures include the end, where the engine's last responses run in an increasingly empty batch; a searcher never
reaches that state.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import in_turns, median_ratio, print_table, timed
from tba.searcher.engines.engine import GenerationRequest, SamplingSettings

if TYPE_CHECKING:
    from tba.searcher.engines.transformers_engine import TransformersEngine

IN_FLIGHT = 64
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, "both"], default="both", help="1 M or 20 M parameters")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each")
    parser.add_argument("--requests", type=int, default=256, help="requests per round")
    options = parser.parse_args()
    rows = []
    for name in SHAPES if options.model == "both" else [options.model]:
        with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
            rows.append(measure(name, Path(folder), options))
    headings = [
        "model", "parameters", "generate, tokens/CPU s", "its continuous batching", "engine", "engine / generate",
        "engine / continuous",
    ]  # fmt: skip
    title = f"{options.requests} requests, {IN_FLIGHT} in flight, medians of {options.rounds} rounds"
    print_table(title, headings, rows)


def measure(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return one row of the table. The model is a random Llama without an EOS id: responses have requested lengths."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tba.searcher.engines.transformers_engine import TransformersEngine
    from tba.tests.helpers.engines import end_tokens

    torch.set_num_threads(1)
    torch.manual_seed(0)
    special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(tie_word_embeddings=True, max_position_embeddings=CONTEXT, **(SHAPES[name] | special))
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    engine = TransformersEngine(
        str(folder), dtype="float32", device="cpu", max_in_flight=IN_FLIGHT, seed=0, canary_tolerance=1e-3,
        stopping=end_tokens(folder),
    )  # fmt: skip
    requests = make_requests(options.requests, SHAPES[name]["vocab_size"])
    ways = {
        "generate": partial(by_generate, model),
        "continuous": partial(by_continuous_batching, model),
        "engine": partial(by_engine, engine),
    }
    for answer in ways.values():
        answer(requests[:8])
    rates = in_turns({way: partial(rate, partial(answer, requests)) for way, answer in ways.items()}, options.rounds)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    medians = [f"{statistics.median(of_one):,.0f}" for of_one in rates.values()]
    ratios = [f"{median_ratio(rates['engine'], rates[peer]):.2f}" for peer in ("generate", "continuous")]
    return [name, f"{millions:.1f} M", *medians, *ratios]


def make_requests(count: int, vocabulary: int) -> list[GenerationRequest]:
    """Return the requests of one round."""
    random = np.random.default_rng(0)
    tokens = np.minimum(random.geometric(1 / MEAN_TOKENS, count), MAX_TOKENS).tolist()
    return [
        GenerationRequest(
            number,
            random.integers(1, vocabulary, random.integers(8, 65)).astype(np.int32),
            SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=length, seed=number),
        )
        for number, length in enumerate(tokens)
    ]


def rate(answer: Callable[[], int]) -> float:
    """Return tokens per second of processor time of all threads, which other work on the machine changes little."""
    seconds, tokens = timed(answer)
    return tokens / seconds.cpu


def by_engine(engine: "TransformersEngine", requests: Sequence[GenerationRequest]) -> int:
    """Answer all with the engine. Returns the number of tokens."""
    for request in requests:
        engine.submit(request)
    tokens = 0
    while engine.in_flight:
        tokens += sum(len(generation.response_ids) for generation in engine.step())
    return tokens


def by_generate(model: Any, requests: Sequence[GenerationRequest]) -> int:
    """Answer all with `model.generate`. Returns the number of requested tokens."""
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
        # The default top_k of 50 would sample from another distribution, and sort for it.
        out = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=count)
        assert out.shape == (len(group), longest + count)
    return sum(request.sampling.max_tokens for request in requests)


def by_continuous_batching(model: Any, requests: Sequence[GenerationRequest]) -> int:
    """Answer all with the paged cache of transformers, with enough pages for all. Returns the number of tokens."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(
        return_logprobs=True, max_requests_per_batch=IN_FLIGHT, max_batch_tokens=512, page_size=16,
        num_blocks=IN_FLIGHT * CONTEXT // 16,
    )  # fmt: skip
    tokens = finished = 0
    with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
        for request in requests:
            manager.add_request(request.prompt_ids.tolist(), max_new_tokens=request.sampling.max_tokens)
        while finished < len(requests):
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                finished += 1
                tokens += len(output.generated_tokens)
    return tokens


if __name__ == "__main__":
    main()
