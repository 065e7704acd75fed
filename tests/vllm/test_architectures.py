"""vLLM computes what transformers does after a swap, for every architecture, or refuses it with its cause."""

import re
from functools import partial
from types import SimpleNamespace

import pytest

from tba.common.errors import TbaError
from tba.tests.helpers.architectures import ARCHITECTURES, CAPPED, VLLM_REFUSES, save
from tba.tests.helpers.tied import Saved, moved
from tba.tests.runner import size

pytest.importorskip("vllm", reason="vLLM is not installed")

# vLLM takes seconds to read the class of each.
SOME = ["llama llama3", "qwen3 biases"]
TRANSFORMERS_BACKEND = "vllm.model_executor.models.transformers.base.Base"


@pytest.mark.parametrize("name", size(SOME, [name for name in ARCHITECTURES if name not in CAPPED]))
def test_vllm_computes_what_transformers_does_or_names_what_it_cannot(lab, name, monkeypatch):
    # For torch.compile, which these engines do without, it would change the class in transformers for this process.
    monkeypatch.setattr(f"{TRANSFORMERS_BACKEND}._decorate_for_torch_compile", lambda _: None)
    save(name, lab.root / "trainer")
    model = moved(lab.root / "trainer", 1)
    snapshot = lab.snapshot(model, saved=Saved(model))

    def serve():
        engine = lab.engine(SimpleNamespace(save_pretrained=partial(save, name)), pack_weights=True, max_model_len=64)
        engine.load_weights(snapshot)
        return engine

    if name in VLLM_REFUSES:
        with pytest.raises(TbaError, match=re.escape(VLLM_REFUSES[name])):
            serve()
        return
    engine = serve()
    lab.assert_scores(engine, model)
    engine.close()
