"""The demo on a GPU that vLLM and the trainer share."""

import json
import subprocess
import sys


def test_the_demo_gains_25_points_with_vllm_and_trainer_on_one_gpu(tmp_path, pytestconfig):
    settings = {
        "run.dir": tmp_path / "run",
        "buffer.address": f"ipc://{tmp_path}/buffer",
        "model.dtype": "bfloat16",
        "search.engine": "vllm",
        "search.gpus": "0",
        "search.gpu_memory_utilization": 0.3,
        # What vLLM measures: the demo's file has a size for CPUs.
        "search.kv_cache_gib": "auto",
        "train.gpu": "0",
    }
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "tba", "run", "examples/arithmetic/demo.toml", *options]
    subprocess.run(command, check=True, cwd=pytestconfig.rootpath, timeout=280)
    evaluations = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    assert evaluations[-1]["accuracy"] - evaluations[0]["accuracy"] >= 0.25
