"""Starting, failing and closing an engine, alone and with tensor parallelism."""

import os
import sys

import numpy as np
import psutil
import pytest

from tba.common.errors import ConfigError, EngineError, MissingExtra
from tba.searcher.engines.vllm import running
from tba.searcher.engines.vllm.running import LoadFailed

pytest.importorskip("vllm", reason="vLLM is not installed")


def test_after_one_engine_is_closed_another_can_start_and_the_closed_one_refuses_work(lab, old, new):
    first = lab.engine(old)
    first.close()
    first.close()
    with pytest.raises(EngineError, match="closed"):
        lab.submit(first, [1, 2, 3])
    second = lab.engine(new)
    assert second.weights_version == 0
    ids = lab.tokens(1, 40)
    np.testing.assert_allclose(second.score([ids])[0], lab.logprobs(new, ids), atol=1e-4)
    assert lab.generate(second, ids).version_runs.tolist() == [[0, 20]]
    second.close()


def test_an_engine_whose_step_failed_refuses_all_further_work(lab, old, monkeypatch):
    engine = lab.engine(old)
    lab.submit(engine, [1, 2, 3])

    def fail():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._llm, "step", fail)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"failed in a step .* out of memory"):
            engine.step()
    engine.close()


def test_a_score_that_is_missing_is_an_engine_error(lab, old, monkeypatch):
    engine = lab.engine(old)
    params = running._params
    monkeypatch.setattr(running, "_params", lambda **settings: params(**settings | {"prompt_logprobs": None}))
    with pytest.raises(EngineError, match="no log-probabilities for a sequence to score"):
        engine.score([[1, 2, 3]])


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


def test_two_workers_swap_alike_and_leave_no_process(lab):
    """Tensor parallelism: the slowest test here, as its workers each import torch and vLLM."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    old, new = (lab.model(seed, tied=True, **shape) for seed in (1, 2))
    before = set(psutil.Process(os.getpid()).children(recursive=True))
    engine = lab.engine(old, tensor_parallel=2)
    request = lab.submit(engine, lab.tokens(1, 12))
    for _ in range(5):
        engine.step()
    snapshot = lab.snapshot(new)
    engine.prepare(snapshot)
    assert engine.load_weights(snapshot).way == "in place"
    version = snapshot.manifest.version
    assert lab.finish(engine)[request].version_runs.tolist() == [[0, 5], [version, 15]]
    ids = lab.tokens(2, 40)
    np.testing.assert_allclose(engine.score([ids])[0], lab.logprobs(new, ids), atol=1e-4)
    engine.close()
    left = set(psutil.Process(os.getpid()).children(recursive=True)) - before
    # Python's own helper ends with this process.
    assert [child for child in left if "resource_tracker" not in " ".join(child.cmdline())] == []


def test_workers_agree_on_the_way_and_a_failure_of_one_leaves_the_replies_of_the_others_in_order(lab, monkeypatch):
    """One worker that cannot swap in place decides for both."""
    from tba.searcher.engines.vllm import start
    from tba.tests.helpers import one_sided_worker

    monkeypatch.setattr(start, "_WORKER", one_sided_worker.__name__)
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    old, new = (lab.model(seed, **shape) for seed in (1, 2))
    engine = lab.engine(old, tensor_parallel=2)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    ids = lab.tokens(2, 40)
    for model in (new, old):
        assert engine.load_weights(lab.snapshot(model)).way == "reload"
        np.testing.assert_allclose(engine.score([ids])[0], lab.logprobs(model, ids), atol=1e-4)
    for _ in range(2):
        with pytest.raises(LoadFailed, match="no weights are prepared"):
            engine.call("tba_exchange")
        assert engine.call("tba_prepared") == [(True, None)] * 2
    engine.close()
