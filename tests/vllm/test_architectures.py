"""vLLM computes what transformers does after a swap, for every architecture, or refuses it with its cause."""

import re

import numpy as np
import pytest

from tba.common.errors import TbaError
from tba.tests.helpers.architectures import ARCHITECTURES, CAPPED, VLLM_REFUSES, save
from tba.tests.helpers.tied import Saved, moved
from tba.tests.runner import size

pytest.importorskip("vllm", reason="vLLM is not installed")

# vLLM takes seconds to read the class of each.
SOME = ["llama llama3", "qwen3 biases"]


class Architecture:
    """Saves a model directory, and remembers which."""

    def __init__(self, name):
        self.name = name

    def save_pretrained(self, directory):
        save(self.name, directory)
        self.path = directory


def serve(lab, files):
    """Start an engine, and load the weights of a step into it. Returns engine and model."""
    engine = lab.engine(files, pack_weights=True, max_model_len=64)
    model = moved(files.path, 1)
    engine.load_weights(lab.snapshot(model, saved=Saved(model)))
    return engine, model


@pytest.mark.parametrize("name", size(SOME, [name for name in ARCHITECTURES if name not in CAPPED]))
def test_vllm_computes_what_transformers_does_or_names_what_it_cannot(lab, name):
    files = Architecture(name)
    if name in VLLM_REFUSES:
        with pytest.raises((TbaError, AttributeError), match=re.escape(VLLM_REFUSES[name])):
            serve(lab, files)
        return
    engine, model = serve(lab, files)
    ids = lab.tokens(3, 40)
    np.testing.assert_allclose(engine.score([ids])[0], lab.logprobs(model, ids), atol=1e-4)
    engine.close()
