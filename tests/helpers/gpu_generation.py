"""Generate with a bare `vllm.LLM` or with the engine of a searcher: `python -m tba.tests.helpers.gpu_generation`.

Arguments: bare or engine, the model's directory, the number of prompts. Prints one JSON object: tokens and seconds.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

IN_FLIGHT = 256
TOKENS = 256
CONTEXT = 1024
MEMORY = 0.85


def prompts(count: int, vocabulary: int) -> list[Any]:
    """Return prompts of 64 to 256 random tokens, the same for both."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, rng.integers(64, 256), dtype=np.int32) for _ in range(count)]


def bare(model: str, count: int) -> tuple[int, float]:
    """Generate with `LLM.generate`, log-probabilities included. Returns tokens and seconds."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=CONTEXT, max_num_seqs=IN_FLIGHT,
        gpu_memory_utilization=MEMORY, generation_config="vllm", logprobs_mode="processed_logprobs", seed=0,
    )  # fmt: skip
    sampling = SamplingParams(temperature=1.0, max_tokens=TOKENS, logprobs=0, detokenize=False)
    asked: list[Any] = [{"prompt_token_ids": ids.tolist()} for ids in prompts(count, vocabulary_of(model))]
    llm.generate(asked[:IN_FLIGHT], sampling, use_tqdm=False)
    started = time.perf_counter()
    done = llm.generate(asked, sampling, use_tqdm=False)
    return sum(len(one.outputs[0].token_ids) for one in done), time.perf_counter() - started


def engine(model: str, count: int) -> tuple[int, float]:
    """Generate with a `VllmEngine` that always has as many requests in flight. Returns tokens and seconds."""
    from tba.common.config.run import ModelSection
    from tba.common.config.search import SearchSection
    from tba.searcher.engines.engine import GenerationRequest, SamplingSettings
    from tba.searcher.engines.vllm.engine import VllmEngine
    from tba.tests.helpers.engines import end_tokens

    search = SearchSection(max_model_len=CONTEXT, max_in_flight=IN_FLIGHT, gpu_memory_utilization=MEMORY)
    running = VllmEngine(
        ModelSection(path=model, dtype="bfloat16"), search, seed=0, canary_tolerance=0.5, stopping=end_tokens(model)
    )
    sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=TOKENS)
    asked = prompts(count, vocabulary_of(model))

    def generate(first: int, wanted: list[Any]) -> int:
        requests = (GenerationRequest(first + n, ids, sampling) for n, ids in enumerate(wanted))
        tokens, request = 0, next(requests, None)
        while request is not None or running.in_flight:
            while request is not None and running.in_flight < IN_FLIGHT:
                running.submit(request)
                request = next(requests, None)
            tokens += sum(len(one.response_ids) for one in running.step())
        return tokens

    generate(1, asked[:IN_FLIGHT])
    started = time.perf_counter()
    tokens = generate(1 + IN_FLIGHT, asked)
    seconds = time.perf_counter() - started
    running.close()
    return tokens, seconds


def vocabulary_of(model: str) -> int:
    """Return the number of token ids of a model's configuration."""
    return int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])


def main() -> None:
    kind, model, count = sys.argv[1:]
    tokens, seconds = {"bare": bare, "engine": engine}[kind](model, int(count))
    print(json.dumps({"tokens": tokens, "seconds": seconds}))


if __name__ == "__main__":
    main()
