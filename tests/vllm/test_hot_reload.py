"""After a hot reload, the engine's log-probabilities are those of transformers with the new weights."""

import copy
import shutil

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine(lab, old):
    return lab.engine(old)


def test_a_prefix_computed_with_other_weights_is_never_reused(lab, engine, old, new):
    # Longer than a block of the cache.
    prompt = lab.tokens(4, 200)
    for model in (old, new, old):
        lab.serve(engine, model)
        # The second one takes its prefix from the cache.
        for _ in range(2):
            generation = lab.generate(engine, prompt)
            expected = lab.response_logprobs(model, prompt, generation.response_ids)
            np.testing.assert_allclose(generation.logprobs, expected, atol=TOLERANCE)


def test_bfloat16_files_load_into_a_float32_engine(lab, engine, new):
    exact = copy.deepcopy(new)
    # Not .bfloat16(), which would round the rotary frequencies as well.
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().float()
    engine.load_weights(lab.snapshot(exact, saved=copy.deepcopy(exact).bfloat16()))
    ids = lab.tokens(5, 40)
    np.testing.assert_allclose(engine.score([ids])[0], lab.logprobs(exact, ids), atol=TOLERANCE)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_engine_swaps_too(lab):
    old, new = lab.model(seed=1), lab.model(seed=2)
    engine = lab.engine(old, enforce_eager=False)
    snapshot, ids = lab.snapshot(new), lab.tokens(6, 40)
    assert engine.load_weights(snapshot).way == "in place"
    np.testing.assert_allclose(engine.score([ids])[0], lab.logprobs(new, ids), atol=TOLERANCE)
