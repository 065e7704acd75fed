"""What a model computes for a row does not depend on the rows of its pass, or of passes before, for any RoPE type.

Right values are those of a freshly loaded model of transformers that gets the row alone.
"""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from tba.common.rotation import Rotation  # noqa: E402
from tba.common.wire.trajectory import STOP_LENGTH  # noqa: E402
from tba.searcher.engines.engine import GenerationRequest, SamplingSettings  # noqa: E402
from tba.searcher.evaluation.models import ReferenceModel  # noqa: E402
from tba.tests.helpers.engines import cpu_engine  # noqa: E402
from tba.tests.helpers.puts import make_trajectory  # noqa: E402
from tba.tests.helpers.trainer import make_row  # noqa: E402
from tba.tests.runner import slow  # noqa: E402
from tba.trainer.model.packing import obstacle  # noqa: E402
from tba.trainer.model.scorer import Scorer, load_model  # noqa: E402

LIMIT = 32
SHAPE = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "max_position_embeddings": 256,
}  # fmt: skip
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0, 1.2, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0]}
ORIGINAL = {"original_max_position_embeddings": LIMIT}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0} | ORIGINAL,
    "longrope": FACTORS | ORIGINAL,
    "llama3": {"factor": 8.0} | LLAMA3 | ORIGINAL,
    "proportional": {"partial_rotary_factor": 0.5},
}
# Lengths around the limit, and after one another: what dynamic NTK keeps from longer passes must be forgotten.
LENGTHS = (90, 20, 32, 33, 60, 31, 61, 10)


def save(kind, folder):
    torch.manual_seed(0)
    rope = {"rope_type": kind, "rope_theta": 1e4} | ROPES[kind]
    shape = SHAPE | ({"max_position_embeddings": LIMIT} if kind == "dynamic" else {})
    config = transformers.LlamaConfig(**shape, rope_parameters=rope)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def rows():
    ids = np.random.default_rng(0).integers(0, 60, (len(LENGTHS), max(LENGTHS)))
    return [make_row(n, ids[n, :8].tolist(), ids[n, 8:length].tolist()) for n, length in enumerate(LENGTHS)]


def alone(folder, prompt_ids, response_ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor(np.concatenate([prompt_ids, response_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[len(prompt_ids) - 1 :].numpy()


def test_every_rope_type_of_transformers_is_in_this_file():
    assert set(ROPES) == {"default", *ROPE_INIT_FUNCTIONS}


MOVING = ["longrope", "dynamic"]


@pytest.mark.parametrize("way", ["padded", "packed"])
@pytest.mark.parametrize("kind", [*MOVING, *slow(*[kind for kind in ROPES if kind not in MOVING])])
def test_a_rows_log_probabilities_do_not_depend_on_its_batch(kind, way, tmp_path):
    save(kind, tmp_path)
    policy, asked = load_model(tmp_path, torch.device("cpu")), rows()
    if way == "packed" and (reason := obstacle(policy)):
        assert kind in ("dynamic", "longrope")
        assert "the longest sequence of a pass" in reason
        return
    with torch.no_grad():
        found = Scorer(policy, autocast=False, packed=way == "packed").score(asked).logprob_R
    for row, one in zip(asked, found.split([len(row.response_ids) for row in asked]), strict=True):
        np.testing.assert_allclose(one, alone(tmp_path, row.prompt_ids, row.response_ids), atol=2e-5)


@pytest.mark.parametrize("kind", MOVING)
def test_the_searchers_reference_does_not_depend_on_its_batch(kind, tmp_path):
    save(kind, tmp_path)
    asked = rows()
    trajectories = [make_trajectory(prompt_ids=row.prompt_ids, response_ids=row.response_ids) for row in asked]
    found = ReferenceModel(str(tmp_path), device="cpu", dtype="float32").logprobs(trajectories)
    expected = [alone(tmp_path, row.prompt_ids, row.response_ids).sum() for row in asked]
    np.testing.assert_allclose(np.asarray(found, float), expected, atol=1e-3)


@pytest.mark.parametrize("kind", [*MOVING, *slow("yarn")])
def test_the_engine_records_the_log_probabilities_of_the_response_alone_and_ends_it_at_the_limit(kind, tmp_path):
    save(kind, tmp_path)
    engine = cpu_engine(tmp_path, max_in_flight=4)
    prompts = [row.prompt_ids for row in rows()]
    for n, prompt in enumerate(prompts):
        engine.submit(GenerationRequest(n, prompt, SamplingSettings(1.0, 1.0, 20 + 10 * n, seed=n)))
    found = []
    while engine.in_flight:
        found += engine.step()
    for one in found:
        limit = Rotation.of(engine._model.config).limit or 256
        assert (len(one.response_ids), one.stop_reason) == (min(20 + 10 * one.id, limit - 8), STOP_LENGTH)
        np.testing.assert_allclose(one.logprobs, alone(tmp_path, prompts[one.id], one.response_ids), atol=2e-4)
