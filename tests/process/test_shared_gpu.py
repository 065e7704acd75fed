"""`tba run` with vLLM and the trainer on one GPU. A small program stands for nvidia-smi, and vLLM runs on the CPU."""

import os
from importlib.util import find_spec

import pytest

from tba.common.errors import EXIT_CONFIG
from tba.tests.process.conftest import arithmetic
from tba.tests.runner import FULL_SIZE

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not FULL_SIZE, reason="tests/unit/deploy/test_supervisor.py has the order without an engine"),
]


@pytest.fixture
def one_gpu(tmp_path, monkeypatch) -> None:
    """Put an nvidia-smi on PATH that lists one free GPU."""
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\ncase "$1" in --query-gpu=*) echo "0, GPU-00, 81559, 4";; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_trainer_starts_when_the_engine_on_its_gpu_has_measured_the_memory(make_config, start_tba, one_gpu):
    search = {"engine": "vllm", "gpus": "0", "gpu_memory_utilization": 0.3, "max_model_len": 64, "enforce_eager": True}
    search |= {"kv_cache_gib": 0.1}
    run = make_config(**arithmetic(search=search, train={"gpu": "0"}))
    # The trainer asks for a GPU, which torch does not show here: its failure ends the run, at whatever time it starts.
    assert start_tba("run", "--config", run.file).wait(300) == EXIT_CONFIG
    logs = {name: (run.directory / f"logs/{name}.log").read_text() for name in ("trainer", "search-0")}
    assert "torch sees none" in logs["trainer"]
    assert " joined " in logs["search-0"]
