"""The engine arguments of vLLM that `search.vllm` must not set, since tba sets them.

Which other arguments there are is known only where vLLM is installed. They are read from its source, since its import
takes many seconds.
"""

import ast
import difflib
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from tba.common.errors import ConfigError

_HOT_RELOAD = "hot reload of weights depends on it"
_TOKENS = "tba passes token ids and decodes responses itself"
_ONE_PROCESS = "an engine runs on the search.tensor_parallel GPUs of one searcher"
_LORA = "set lora.rank and lora.publish"

# By argument, the reason or the key to set instead.
_OWN = {
    "model": "set model.path",
    "dtype": "set model.dtype",
    "seed": "set run.seed, from which each searcher's seed follows",
    "tokenizer": _TOKENS,
    "tokenizer_mode": _TOKENS,
    "skip_tokenizer_init": _TOKENS,
    "max_model_len": "set search.max_model_len",
    "max_num_seqs": "set search.max_in_flight",
    "tensor_parallel_size": "set search.tensor_parallel",
    "enforce_eager": "set search.enforce_eager",
    "gpu_memory_utilization": "set search.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set search.kv_cache_gib",
    "enable_lora": _LORA,
    "max_loras": _LORA,
    "max_lora_rank": _LORA,
    "logprobs_mode": "recorded log-probabilities must be those of the distribution that was sampled from",
    "generation_config": "each request defines its sampling",
    "scheduling_policy": "the canary must come before other requests",
    "worker_extension_cls": _HOT_RELOAD,
    "load_format": _HOT_RELOAD,
    "model_loader_extra_config": _HOT_RELOAD,
    "runner": "a searcher generates",
    "pipeline_parallel_size": _ONE_PROCESS,
    "distributed_executor_backend": _ONE_PROCESS,
    "nnodes": _ONE_PROCESS,
}


def check_arguments(names: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError for the first name of `search.vllm` that is not among the engine arguments of this vLLM."""
    for name in names:
        if name not in known:
            near = [one for one in difflib.get_close_matches(name, known, n=3) if own_argument(one) is None]
            hint = f"did you mean {' or '.join(near)}?" if near else "see the engine arguments in vLLM's documentation"
            raise ConfigError(f"search.vllm: vLLM has no engine argument {name!r}: {hint}")


def installed_arguments() -> list[str]:
    """Return the engine arguments of the vLLM that is installed here; [] if there is none, or its source differs."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return []
    try:
        tree = ast.parse((Path(found.origin).parent / "engine/arg_utils.py").read_bytes())
    except (OSError, SyntaxError):
        return []
    fields = (
        field.target
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        for field in node.body
        if isinstance(field, ast.AnnAssign)
    )
    return [target.id for target in fields if isinstance(target, ast.Name)]


def own_argument(name: str) -> str | None:
    """Return why `search.vllm` must not set an argument, or None if it may."""
    if name.startswith("data_parallel"):
        return _ONE_PROCESS
    return _OWN.get(name)
