"""Starting, failing and ending an engine, alone and with tensor parallelism."""

import os
import sys

import numpy as np
import psutil
import pytest

from tba.common.errors import ConfigError, EngineError, MissingExtra

pytest.importorskip("vllm", reason="vLLM is not installed")


def test_a_closed_engine_lets_another_start_and_takes_no_work_itself(lab, old, new):
    first = lab.engine(old)
    first.close()
    first.close()
    with pytest.raises(EngineError, match="closed"):
        lab.submit(first, [1, 2, 3])
    second = lab.engine(new, initial_version=7)
    assert second.weights_version == 7
    ids = lab.tokens(1, 40)
    np.testing.assert_allclose(second.score([ids])[0], lab.logprobs(new, ids), atol=1e-4)
    assert lab.generate(second, ids).version_runs.tolist() == [[7, 20]]
    second.close()


def test_an_engine_whose_step_failed_says_so_ever_after(lab, old, monkeypatch):
    engine = lab.engine(old)
    lab.submit(engine, [1, 2, 3])

    def fail():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._llm, "step", fail)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"failed in a step .* out of memory"):
            engine.step()
    engine.close()


def test_a_model_that_cannot_be_served_is_an_engine_error(lab, old):
    with pytest.raises(EngineError, match=r"did not start with .*max_model_len"):
        lab.engine(old, max_model_len=4096)


def test_a_directory_without_safetensors_is_a_config_error(lab, old, monkeypatch):
    monkeypatch.setattr(old, "save_pretrained", old.config.save_pretrained)
    with pytest.raises(ConfigError, match="no safetensors"):
        lab.engine(old)


def test_without_vllm_the_missing_extra_is_named(lab, old, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match="with the extra vllm"):
        lab.engine(old)


@pytest.mark.parametrize(("pack_weights", "way"), [(True, "exchange"), (False, "in place")])
def test_two_workers_reload_alike_and_leave_no_process(lab, pack_weights, way):
    """Tensor parallelism: the slowest test here, as its workers each import torch and vLLM."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    old, new = (lab.model(seed, tied=True, **shape) for seed in (1, 2))
    before = set(psutil.Process(os.getpid()).children(recursive=True))
    engine = lab.engine(old, tensor_parallel=2, pack_weights=pack_weights)
    request = lab.submit(engine, lab.tokens(1, 12))
    for _ in range(5):
        engine.step()
    snapshot = lab.snapshot(new)
    engine.prepare(snapshot)
    assert engine.load_weights(snapshot).way == way
    version = snapshot.manifest.version
    assert lab.finish(engine)[request].version_runs.tolist() == [[0, 5], [version, 15]]
    ids = lab.tokens(2, 40)
    np.testing.assert_allclose(engine.score([ids])[0], lab.logprobs(new, ids), atol=1e-4)
    stepped = lab.step(new, 1, changed=0.05)
    assert engine.load_weights(lab.delta(snapshot, stepped)).way == way
    np.testing.assert_allclose(engine.score([ids])[0], lab.logprobs(stepped, ids), atol=1e-4)
    engine.close()
    left = set(psutil.Process(os.getpid()).children(recursive=True)) - before
    # Python's own helper, which ends with this process.
    assert [child for child in left if "resource_tracker" not in " ".join(child.cmdline())] == []
