"""After a swap vLLM computes with the snapshot's head, whatever config.json says of it, packed and in place."""

import numpy as np
import pytest

from tba.tests.helpers.tied import DIRECTORIES, Saved, moved
from tba.tests.runner import size

pytest.importorskip("vllm", reason="vLLM is not installed")

# vLLM 0.32.0 has no GPT-NeoX, and a wrapped model with images needs its processor.
CASES = [case for case in DIRECTORIES if not case.startswith(("GPT-NeoX", "wrapped"))]
# A copy of the head, one of its own that config.json denies, and one that is as it says.
PACKED = size(["tied, the same head", "tied by the class, another head", "not tied"], CASES)


class Directory:
    """Saves a model directory, and remembers which."""

    def __init__(self, save):
        self.save = save

    def save_pretrained(self, directory):
        self.save(directory)
        self.path = directory


@pytest.mark.parametrize(("case", "packed"), [(case, False) for case in CASES] + [(case, True) for case in PACKED])
def test_vllm_serves_the_snapshots_head(lab, case, packed):
    files = Directory(DIRECTORIES[case][0])
    engine = lab.engine(files, pack_weights=packed)
    ids = lab.tokens(3, 40)
    for seed in (1, 2):
        model = moved(files.path, seed)
        report = engine.load_weights(lab.snapshot(model, saved=Saved(model)))
        assert report.way == ("reload" if packed else "in place")
        np.testing.assert_allclose(engine.score([ids])[0], lab.logprobs(model, ids), atol=1e-4)
    engine.close()
