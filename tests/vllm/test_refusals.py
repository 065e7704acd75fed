"""A wrong or damaged snapshot is refused, and the old weights continue to serve."""

import copy
import shutil

import pytest

from tba.common.errors import CanaryMismatch, EngineFaulty, SnapshotError
from tba.searcher.engines.engine import SamplingSettings

pytest.importorskip("vllm", reason="vLLM is not installed")


def without(model, name):
    """A model that saves everything but one tensor."""
    return _Saves({key: value for key, value in model.state_dict().items() if key != name})


def with_tensor(model, name, tensor):
    """A model that saves one tensor differently."""
    return _Saves(model.state_dict() | {name: tensor})


class _Saves:
    def __init__(self, tensors):
        self.tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}

    def save_pretrained(self, directory):
        from safetensors.torch import save_file

        save_file(self.tensors, directory / "model.safetensors")


def start_some(lab, engine):
    """Requests of every kind, a few steps old. Returns prompts by id."""
    settings = [SamplingSettings(0.0, 1.0, 20)] * 2 + [SamplingSettings(1.0, 1.0, 20, seed=1)] * 2
    prompts = {}
    for seed, sampling in enumerate(settings):
        prompt = lab.tokens(seed, 12)
        prompts[lab.submit(engine, prompt, sampling)] = prompt
    for _ in range(5):
        engine.step()
    return prompts


def assert_all_by(lab, generations, prompts, model, version):
    """Every response was produced by one model alone."""
    assert sorted(generations) == sorted(prompts)
    for request, generation in generations.items():
        assert generation.version_runs.tolist() == [[version, 20]]
        lab.assert_sampled_by(model, prompts[request], generation)


def test_weights_that_fail_the_canary_leave_no_trace(lab, engine, old, new):
    version = lab.serve(engine, old)
    prompts = start_some(lab, engine)
    with pytest.raises(
        CanaryMismatch, match=r"differ by 0\.01 on the canary .* 0\.001, 0\.00025 and 5e-07 are allowed"
    ):
        engine.load_weights(lab.snapshot(new, canary_error=0.01))
    assert engine.weights_version == version
    assert_all_by(lab, lab.finish(engine), prompts, old, version)
    lab.assert_scores(engine, old)


def test_a_request_that_finished_under_refused_weights_starts_over(lab, engine, old, new):
    version = lab.serve(engine, old)
    prompt = lab.tokens(1, 12)
    request = lab.submit(engine, prompt)
    for _ in range(19):
        assert engine.step() == []
    with pytest.raises(CanaryMismatch):
        engine.load_weights(lab.snapshot(new, canary_error=0.1))
    assert engine.in_flight == 1
    assert_all_by(lab, lab.finish(engine), {request: prompt}, old, version)


def test_keys_and_values_of_refused_weights_are_not_reused(lab, engine, old, new):
    version = lab.serve(engine, old)
    prompt = lab.tokens(2, 127)
    request = lab.submit(engine, prompt)
    engine.step()
    # Meanwhile the 128th token completes a block of the cache.
    with pytest.raises(CanaryMismatch):
        engine.load_weights(lab.snapshot(new, canary_error=0.1))
    response = lab.finish(engine)[request].response_ids.tolist()
    longer = [*prompt, *response]
    again = {lab.submit(engine, longer): longer}
    assert_all_by(lab, lab.finish(engine), again, old, version)


def test_weights_that_are_not_numbers_are_refused(lab, engine, old):
    version = lab.serve(engine, old)
    prompts = start_some(lab, engine)
    broken = copy.deepcopy(old)
    broken.lm_head.weight.data[3] = float("nan")
    with pytest.raises(CanaryMismatch, match="differ by nan"):
        engine.load_weights(lab.snapshot(old, saved=broken))
    assert_all_by(lab, lab.finish(engine), prompts, old, version)


@pytest.mark.parametrize("kind", ["missing", "mis-shaped", "unknown", "integer"])
def test_tensors_that_differ_from_the_models_are_refused_before_anything_is_changed(lab, engine, old, new, kind):
    import torch

    name = "model.layers.1.self_attn.k_proj.weight"
    saved, problem = {
        "missing": (without(new, name), "1 tensor is missing"),
        "mis-shaped": (with_tensor(new, name, torch.zeros(32, 65)), r"has shape \[32, 65\], not \[32, 64\]"),
        "unknown": (with_tensor(new, "extra", torch.zeros(2)), "1 tensor has no place in it, for example 'extra'"),
        "integer": (with_tensor(new, name, torch.zeros(32, 64, dtype=torch.int32)), "has dtype I32, not F32"),
    }[kind]
    version = lab.serve(engine, old)
    request = lab.submit(engine, lab.tokens(3, 12))
    with pytest.raises(SnapshotError, match=problem):
        engine.load_weights(lab.snapshot(new, saved=saved))
    assert lab.finish(engine)[request].version_runs.tolist() == [[version, 20]]


def test_a_truncated_file_is_refused_before_anything_is_changed(lab, engine, new):
    snapshot = lab.snapshot(new)
    (weights,) = snapshot.weight_files
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SnapshotError, match="is not a safetensors file"):
        engine.load_weights(snapshot)


def test_files_that_disappear_leave_the_old_weights_and_an_engine_that_cannot_restore_them_is_faulty(
    lab, old, new, monkeypatch
):
    engine = lab.engine(old)
    good = lab.snapshot(old)
    engine.load_weights(good)
    prompts = start_some(lab, engine)
    deleted, call = lab.snapshot(new), engine.call

    def collect_first(method, *arguments):
        if method == "tba_prepare" and deleted.path.is_dir():
            shutil.rmtree(deleted.path)
        return call(method, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "call", collect_first)
        with pytest.raises(SnapshotError, match="model.safetensors: No such file or directory"):
            engine.load_weights(deleted)
    assert_all_by(lab, lab.finish(engine), prompts, old, good.manifest.version)
    lab.submit(engine, lab.tokens(1, 12))
    shutil.rmtree(good.path)
    with pytest.raises(EngineFaulty, match=r"could not be restored: .* restart the searcher"):
        engine.load_weights(lab.snapshot(new, canary_error=0.1))
    for use in (engine.step, lambda: engine.prepare(good), lambda: engine.score([[1, 2]])):
        with pytest.raises(EngineFaulty, match="could not be restored"):
            use()
