"""Trainer and Transformers engine compute what transformers does, for every architecture, or refuse it by its cause."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tba.common.errors import ConfigError  # noqa: E402
from tba.common.weights.snapshot import Canary, Manifest, Snapshot  # noqa: E402
from tba.searcher.engines.engine import GenerationRequest, SamplingSettings  # noqa: E402
from tba.searcher.engines.transformers_engine import TransformersEngine  # noqa: E402
from tba.tests.helpers.architectures import ARCHITECTURES, CAPPED, EXPERTS, save  # noqa: E402
from tba.tests.helpers.end_tokens import end_tokens  # noqa: E402
from tba.tests.helpers.tied import Saved, moved  # noqa: E402
from tba.tests.helpers.trainer import make_row  # noqa: E402
from tba.tests.runner import slow  # noqa: E402
from tba.trainer.model.scorer import Scorer, load_model  # noqa: E402

IDS = np.random.default_rng(0).integers(0, 256, 40).tolist()
QUICK = ["llama biases", "gpt_neox", "phi3 longrope"]


def logprobs(model, ids):
    ids_1T = torch.tensor([list(ids)])
    with torch.no_grad():
        return model(ids_1T).logits[0, :-1].log_softmax(-1).gather(1, ids_1T[0, 1:, None])[:, 0].numpy()


def engine_of(folder):
    return TransformersEngine(
        str(folder), dtype="float32", device="cpu", max_in_flight=3, seed=0, canary_tolerance=1e-3,
        stopping=end_tokens(folder),
    )  # fmt: skip


def serve(engine, model, folder):
    folder.mkdir()
    Saved(model).save_pretrained(folder)
    manifest = Manifest("run", 1, 1, 0.0, {}, Canary([IDS], [logprobs(model, IDS).tolist()]))
    engine.load_weights(Snapshot(folder, manifest, [folder / "model.safetensors"]))


@pytest.mark.parametrize("name", [*QUICK, *slow(*[name for name in ARCHITECTURES if name not in QUICK])])
def test_trainer_and_engine_compute_what_transformers_does_or_name_what_they_cannot(name, tmp_path):
    save(name, tmp_path / "model")
    if name in CAPPED:
        with pytest.raises(ConfigError, match="scales or caps its logits"):
            load_model(tmp_path / "model", torch.device("cpu"))
        return
    model = moved(tmp_path / "model", 1)
    rows = [make_row(n, IDS[:8], IDS[8 : 20 + 10 * n]) for n in range(2)]
    scores = Scorer(model, autocast=False).score(rows).logprob_R.numpy()
    expected = logprobs(model, IDS)[7:]
    np.testing.assert_allclose(scores, [*expected[:12], *expected[:22]], atol=1e-4)
    if name in EXPERTS:
        with pytest.raises(ConfigError, match=r"experts\.\w+' of the model has another form or name in the files"):
            engine_of(tmp_path / "model")
        return
    engine = engine_of(tmp_path / "model")
    serve(engine, model, tmp_path / "v1")
    assert_generates(engine, model)


def assert_generates(engine, model):
    """Rows of several lengths, which join and leave, have the log-probabilities of the model alone."""
    for n in range(5):
        prompt = np.asarray(IDS[: 3 + 9 * n], np.int32)
        engine.submit(GenerationRequest(n, prompt, SamplingSettings(1.0, 1.0, 8 + 7 * n, seed=n)))
    while engine.in_flight:
        for one in engine.step():
            found = logprobs(model, [*IDS[: 3 + 9 * one.id], *one.response_ids.tolist()])[2 + 9 * one.id :]
            np.testing.assert_allclose(one.logprobs, found, atol=1e-4)
