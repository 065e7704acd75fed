"""Whether embedding and head are one tensor is read from the loaded model, and every parameter is accounted for."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from tba.common.errors import ConfigError, SnapshotRefused  # noqa: E402
from tba.common.weights.snapshot import Canary, Manifest, Snapshot  # noqa: E402
from tba.common.weights.tied import tied_names  # noqa: E402
from tba.searcher.engines.transformers_engine import TransformersEngine  # noqa: E402
from tba.tests.helpers.end_tokens import end_tokens  # noqa: E402
from tba.tests.helpers.tied import DIRECTORIES, Saved, moved  # noqa: E402

IDS = np.random.default_rng(0).integers(0, 256, 40).tolist()


def logprobs(model):
    ids_1T = torch.tensor([IDS])
    with torch.no_grad():
        return model(ids_1T).logits[0, :-1].log_softmax(-1).gather(1, ids_1T[0, 1:, None])[:, 0]


def snapshot_of(model, folder, version=1):
    folder.mkdir()
    Saved(model).save_pretrained(folder)
    canary = Canary([IDS], [logprobs(model).tolist()])
    return Snapshot(folder, Manifest("run", version, version, 0.0, {}, canary), [folder / "model.safetensors"])


def engine_of(folder, dtype="float32", canary_tolerance=1e-3):
    return TransformersEngine(
        str(folder), dtype=dtype, device="cpu", max_in_flight=4, seed=0, canary_tolerance=canary_tolerance,
        stopping=end_tokens(folder),
    )  # fmt: skip


@pytest.mark.parametrize("case", DIRECTORIES)
def test_a_snapshot_replaces_every_parameter_whatever_the_configuration_says_of_the_head(case, tmp_path):
    save, tied = DIRECTORIES[case]
    save(tmp_path / "model")
    engine, model = engine_of(tmp_path / "model"), moved(tmp_path / "model", 1)
    assert bool(tied_names(model)) == bool(tied_names(engine._model)) == tied
    engine.load_weights(snapshot_of(model, tmp_path / "v1"))
    own = dict(engine._model.named_parameters())
    assert all(torch.equal(own[name], one) for name, one in model.named_parameters())
    np.testing.assert_allclose(engine.score([IDS])[0], logprobs(model), atol=1e-4)


def test_in_bfloat16_a_head_of_its_own_follows_every_snapshot(tmp_path):
    """The canary would accept the head of the start."""
    DIRECTORIES["tied, another head"][0](tmp_path / "model")
    engine, model = engine_of(tmp_path / "model", "bfloat16", 8.0), moved(tmp_path / "model", 1)
    for version in (1, 2):
        model.lm_head.weight += 0.01
        engine.load_weights(snapshot_of(model, tmp_path / f"v{version}", version))
        assert torch.equal(engine._model.lm_head.weight, model.lm_head.weight.bfloat16())


def test_a_snapshot_that_would_leave_a_parameter_as_it_is_is_refused(tmp_path):
    DIRECTORIES["tied, no head"][0](tmp_path / "model")
    engine, model = engine_of(tmp_path / "model"), moved(tmp_path / "model", 1)
    head = engine._model.lm_head
    head.weight = torch.nn.Parameter(head.weight.clone())
    with pytest.raises(SnapshotRefused, match="v1 would leave 'lm_head.weight' of the model as it is"):
        engine.load_weights(snapshot_of(model, tmp_path / "v1"))


def test_files_with_the_head_alone_are_refused_with_what_to_do(tmp_path):
    DIRECTORIES["tied, the same head"][0](tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"embed_tokens.weight' .* If only the tied head is there, load .* save it"):
        engine_of(tmp_path)
