"""After a swap vLLM computes with the snapshot's head, whatever config.json says of it, packed and in place."""

import pytest

from tba.tests.helpers.tied import DIRECTORIES, Saved, moved
from tba.tests.runner import size

pytest.importorskip("vllm", reason="vLLM is not installed")

# A wrapped model with images needs torchvision and its processor.
CASES = [case for case in DIRECTORIES if not case.startswith("wrapped")]
# A copy of the head, one of its own that config.json denies, and one that is as it says.
PACKED = size(["tied, the same head", "GPT-2, the same head", "tied by the class, another head", "not tied"], CASES)


class Directory:
    """Saves a model directory, and remembers which."""

    def __init__(self, save):
        self.save = save

    def save_pretrained(self, directory):
        self.save(directory)
        self.path = directory


@pytest.mark.parametrize(("case", "packed"), [(case, False) for case in CASES] + [(case, True) for case in PACKED])
def test_vllm_serves_the_snapshots_head(lab, case, packed, monkeypatch):
    # For torch.compile, which these engines do without, it would change GPT-NeoX in transformers for this process.
    monkeypatch.setattr("vllm.model_executor.models.transformers.base.Base._decorate_for_torch_compile", lambda _: None)
    files = Directory(DIRECTORIES[case][0])
    engine = lab.engine(files, pack_weights=packed)
    for seed in (1, 2):
        model = moved(files.path, seed)
        report = engine.load_weights(lab.snapshot(model, saved=Saved(model)))
        assert report.way == ("reload" if packed or "GPT-2" in case else "in place")
        lab.assert_scores(engine, model)
    engine.close()
