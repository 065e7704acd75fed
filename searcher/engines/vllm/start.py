"""Starting and ending vLLM: its environment, and the arguments that this project depends on."""

import dataclasses
import os
from typing import Any

from tba.common.config.run import ModelSection
from tba.common.config.search import SearchSection, check_arguments
from tba.common.errors import ConfigError, EngineError, named
from tba.common.system.process import importing
from tba.common.terminal import need_engine
from tba.common.weights.model_files import model_directory

ADAPTER_ID = 1
_WORKER = "tba.searcher.engines.vllm.worker"
# Responses in flight with `auto`: the largest batch for which vLLM captures CUDA graphs, and its own limit on CPUs.
_MOST_ON_GPU, _MOST_ON_CPU = 512, 256
_CPU_CACHE_GIB = 1.0
# Such as MLA.
_HALF = 'some kernels of GPUs take 16 bits alone: try model.dtype = "bfloat16"; '
_UNSUPPORTED = (
    "if `vllm serve` does not start with it either, this vLLM does not support the model: try another release, or "
    'search.engine = "transformers"'
)
# The values of `max_lora_rank` that vLLM has buffers for.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def import_vllm() -> None:
    """Import vLLM with the environment that this engine needs; the user's settings take precedence.

    Raises MissingExtra if it is not installed, ConfigError if it cannot be used.
    """
    # Read when an engine is created, so set it even if vLLM is already imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Workers of tensor parallelism: a fork would copy the threads and sockets of this process in an undefined state.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # It warns at each reload that rotary embeddings have no weights, which is harmless.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    choose_threads = "OMP_NUM_THREADS" not in os.environ
    # On a machine whose cores are busy, two OpenMP threads were 20 times slower than one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    need_engine("vllm")
    try:
        with importing():
            import torch
            import vllm

            # vLLM imports the most when it is asked for the class.
            tags = hasattr(vllm.LLMEngine, "set_weight_version")
    except ImportError as error:
        raise ConfigError(f"vLLM is installed but cannot be imported ({error}): see docs/install.md") from error
    if not tags:
        raise ConfigError(f"vLLM {vllm.__version__} does not tag tokens with weight versions: install a newer one")
    if choose_threads:
        # torch may have been imported before the variable was set.
        torch.set_num_threads(1)


def start_vllm(
    model: ModelSection,
    search: SearchSection,
    *,
    max_num_seqs: int,
    seed: int,
    lora_rank: int,
    pack_weights: bool,
    reads_text: bool,
) -> Any:
    """Return an `LLMEngine` in this process, with a tokenizer if it `reads_text`.

    Raises EngineError if the model cannot be served, ConfigError for an argument of `search.vllm` that vLLM lacks, and
    with `search.top_k` if it cannot tell which tokens it kept.
    """
    if search.top_k:
        _check_kept()
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    own: dict[str, Any] = dict(
        model=str(model_directory(model.path)),
        dtype=model.dtype,
        max_model_len=search.max_model_len or None,
        max_num_seqs=max_num_seqs,
        seed=seed,
        tensor_parallel_size=search.tensor_parallel,
        enforce_eager=search.enforce_eager,
        skip_tokenizer_init=not reads_text,
        # Each request defines its sampling, without defaults from the model.
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        scheduling_policy="priority",
        worker_extension_cls=f"{_WORKER}.WeightWorker",
        # The worker's module registers it.
        load_format="tba",
        model_loader_extra_config={"packed": pack_weights},
        **_memory(search),
        **_lora(lora_rank),
        # The tokens that were left to sample from.
        **({"return_sampling_mask": True} if search.top_k else {}),
    )
    check_arguments(search.vllm, [field.name for field in dataclasses.fields(EngineArgs)])
    if model.head_dtype != "model":
        # Logits in float32, merged with the changes of the model's config that the user asks for.
        own["hf_overrides"] = {**search.vllm.get("hf_overrides", {}), "head_dtype": model.head_dtype}
    # Asynchronous scheduling is vLLM's choice: on with CUDA, off on a CPU.
    defaults = {"enable_prefix_caching": True, "disable_log_stats": True, "use_tqdm_on_load": False}
    args = EngineArgs(**defaults | search.vllm | own)
    try:
        # The context decides vLLM's default of max_num_batched_tokens: 16,384 instead of 2,048 on an H100.
        return LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
    except Exception as error:
        # A validation error has several lines, and a KeyError has only the key.
        reason = " ".join(named(error).split())
        half = _HALF if model.dtype == "float32" and search.gpus != "cpu" else ""
        raise EngineError(f"vLLM did not start with {own['model']}: {reason}; {half}{_UNSUPPORTED}") from error


def _check_kept() -> None:
    """Raise ConfigError unless this vLLM can return the tokens that were left to sample from."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        raise ConfigError(
            "search.top_p, top_k and min_p with an objective that needs ratios to the sampler: this vLLM does not tell "
            "which tokens were left to sample from (only its GPU model runner does). Set top_p = 1, top_k = 0 and "
            'min_p = 0, or search.engine = "transformers"'
        )


def most_in_flight(search: SearchSection) -> int:
    """Return the largest number of responses in flight that an engine with these settings may choose."""
    if search.max_in_flight != "auto":
        return search.max_in_flight
    from vllm.platforms import current_platform

    return _MOST_ON_CPU if current_platform.is_cpu() else _MOST_ON_GPU


def adapter_request(path: str) -> Any:
    """Return vLLM's request of the one adapter that all requests use, with its files in the directory `path`.

    A swap replaces it in place, and requests in flight continue with the new one. "" is an adapter of zeros.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, path or "zero")


def _memory(search: SearchSection) -> dict[str, Any]:
    from vllm.platforms import current_platform

    size = search.kv_cache_gib
    if not current_platform.is_cpu():
        fixed = {} if size == "auto" else {"kv_cache_memory_bytes": int(size * 2**30)}
        return {"gpu_memory_utilization": search.gpu_memory_utilization, **fixed}
    # Without it, tensor parallelism needs one NUMA node per worker and refuses to start on fewer.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # An amount, not a fraction: trainer and buffer may use the host's memory too.
    return {"kv_cache_memory_bytes": int((_CPU_CACHE_GIB if size == "auto" else size) * 2**30)}


def _lora(rank: int) -> dict[str, Any]:
    """The settings of an engine with one adapter of this rank; none for rank 0."""
    if not rank:
        return {}
    if rank > _LORA_RANKS[-1]:
        raise ConfigError(
            f'lora.rank = {rank} is more than vLLM supports ({_LORA_RANKS[-1]}): set lora.publish = "merged"'
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(one for one in _LORA_RANKS if one >= rank)}


def leave_process_groups() -> None:
    """Destroy vLLM's process groups, which outlive its engine, so that another engine can start in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
