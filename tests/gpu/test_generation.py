"""A searcher's engine generates as fast as a bare `vllm.LLM` on the same GPU.

Run as a program with "bare" or "engine", a model's directory and the number of prompts, this file generates with one of
them, and prints one JSON object: tokens and seconds.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[vllm]'")

# Both generate this many responses of 256 tokens.
PROMPTS = 2048
IN_FLIGHT = 256
TOKENS = 256
CONTEXT = 1024
MEMORY = 0.85


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random Llama of 1.1 B parameters without an end token, so that all responses have the full length."""
    torch.manual_seed(0)
    special = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    shape = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2048, **special,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("generation") / "model"
    LlamaForCausalLM(shape).bfloat16().save_pretrained(directory)
    return directory


def rate_of(kind: str, model: Path) -> float:
    """Return tokens per second, in a process of its own: an engine returns its memory only at its end."""
    command = [sys.executable, "-m", "tba.tests.gpu.test_generation", kind, str(model), str(PROMPTS)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    # vLLM logs to the standard output too, also while it ends.
    found = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    assert found["tokens"] == PROMPTS * 256
    return float(found["tokens"] / found["seconds"])


@pytest.mark.timeout(2400)
def test_the_engine_of_a_searcher_is_as_fast_as_a_bare_one(model, record_property):
    """Twice each, alternating: a GPU that warms up slows both."""
    rates = [(rate_of("bare", model), rate_of("engine", model)) for _ in range(2)]
    best_bare, best_engine = max(bare for bare, _ in rates), max(engine for _, engine in rates)
    record_property("bare_tokens_per_second", best_bare)
    record_property("engine_tokens_per_second", best_engine)
    record_property("ratio", best_engine / best_bare)
    assert best_engine / best_bare > 0.9


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
