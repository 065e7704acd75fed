"""Requests in flight while the weights change."""

import copy

import numpy as np
import pytest

from tba.searcher.engines.engine import SamplingSettings

pytest.importorskip("vllm", reason="vLLM is not installed")


def steps(engine, count):
    return [generation for _ in range(count) for generation in engine.step()]


def mixed_logprobs(lab, old, new, prompt, response, of_old):
    """Log-probabilities of a response whose first `of_old` tokens the old weights sampled.

    The last of those was sampled but not yet fed in, so the new weights compute its keys and values; the old weights
    computed those of all tokens before it.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=old.config)
    seen, fed = [*prompt, *response[: of_old - 1]], response[of_old - 1 : -1]
    first = lab.logits(old, seen, cache)[len(prompt) - 1 :]
    second = lab.logits(new, fed, cache)
    return lab.chosen(lab.log_softmax(np.concatenate([first, second])), response)


@pytest.mark.parametrize("of_old", [1, 7, 19])
def test_a_request_in_flight_continues_on_the_keys_and_values_it_has(lab, engine, old, new, of_old):
    old_version, prompt = lab.serve(engine, old), lab.tokens(of_old, 12)
    request = lab.submit(engine, prompt, SamplingSettings(1.0, 1.0, 20, seed=of_old))
    steps(engine, of_old)
    new_version = lab.serve(engine, new)
    generation = lab.finish(engine)[request]
    assert generation.version_runs.tolist() == [[old_version, of_old], [new_version, 20 - of_old]]
    response = generation.response_ids.tolist()
    expected = mixed_logprobs(lab, old, new, prompt, response, of_old)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)
    pure = lab.response_logprobs(new, prompt, response)
    assert np.abs(generation.logprobs - pure).max() > 0.1, "mixed and recomputed caches are indistinguishable here"


def test_every_request_of_a_mixed_batch_has_its_own_version_runs(lab, engine, old, new):
    first, lengths = lab.serve(engine, old), {}
    for age in (4, 3, 2, 1):
        request = lab.submit(engine, lab.tokens(age, 10), SamplingSettings(1.0, 0.9, 12))
        lengths[request] = age
        steps(engine, 1)
    second = lab.serve(engine, new)
    generations = lab.finish(engine)
    for request, age in lengths.items():
        assert generations[request].version_runs.tolist() == [[first, age], [second, 12 - age]]


def test_a_request_that_has_not_started_uses_the_new_weights(lab, engine, old, new):
    lab.serve(engine, old)
    prompt = lab.tokens(5, 12)
    request = lab.submit(engine, prompt)
    version = lab.serve(engine, new)
    generation = lab.finish(engine)[request]
    assert generation.version_runs.tolist() == [[version, 20]]
    lab.assert_sampled_by(new, prompt, generation)


def test_what_finishes_while_the_canary_is_scored_is_returned_by_the_next_step(lab, engine, old, new):
    first = lab.serve(engine, old)
    request = lab.submit(engine, lab.tokens(7, 12))
    steps(engine, 19)
    second = lab.serve(engine, new)
    assert engine.in_flight == 1
    (generation,) = engine.step()
    assert generation.id == request
    assert generation.version_runs.tolist() == [[first, 19], [second, 1]]
    assert engine.in_flight == 0


def test_a_full_batch_does_not_delay_the_canary(lab, engine, old, new):
    lab.serve(engine, old)
    # Twice as many as the engine generates at a time.
    for seed in range(64):
        lab.submit(engine, lab.tokens(seed, 10), SamplingSettings(1.0, 1.0, 100, seed=seed))
    steps(engine, 3)
    version = lab.serve(engine, new)
    assert engine.step() == [], "the canary waited until others had finished"
    runs = [generation.version_runs for generation in lab.finish(engine).values()]
    assert sorted({int(pairs[0, 1]) for pairs in runs}) == [3, 100]
    assert {int(pairs[-1, 0]) for pairs in runs} == {version}


def test_bfloat16_files_load_into_a_float32_engine(lab, engine, new):
    exact = lab.rounded(copy.deepcopy(new))
    engine.load_weights(lab.snapshot(exact, saved=lab.as_bfloat16(exact)))
    lab.assert_scores(engine, exact)
