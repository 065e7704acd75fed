"""Models whose rotation of positions depends on the length: vLLM and the trainer agree, or vLLM does not start."""

import numpy as np
import pytest

from tba.common.errors import ConfigError
from tba.searcher.engines.engine import SamplingSettings

pytest.importorskip("vllm", reason="vLLM is not installed")

LIMIT = 64
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
    "original_max_position_embeddings": LIMIT,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def test_a_longrope_model_beyond_its_limit_is_refused_with_the_length_that_works(lab):
    model = lab.model(1, rope_parameters=LONGROPE)
    with pytest.raises(ConfigError, match="set search.max_model_len to at most 64"):
        lab.engine(model, max_model_len=128)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": LONGROPE},
        # vLLM itself would accept four times as many tokens.
        {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT},
    ],
    ids=["longrope", "dynamic"],
)
def test_up_to_the_limit_vllm_computes_what_transformers_does_and_ends_responses_there(lab, settings):
    old, new = (lab.model(seed, **settings) for seed in (1, 2))
    engine = lab.engine(old, max_model_len=LIMIT if settings["rope_parameters"] is LONGROPE else 4 * LIMIT)
    lab.serve(engine, new)
    prompt, ids = lab.tokens(1, 20), lab.tokens(2, LIMIT - 1)
    np.testing.assert_allclose(engine.score([ids])[0], lab.logprobs(new, ids), atol=1e-4)
    generation = lab.generate(engine, prompt, SamplingSettings(1.0, 1.0, 200, seed=1))
    assert len(generation.response_ids) == LIMIT - len(prompt)
    lab.assert_sampled_by(new, prompt, generation)
