"""Models, batches, times, errors and a lack of memory, for tests/gpu and `make gpu-check`."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from tba.common.config import Config, ObjectiveSection, TrainSection
from tba.common.config.run import ModelSection
from tba.tests.helpers.trainer import make_batch, make_row
from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.preflight.check import Report, examine
from tba.trainer.preflight.shape import meta_model, shape_of

GIB, GB = 1 << 30, 1e9
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "7B": (3584, 18944, 28, 28, 4, 152064),
    "small": (128, 256, 3, 4, 2, 512),
    "tiny": (64, 128, 2, 4, 2, 512),
}
# Prompts, samples, and tokens: of a prompt and of a response on average, and of the longest response.
Shape = tuple[int, int, int, int, int]


def qwen(name: str, *, tiny: bool = False, **changes: Any) -> Qwen2Config:
    """Return the configuration of a size of Qwen2.5, or of a tiny or small model, tied or not as that size is."""
    shape = dict(zip((*_NAMES, "vocab_size"), _SIZES["tiny" if tiny else name], strict=True))
    fixed = {"architectures": ["Qwen2ForCausalLM"], "bos_token_id": None, "pad_token_id": None, "eos_token_id": 1}
    return Qwen2Config(**(shape | fixed | {"tie_word_embeddings": name != "7B"} | changes))


def random_model(config: PretrainedConfig, device: str) -> Any:
    """Return a model in float32 with the same random weights each time, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def random_steps(vocabulary: int, count: int, shape: Shape) -> list[TrainBatch]:
    """Return the batches of some steps. Responses have geometric lengths."""
    prompts, samples, prompt_tokens, response_tokens, longest = shape
    rng, batches = np.random.default_rng(0), []
    for step in range(count):
        rows: list[Row] = []
        for _ in range(prompts):
            prompt = rng.integers(2, vocabulary, int(prompt_tokens * rng.uniform(0.5, 1.5)) + 1)
            for _ in range(samples):
                length = int(min(longest, 1 + rng.geometric(1 / response_tokens)))
                rows.append(make_row(len(rows), prompt, rng.integers(2, vocabulary, length)))
        batches.append(make_batch(rows, rng.random((prompts, samples)), step=step))
    return batches


def timed(device: str, call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return the result of a call, and its seconds until the device has done it."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    result = call(*arguments)
    wait()
    return result, time.perf_counter() - started


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """Return tensors as one vector in float64 on the host."""
    return torch.cat([tensor.detach().double().cpu().flatten() for tensor in tensors if tensor is not None])


def error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference as a share of the norm of the exact value."""
    found, exact = flat([found]), flat([exact])
    return float((found - exact).norm() / exact.norm())


def estimate_for(model: PretrainedConfig, train: TrainSection, folder: Path) -> Report:
    """Return the preflight's estimate of training a model in bfloat16 by RLOO on this GPU, without one on 80 GiB."""
    total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80 * GIB
    model.save_pretrained(folder)
    config = Config(model=ModelSection(dtype="bfloat16"), train=train, objective=ObjectiveSection(name="rloo"))
    return examine(config, shape_of(meta_model(folder)), ranks=1, gpu_total=total)


@contextlib.contextmanager
def little_memory(device: str) -> Iterator[None]:
    """Limit this process to 1 GiB on its GPU, or 256 MiB on the host, more than it has."""
    if device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + GIB) / total)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if device == "cpu":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + GIB // 4, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
