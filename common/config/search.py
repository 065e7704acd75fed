"""[search]: generation."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tba.common.config.section import GpuList, NonNegative, Positive, PositiveFloat, Section

# One value, several to choose from, or the ends of a range.
Explored = float | tuple[float, ...] | dict[Literal["min", "max"], float]


class SearchSection(Section):
    """Generation: the engine, and how it explores."""

    engine: Literal["transformers", "vllm"] = "vllm"
    """The generation engine."""
    gpus: GpuList = "all"
    """GPUs, one searcher each: `0-6`, `0,2,4`, UUIDs, `all`, or `cpu`."""
    tensor_parallel: Positive = 1
    """vLLM: GPUs that share one engine; `gpus` is cut into consecutive groups of so many, one searcher each."""
    cpu_searchers: Positive = 1
    """Number of searchers when gpus is `cpu`."""
    samples_per_prompt: Positive = 24
    """S: responses generated for each leased prompt, handed over together."""
    max_in_flight: Positive = 256
    """Responses generated at the same time by one engine."""
    temperature: Explored = 1.0
    """Sampling temperature: one value, several to draw from (`[0.7, 1.0, 1.3]`), or a range (`{min = 0.7, max = 1.3}`).
    0 is greedy. Each trajectory records its own; the trainer compares log-probabilities only with those sampled at
    temperature 1 and top_p 1."""
    top_p: Explored = 1.0
    """Nucleus sampling: the smallest set of tokens with this much probability. One value, several or a range, drawn
    apart from the temperature."""
    explore: Literal["sample", "group", "searcher"] = "sample"
    """What temperature and top_p are drawn for, where they are several or a range: each response, each prompt's
    responses together, or each searcher once. All follow from run.seed."""
    max_tokens: Positive = 512
    """Longest response, in tokens."""
    reference_logprobs: bool = False
    """Compute the reference log-probabilities in the searcher (the paper's way), with a frozen copy of model.path on
    its device, in a thread beside generation; else the trainer computes those of the trajectories that it samples."""
    spool_dir: Path | None = None
    """Directory where searchers keep what the buffer has not acknowledged; by default `spool` in run.dir. One that
    died is delivered for by the next one that starts with this directory on the same machine."""
    spool_mib: PositiveFloat = 512.0
    """Size of one searcher's spool in MiB, at which it stops to generate until the buffer is back."""
    canary_tolerance: PositiveFloat | None = None
    """Largest |log-probability difference| to the trainer that a hot reload may show on the canary. By default
    1e-3 where model.dtype is float32 and 0.5 where it is bfloat16, whose rounding alone makes up to about 0.15."""
    max_model_len: NonNegative = 0
    """vLLM: longest prompt plus response; 0 is the model's own limit."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """vLLM on a GPU: the part of its memory that the engine may take."""
    kv_cache_gib: PositiveFloat = 1.0
    """vLLM on a CPU: size of the KV cache in GiB."""
    enforce_eager: bool = False
    """vLLM: run without compilation and CUDA graphs."""
    keep_prefix_cache: bool = False
    """vLLM: let prompts reuse keys and values that older weights computed. Faster, and the log-probabilities that are
    recorded are then those of mixed weights."""
    weights_from: Literal["auto", "path", "trainer"] = "auto"
    """Where snapshots come from. path: the trainer's directory, on a shared file system; trainer: its
    `train.serve_snapshots`; auto: the path where it is there, else the trainer."""
    weights_dir: Path | None = None
    """Where a node keeps the weights that its searchers serve or prepare, three to four times the model, and once more
    with `lora.publish = "adapter"`: a local disk, or /dev/shm. By default a directory of the user and the run in the
    system's temporary directory."""

    @field_validator("temperature", mode="before")
    @classmethod
    def _check_temperature(cls, value: Any) -> Any:
        # vLLM takes what is between for 0.01, and the recorded temperature would not be the true one.
        if any(0 < number < 0.01 or number < 0 for number in _explored_numbers(value)):
            raise ValueError("a temperature is 0 (greedy) or at least 0.01")
        return value

    @field_validator("top_p", mode="before")
    @classmethod
    def _check_top_p(cls, value: Any) -> Any:
        if not all(0 < number <= 1 for number in _explored_numbers(value)):
            raise ValueError("top_p is more than 0 and at most 1")
        return value


def _explored_numbers(value: Any) -> list[float]:
    """The numbers of an `Explored`, for checks. Raises ValueError if it is none."""
    if isinstance(value, dict):
        if set(value) != {"min", "max"}:
            raise ValueError("a range has two ends: { min = 0.7, max = 1.3 }")
        numbers = [value["min"], value["max"]]
    else:
        numbers = list(value) if isinstance(value, list | tuple) else [value]
    if not numbers:
        raise ValueError("the list is empty: name at least one value")
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise ValueError("write a number, a list of numbers, or a range { min = 0.7, max = 1.3 }")
    if isinstance(value, dict) and value["min"] > value["max"]:
        raise ValueError("the range's min is above its max")
    return numbers
