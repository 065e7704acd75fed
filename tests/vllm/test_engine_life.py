"""Starting, failing and closing an engine, alone and with tensor parallelism."""

import os
import shutil
import sys

import psutil
import pytest

from tba.common.errors import ConfigError, EngineError, MissingExtra
from tba.searcher.engines.vllm import running
from tba.searcher.engines.vllm.running import LoadFailed

pytest.importorskip("vllm", reason="vLLM is not installed")


def open_weights(lab):
    """The files under the lab's directory that this process has open. On a GPU each is registered with CUDA."""
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sorted(path for path in map(os.path.realpath, links) if path.startswith(str(lab.root)))


def test_an_engine_whose_step_failed_or_that_is_closed_refuses_all_further_work(lab, old, monkeypatch):
    before = open_weights(lab)
    engine, params = lab.engine(old), running._params
    engine.load_weights(lab.snapshot(old))
    assert len(open_weights(lab)) > len(before)
    with monkeypatch.context() as patched:
        patched.setattr(running, "_params", lambda **settings: params(**settings | {"prompt_logprobs": None}))
        with pytest.raises(EngineError, match="no log-probabilities for a sequence to score"):
            engine.score([[1, 2, 3]])
    lab.submit(engine, [1, 2, 3])

    def fail():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._llm, "step", fail)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"failed in a step .* out of memory"):
            engine.step()
    engine.close()
    engine.close()
    assert open_weights(lab) == before
    with pytest.raises(EngineError, match="closed"):
        lab.submit(engine, [1, 2, 3])


def test_a_model_that_cannot_be_served_is_an_engine_error(lab, old):
    with pytest.raises(EngineError, match=r"did not start with .*max_model_len"):
        lab.engine(old, max_model_len=4096)


def test_a_directory_without_safetensors_is_a_config_error(lab, old, monkeypatch):
    monkeypatch.setattr(old, "save_pretrained", old.config.save_pretrained)
    with pytest.raises(ConfigError, match="no safetensors"):
        lab.engine(old)


def test_without_vllm_the_missing_extra_is_named(lab, old, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match="vllm is not installed: in the clone of tba"):
        lab.engine(old)


def without_swap(wrapper):
    """Make the second worker one that cannot swap in place."""
    if wrapper.rank == 1:
        wrapper.worker.tba_swap = None


def test_two_workers_swap_alike_also_if_one_cannot_swap_in_place_and_leave_no_process(lab):
    """Tensor parallelism: the slowest test here, as its workers each import torch and vLLM."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    old, new = (lab.model(seed, tied=True, **shape) for seed in (1, 2))
    before = set(psutil.Process(os.getpid()).children(recursive=True))
    engine = lab.engine(old, tensor_parallel=2)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    request = lab.submit(engine, lab.tokens(1, 12))
    for _ in range(5):
        engine.step()
    snapshot = lab.snapshot(new)
    engine.prepare(snapshot)
    assert engine.load_weights(snapshot).way == "in place"
    version = snapshot.manifest.version
    assert lab.finish(engine)[request].version_runs.tolist() == [[0, 5], [version, 15]]
    lab.assert_scores(engine, new)
    # A failure of one leaves the replies of the other in order, and all reload then.
    engine._llm.collective_rpc(without_swap)
    for _ in range(2):
        with pytest.raises(LoadFailed, match="no weights are prepared"):
            engine.call("tba_exchange")
        assert engine.call("tba_prepared") == [(True, None)] * 2
    assert engine.load_weights(lab.snapshot(old)).way == "reload"
    lab.assert_scores(engine, old)
    # At the start one that cannot swap in place decides for both.
    assert engine.hot_reload._self_test([None, "told so"]) == "reload"
    engine.close()
    left = set(psutil.Process(os.getpid()).children(recursive=True)) - before
    # Python's own helper ends with this process.
    assert [child for child in left if "resource_tracker" not in " ".join(child.cmdline())] == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_engine_swaps_too(lab):
    old, new = lab.model(seed=1), lab.model(seed=2)
    engine = lab.engine(old, enforce_eager=False)
    assert engine.load_weights(lab.snapshot(new)).way == "in place"
    lab.assert_scores(engine, new)
