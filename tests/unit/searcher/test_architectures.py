"""Trainer and Transformers engine compute what transformers does, for every architecture, or refuse it by its cause.

Whether embedding and head are one tensor is read from the loaded model, and every parameter is accounted for.
"""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from tba.common.errors import ConfigError, SnapshotRefused  # noqa: E402
from tba.common.weights.pretrained import from_directory, tied_names  # noqa: E402
from tba.common.weights.snapshot import Canary, Manifest, Snapshot  # noqa: E402
from tba.searcher.engines.engine import GenerationRequest, SamplingSettings  # noqa: E402
from tba.searcher.evaluation.models import ReferenceModel  # noqa: E402
from tba.tests.helpers.architectures import ARCHITECTURES, CAPPED, EXPERTS, SHAPE, save  # noqa: E402
from tba.tests.helpers.engines import cpu_engine, logprobs_of  # noqa: E402
from tba.tests.helpers.puts import make_trajectory  # noqa: E402
from tba.tests.helpers.tied import DIRECTORIES, Saved, moved  # noqa: E402
from tba.tests.helpers.trainer import make_row  # noqa: E402
from tba.tests.runner import slow  # noqa: E402
from tba.trainer.model.packing import obstacle  # noqa: E402
from tba.trainer.model.scorer import Scorer, load_model, weights_of  # noqa: E402
from tba.trainer.publishing.canary import make_canary, skeleton  # noqa: E402

IDS = np.random.default_rng(0).integers(0, 256, 40).tolist()
QUICK = ["llama biases", "gpt_neox", "phi3 longrope", "gemma2 attention cap"]


def logprobs(model, ids):
    return logprobs_of(model, ids[:1], ids[1:])


def snapshot_of(model, folder, version=1):
    folder.mkdir()
    Saved(model).save_pretrained(folder)
    canary = Canary([IDS], [logprobs(model, IDS).tolist()])
    return Snapshot(folder, Manifest("run", version, version, 0.0, {}, canary), [folder / "model.safetensors"])


@pytest.mark.parametrize("name", [*QUICK, *slow(*[name for name in ARCHITECTURES if name not in QUICK])])
def test_trainer_and_engine_compute_what_transformers_does_or_name_what_they_cannot(name, tmp_path):
    save(name, tmp_path / "model")
    if name in CAPPED:
        with pytest.raises(ConfigError, match="scales or caps its logits"):
            load_model(tmp_path / "model", torch.device("cpu"))
        return
    eager = {"dtype": torch.float32, "attn_implementation": "eager"}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **eager).eval()
    loaded = load_model(tmp_path / "model", torch.device("cpu"))
    np.testing.assert_allclose(logprobs(loaded, IDS), logprobs(plain, IDS), atol=1e-4)
    canary = make_canary(skeleton(loaded), weights_of(loaded), [IDS[:9], IDS])
    np.testing.assert_allclose(canary.logprobs[1], logprobs(plain, IDS), atol=1e-4)
    np.testing.assert_allclose(canary.logprobs[0], logprobs(plain, IDS[:9]), atol=1e-4)
    model = moved(tmp_path / "model", 1)
    rows = [make_row(n, IDS[:8], IDS[8 : 20 + 10 * n]) for n in range(2)]
    scores = Scorer(model, autocast=False).score(rows).logprob_R.numpy()
    expected = logprobs(model, IDS)[7:]
    np.testing.assert_allclose(scores, [*expected[:12], *expected[:22]], atol=1e-4)
    if name in EXPERTS:
        with pytest.raises(ConfigError, match=r"experts\.\w+' of the model has another form or name in the files"):
            cpu_engine(tmp_path / "model")
        return
    engine = cpu_engine(tmp_path / "model", max_in_flight=3)
    engine.load_weights(snapshot_of(model, tmp_path / "v1"))
    assert_generates(engine, model)


def test_every_way_to_make_a_model_that_caps_its_attention_lets_it(tmp_path):
    """PyTorch's attention ignores the cap, which changes these by nats."""
    for name in ("gemma2 attention cap", "vaultgemma"):
        save(name, tmp_path / name)
        sdpa = AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="sdpa").eval()
        eager = AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager").eval()
        assert np.abs(logprobs(sdpa, IDS) - logprobs(eager, IDS)).max() > 0.1
        loaded = load_model(tmp_path / name, torch.device("cpu"))
        assert "its attention uses softcap, which packed attention does not support" in obstacle(loaded)
        made = [loaded, load_model(tmp_path / name, torch.device("meta")), from_directory(AutoModel, tmp_path / name)]
        assert [one.config._attn_implementation for one in made] == ["eager"] * 3
        row = make_trajectory(prompt_ids=np.asarray(IDS[:8], np.int32), response_ids=np.asarray(IDS[8:], np.int32))
        (total,) = ReferenceModel(str(tmp_path / name), device="cpu", dtype="float32").logprobs([row])
        assert total == pytest.approx(logprobs(eager, IDS)[7:].sum(), abs=1e-3)


def assert_generates(engine, model):
    """Rows of several lengths, which join and leave, have the log-probabilities of the model alone."""
    for n in range(5):
        prompt = np.asarray(IDS[: 3 + 9 * n], np.int32)
        engine.submit(GenerationRequest(n, prompt, SamplingSettings(1.0, 1.0, 8 + 7 * n, seed=n)))
    while engine.in_flight:
        for one in engine.step():
            found = logprobs(model, [*IDS[: 3 + 9 * one.id], *one.response_ids.tolist()])[2 + 9 * one.id :]
            np.testing.assert_allclose(one.logprobs, found, atol=1e-4)


@pytest.mark.parametrize("case", DIRECTORIES)
def test_a_snapshot_replaces_every_parameter_whatever_the_configuration_says_of_the_head(case, tmp_path):
    save, tied = DIRECTORIES[case]
    save(tmp_path / "model")
    engine, model = cpu_engine(tmp_path / "model"), moved(tmp_path / "model", 1)
    assert bool(tied_names(model)) == bool(tied_names(engine._model)) == tied
    engine.load_weights(snapshot_of(model, tmp_path / "v1"))
    own = dict(engine._model.named_parameters())
    assert all(torch.equal(own[name], one) for name, one in model.named_parameters())
    np.testing.assert_allclose(engine.score([IDS])[0], logprobs(model, IDS), atol=1e-4)


def test_in_bfloat16_a_head_of_its_own_follows_every_snapshot(tmp_path):
    """The canary would accept the head of the start."""
    DIRECTORIES["tied, another head"][0](tmp_path / "model")
    engine, model = cpu_engine(tmp_path / "model", dtype="bfloat16", canary_tolerance=8.0), moved(tmp_path / "model", 1)
    for version in (1, 2):
        model.lm_head.weight += 0.01
        engine.load_weights(snapshot_of(model, tmp_path / f"v{version}", version))
        assert torch.equal(engine._model.lm_head.weight, model.lm_head.weight.bfloat16())


def test_a_snapshot_that_would_leave_a_parameter_as_it_is_is_refused(tmp_path):
    DIRECTORIES["tied, no head"][0](tmp_path / "model")
    engine, model = cpu_engine(tmp_path / "model"), moved(tmp_path / "model", 1)
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
        cpu_engine(tmp_path)


def test_a_model_without_a_largest_position_generates(tmp_path):
    """As BLOOM and MPT, which know distances alone."""
    save("bloom", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    fields = json.loads(path.read_text())
    del fields["max_position_embeddings"]
    path.write_text(json.dumps(fields))
    model = load_model(tmp_path / "model", torch.device("cpu"))
    assert_generates(cpu_engine(tmp_path / "model", max_in_flight=3), model)


def test_a_model_whose_body_transformers_does_not_name_is_refused_by_that(tmp_path):
    """Its `base_model_prefix` names no attribute, so that `base_model` is the whole model (transformers 5.19)."""
    kind = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32, "attention_chunk_size": 16}
    config = AutoConfig.for_model("llama4_text", **(SHAPE | kind))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="names no body of Llama4ForCausalLM apart from its head"):
        load_model(tmp_path, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "field", "words"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "in Gemma3ForCausalLM tokens depend on later ones"),
        ("llama", {}, "computes numbers that are not finite"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_its_cause(name, field, words, tmp_path):
    save(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | field))
    if not field:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.norm.weight"][0] = float("nan")
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=words):
        load_model(tmp_path, torch.device("cpu"))
