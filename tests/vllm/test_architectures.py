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
TRANSFORMERS_BACKEND = "vllm.model_executor.models.transformers.base.Base"


class Architecture:
    """A model directory, and a snapshot of its weights after a step."""

    def __init__(self, lab, name):
        self.name = name
        self.save_pretrained(lab.root / "trainer")
        model = moved(lab.root / "trainer", 1)
        self.ids = lab.tokens(3, 40)
        self.snapshot, self.expected = lab.snapshot(model, saved=Saved(model)), lab.logprobs(model, self.ids)

    def save_pretrained(self, directory):
        save(self.name, directory)

    def serve(self, lab):
        """Start an engine, and load the snapshot into it."""
        engine = lab.engine(self, pack_weights=True, max_model_len=64)
        engine.load_weights(self.snapshot)
        return engine


@pytest.mark.parametrize("name", size(SOME, [name for name in ARCHITECTURES if name not in CAPPED]))
def test_vllm_computes_what_transformers_does_or_names_what_it_cannot(lab, name, monkeypatch):
    # For torch.compile, which these engines do without, it would change the class in transformers for this process.
    monkeypatch.setattr(f"{TRANSFORMERS_BACKEND}._decorate_for_torch_compile", lambda _: None)
    files = Architecture(lab, name)
    if name in VLLM_REFUSES:
        with pytest.raises(TbaError, match=re.escape(VLLM_REFUSES[name])):
            files.serve(lab)
        return
    engine = files.serve(lab)
    np.testing.assert_allclose(engine.score([files.ids])[0], files.expected, atol=1e-4)
    engine.close()
