"""A searcher that receives SIGTERM while its engine starts, which takes minutes on a GPU."""

import os
from importlib.util import find_spec

import psutil
import pytest

from tba.tests.helpers.checks import wait_until
from tba.tests.runner import size

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def has_begun(searcher: psutil.Process, workers: int) -> bool:
    """Whether vLLM is starting: its libraries are mapped, or a tensor-parallel engine has its processes."""
    if workers == 1:
        return any("/vllm/" in part.path for part in searcher.memory_maps())
    session = os.getsid(searcher.pid)
    return sum(is_worker(child, session) for child in searcher.children(recursive=True)) >= workers


def is_worker(child: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(child.pid) == session and "resource_tracker" not in " ".join(child.cmdline())
    except (psutil.NoSuchProcess, ProcessLookupError):
        # The child ended meanwhile; a zombie raises the first, too.
        return False


@pytest.mark.parametrize("workers", size([2], [1, 2]))
def test_a_searcher_stopped_while_vllm_starts_exits_immediately_with_its_child_processes(
    make_config, start_tba, example_model, tmp_path, workers
):
    search = {"engine": "vllm", "gpus": "cpu", "tensor_parallel": workers, "max_model_len": 64, "kv_cache_gib": 0.1}
    run = make_config(model={"path": str(example_model), "dtype": "float32"}, search=search)
    started = start_tba("search", "--config", run.file)
    searcher = psutil.Process(started.pid)
    wait_until(lambda: has_begun(searcher, workers), 400, "vLLM starts")
    children = searcher.children(recursive=True)
    started.terminate()
    assert started.wait(240) == 0
    assert psutil.wait_procs(children, timeout=240)[1] == []
    # A searcher whose engine has started says goodbye to the buffer and logs it; this one had not.
    assert " left " not in (tmp_path / "tba0.log").read_text()
