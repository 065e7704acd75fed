"""A swap that does not take effect is detected, even if one step changes less than rounding, and is repaired.

Most faults are injected into this project's own code, because vLLM's cannot be made to fail on demand.
"""

import numpy as np
import pytest
import torch

from tba.common.errors import CanaryMismatch, ConfigError, EngineError, EngineFaulty, SnapshotError
from tba.searcher.engines.vllm.weight_swap import WeightSwap
from tba.tests.vllm.conftest import cpu_backend, worker_of

pytest.importorskip("vllm", reason="vLLM is not installed")

BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def old(lab):
    return lab.rounded(lab.model(seed=1, tied=True))


@pytest.fixture(scope="module")
def near(lab, old):
    """One small optimiser step away: every tenth element changes by one unit in the last place of bfloat16."""
    near = lab.rounded(lab.step(old, 1, changed=0.1))
    assert all((one != other).any() for one, other in zip(near.parameters(), old.parameters(), strict=True))
    return near


@pytest.fixture(scope="module")
def engine(lab, old, dtype):
    engine = lab.engine(old, dtype=dtype, canary_tolerance=BOUNDS[dtype])
    yield engine
    engine.close()


def assert_reloaded(lab, engine, model, dtype):
    """The exchange fails its check, and after vLLM's reload the new weights serve."""
    new = lab.snapshot(model, dtype=dtype)
    report = engine.load_weights(new)
    assert report.way == "reload"
    assert engine.weights_version == new.manifest.version
    lab.assert_scores(engine, model, atol=BOUNDS[dtype])


def leave_out(monkeypatch, names):
    """Make exchanges skip the tensors whose names satisfy `names`."""
    original = WeightSwap._copy

    def without(self, copies):
        original(self, [copy for copy in copies if not names(copy[0].name)])

    monkeypatch.setattr(WeightSwap, "_copy", without)


@pytest.mark.parametrize(
    "names",
    [
        lambda name: True,
        lambda name: name == "model.layers.1.self_attn.o_proj.weight",
        lambda name: name == "model.layers.0.input_layernorm.weight",
    ],
    ids=["all", "a projection", "a norm"],
)
def test_a_swap_that_leaves_something_out_is_detected_and_all_weights_are_reloaded(
    lab, engine, old, near, dtype, names, monkeypatch
):
    engine.load_weights(lab.snapshot(old, dtype=dtype))
    leave_out(monkeypatch, names)
    assert_reloaded(lab, engine, near, dtype)


def test_in_bfloat16_the_canary_alone_would_not_have_detected_it(lab, engine, old, near, dtype):
    engine.load_weights(lab.snapshot(old, dtype=dtype))
    ids = lab.tokens(3, 40)
    difference = np.abs(engine.score([ids])[0] - lab.logprobs(near, ids)).max()
    assert (difference < BOUNDS[dtype]) == (dtype == "bfloat16")


@cpu_backend
def test_a_head_that_computes_with_a_packed_copy_is_detected_and_reloaded(lab, engine, old, near, dtype):
    """As if vLLM packed heads at an unexpected time."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    engine.load_weights(lab.snapshot(old, dtype=dtype))
    (head,) = (one for one in worker_of(engine).get_model().modules() if isinstance(one, ParallelLMHead))
    head.quant_method.process_weights_after_loading(head)
    assert_reloaded(lab, engine, near, dtype)


def test_without_repacking_vllms_reload_leaves_a_tied_head_stale(lab, old, monkeypatch):
    """vLLM's own fault. When this test fails, `_repack_tied_heads` can go."""
    from tba.searcher.engines.vllm import worker

    monkeypatch.setattr(worker, "_repack_tied_heads", lambda _: None)
    with pytest.raises(ConfigError, match="left out by vLLM's reload, for example lm_head"):
        lab.engine(old, pack_weights=True)


@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)
def test_an_engine_that_cannot_load_weights_in_any_way_is_faulty(lab, old, near, dtype, monkeypatch):
    engine = lab.engine(old, dtype=dtype, canary_tolerance=BOUNDS[dtype])
    engine.load_weights(lab.snapshot(old, dtype=dtype))
    leave_out(monkeypatch, lambda name: True)
    monkeypatch.setattr(type(worker_of(engine)), "reload_weights", lambda self, weights_iterator: None)
    with pytest.raises(EngineFaulty, match="could not be restored: .* left out by vLLM.s reload"):
        engine.load_weights(lab.snapshot(near, dtype=dtype))
    with pytest.raises(EngineFaulty):
        engine.step()


def test_a_lack_of_memory_refuses_the_snapshot_and_not_the_engine(lab, engine, old, near, dtype, monkeypatch):
    engine.load_weights(lab.snapshot(old, dtype=dtype))
    # Of the swap and of the reload after it; the rollback finds memory.
    failures, exchange = iter(range(1)), WeightSwap.exchange
    reloads, reload = iter(range(1)), type(worker_of(engine)).reload_weights

    def out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def exchanging(self):
        return exchange(self) if next(failures, None) is None else out_of_memory()

    def reloading(self, **given):
        return reload(self, **given) if next(reloads, None) is None else out_of_memory()

    monkeypatch.setattr(WeightSwap, "exchange", exchanging)
    monkeypatch.setattr(type(worker_of(engine)), "reload_weights", reloading)
    with pytest.raises(SnapshotError, match="CUDA out of memory"):
        engine.load_weights(lab.snapshot(near, dtype=dtype))
    lab.assert_scores(engine, old, atol=BOUNDS[dtype])
    assert next(failures, None) is next(reloads, None) is None
    engine.load_weights(lab.snapshot(near, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
def test_a_model_whose_layout_is_not_found_is_reloaded_and_rolled_back_by_reload(lab, old, dtype, monkeypatch):
    from tba.searcher.engines.vllm import weight_swap

    def fail(*_):
        raise EngineError("no layout")

    monkeypatch.setattr(weight_swap, "record", fail)
    engine = lab.engine(old, dtype=dtype, canary_tolerance=BOUNDS[dtype])
    assert engine.call("tba_start") == ["EngineError: no layout"]
    new = lab.rounded(lab.model(seed=2, tied=True))
    for model, error in ((new, 0.0), (old, 0.0), (new, 2.0)):
        one = lab.snapshot(model, canary_error=error)
        if error:
            with pytest.raises(CanaryMismatch):
                engine.load_weights(one)
        else:
            assert engine.load_weights(one).way == "reload"
    lab.assert_scores(engine, old, atol=BOUNDS[dtype])
