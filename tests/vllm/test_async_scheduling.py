"""Asynchronous scheduling, which vLLM uses on GPUs: a batch is computed ahead while the last one is processed.

vLLM turns it off on a CPU, so these tests turn it on again.
"""

import copy
import itertools

import numpy as np
import pytest

from tba.common.errors import CanaryMismatch
from tba.searcher.engines.engine import SamplingSettings

pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture(scope="module")
def ahead(lab, old):
    """An engine that computes batches ahead."""
    from vllm.platforms import current_platform

    configure = type(current_platform).check_and_update_config

    def with_async_scheduling(cls, vllm_config):
        configure(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(current_platform), "check_and_update_config", classmethod(with_async_scheduling))
        engine = lab.engine(old)
    assert engine.scheduler._core.batch_queue is not None
    return engine


def probabilities_differ_by(lab, generation, prompt, models):
    """The largest difference to transformers' log-probabilities, with each token's weights as its version says.

    The models differ in their head only, so keys and values of older weights are those of newer ones.
    """
    ids, worst = [*prompt, *generation.response_ids.tolist()], 0.0
    starts = itertools.accumulate(generation.version_runs[:, 1].tolist(), initial=0)
    for (version, count), start in zip(generation.version_runs.tolist(), starts, strict=False):
        expected = lab.logprobs(models[version], ids)[len(prompt) - 1 :][start : start + count]
        worst = max(worst, float(np.abs(generation.logprobs[start : start + count] - expected).max()))
    return worst


def with_another_head(lab, model, seed):
    """Return a copy of a model with the head of another one."""
    changed = copy.deepcopy(model)
    changed.lm_head.weight.data = lab.model(seed).lm_head.weight.data
    return changed


@pytest.fixture(scope="module")
def turned(lab, old):
    return with_another_head(lab, old, seed=11)


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_every_token_has_the_version_it_was_computed_with(steps, ahead, lab, old, turned):
    models = {lab.serve(ahead, old): old}
    prompts = {}
    for seed in range(6):
        ids = lab.tokens(seed, 12)
        prompts[lab.submit(ahead, ids, SamplingSettings(1.0, 1.0, 20, seed=9))] = ids
    for _ in range(steps):
        ahead.step()
    assert len(ahead._llm.engine_core.engine_core.batch_queue) == 1, "no batch was computed ahead"
    models[lab.serve(ahead, turned)] = turned
    for request, generation in lab.finish(ahead).items():
        assert generation.version_runs[:, 1].sum() == 20
        assert generation.version_runs[:, 0].tolist() == sorted(models)[-len(generation.version_runs) :]
        assert probabilities_differ_by(lab, generation, prompts[request], models) < 1e-3


def test_without_the_drain_a_token_would_have_the_next_version(ahead, lab, old, turned, monkeypatch):
    models = {lab.serve(ahead, old): old}
    prompt = lab.tokens(3, 12)
    request = lab.submit(ahead, prompt, SamplingSettings(1.0, 1.0, 20, seed=3))
    for _ in range(8):
        ahead.step()
    monkeypatch.setattr(ahead.scheduler, "drain", lambda step: None)
    models[lab.serve(ahead, turned)] = turned
    generation = lab.finish(ahead)[request]
    assert probabilities_differ_by(lab, generation, prompt, models) > 0.1


def test_a_response_that_ends_in_a_batch_computed_ahead_is_returned_by_the_next_step(ahead, lab, old, turned):
    version = lab.serve(ahead, old)
    request = lab.submit(ahead, lab.tokens(4, 12), SamplingSettings(1.0, 1.0, 3, seed=4))
    # The third token is computed, and not processed.
    for _ in range(3):
        assert ahead.step() == []
    lab.serve(ahead, turned)
    (generation,) = ahead.step()
    assert (generation.id, generation.version_runs.tolist()) == (request, [[version, 3]])


def test_a_refused_snapshot_leaves_no_token_of_batches_computed_ahead(ahead, lab, old, turned):
    version, prompt = lab.serve(ahead, old), lab.tokens(5, 12)
    request = lab.submit(ahead, prompt, SamplingSettings(1.0, 1.0, 20, seed=5))
    for _ in range(5):
        ahead.step()
    with pytest.raises(CanaryMismatch):
        ahead.load_weights(lab.snapshot(old, saved=turned))
    generation = lab.finish(ahead)[request]
    assert generation.version_runs.tolist() == [[version, 20]]
    lab.assert_sampled_by(old, prompt, generation, atol=1e-3)
