"""`tba export-model`: what is written loads in transformers, with the log-probabilities of what was published."""

import hashlib

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tba.common import run_snapshots
from tba.common.config import Config
from tba.common.errors import SnapshotCorrupt, SnapshotError, UsageError
from tba.common.run_snapshots import find_source, held_source, weights_directory
from tba.common.weights import adapter
from tba.common.weights.node_store import delete
from tba.common.weights.snapshot import MANIFEST, Canary, Manifest, Snapshot, describe_files, directory_name, read, seal
from tba.searcher.engines.transformers_engine import _read
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.announcer import write_snapshot
from tba.tests.helpers.weights import flip_a_byte
from tba.trainer import checkpoint
from tba.trainer.export import complete_directory, export_model
from tba.trainer.model.scorer import load_model, weights_of

IDS = torch.tensor([[3, 4, 13, 5, 6, 15, 7, 8]])


@pytest.fixture
def config(tmp_path):
    return Config.model_validate({"model": {"path": str(EXAMPLE_MODEL), "dtype": "float32"}, "run": {"dir": tmp_path}})


@pytest.fixture
def base(config):
    path, _ = write_snapshot(EXAMPLE_MODEL, config.snapshots, 0)
    return path


@torch.no_grad()
def logits(directory, weights=None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    return model(IDS).logits


def write_adapter(base, version):
    """Write an adapter snapshot on a base, with random factors of one layer."""
    directory = base.with_name(directory_name(version))
    directory.with_suffix(".tmp").mkdir()
    generator = np.random.default_rng(0)
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, columns = _read(read(base))[name].shape
    a, b = (generator.normal(size=size).astype(np.float32) for size in ((4, columns), (rows, 4)))
    factors = adapter.Adapter({name: adapter.Factors(a, b)}, 0.5)
    adapter.save(directory.with_suffix(".tmp"), factors, rank=4, base=base)
    digest = hashlib.sha256((base / MANIFEST).read_bytes()).hexdigest()
    files, whole = describe_files(directory.with_suffix(".tmp")), read(base).manifest.files
    manifest = Manifest("test", version, version, 0.0, files, Canary([], []), None, 0, digest, whole)
    seal(directory.with_suffix(".tmp"), directory, manifest)
    return directory


def test_a_full_snapshot_is_exported_bit_for_bit_and_without_its_manifest(config, base, tmp_path):
    export_model(base, tmp_path / "out", config)
    assert torch.equal(logits(tmp_path / "out"), logits(base))
    assert {path.name for path in base.iterdir()} - {path.name for path in (tmp_path / "out").iterdir()} == {MANIFEST}


@pytest.mark.parametrize(("stop", "ends"), [([], 1), ([13], [1, 13]), (["<eos>"], 1), (["<pad>", "="], [1, 0])])
def test_an_export_names_all_tokens_that_ended_responses(config, base, tmp_path, stop, ends):
    search = config.search.model_copy(update={"stop": tuple(stop)})
    export_model(base, tmp_path / "out", config.model_copy(update={"search": search}))
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == ends
    assert GenerationConfig.from_pretrained(base).eos_token_id == 1


def test_the_adapters_of_a_snapshot_are_merged_as_the_engine_merges_them(config, base, tmp_path):
    changed = write_adapter(base, 1)
    export_model(find_source(config, tmp_path, None), tmp_path / "out", config)
    published = read(base)
    sums = _read(Snapshot(base, published.manifest, published.weight_files, changed))
    # The base is in bfloat16, and an engine of that dtype rounds the sums as it copies them.
    merged = {name: tensor.bfloat16() for name, tensor in sums.items()}
    found = logits(tmp_path / "out")
    assert torch.equal(found, logits(base, merged))
    assert not torch.equal(found, logits(base))
    with complete_directory(changed, config) as directory:
        assert torch.equal(logits(directory), found)


def test_a_checkpoint_is_exported_with_its_weights(config, tmp_path):
    model = load_model(EXAMPLE_MODEL, torch.device("cpu"))
    weights = {name: tensor + 0.01 for name, tensor in weights_of(model).items()}
    manifest = {
        "format": checkpoint.FORMAT,
        "run": "r",
        "step": 7,
        "reference": "",
        "adapter": None,
        "unreported": None,
    }
    tensors = {f"{checkpoint.MODEL}/{name}": tensor for name, tensor in weights.items()}
    tensors["optimizer.safetensors/rng.cpu"] = torch.zeros(1)
    path = checkpoint.write(config.checkpoints, manifest, tensors, keep=1)
    export_model(find_source(config, path, None), tmp_path / "out", config)
    assert torch.equal(logits(tmp_path / "out"), logits(EXAMPLE_MODEL, weights))


def test_an_export_replaces_nothing_and_leaves_nothing_behind_when_it_fails(config, base, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    flip_a_byte(base / "model.safetensors")
    with pytest.raises(SnapshotCorrupt):
        export_model(base, out, config)
    assert not list(out.iterdir())
    assert not list(tmp_path.glob(".out*"))
    (out / "mine").touch()
    with pytest.raises(UsageError, match="exists already"):
        export_model(base, out, config)


def test_a_snapshot_in_memory_is_not_deleted_while_it_is_read_and_a_newer_one_replaces_one_that_is_gone(
    config, tmp_path, monkeypatch
):
    memory = tmp_path / "memory"
    config = config.model_copy(update={"search": config.search.model_copy(update={"weights_dir": memory})})
    newest = weights_directory(config)
    gone, there = (newest / f"{directory_name(version)}-0" for version in (1, 2))
    there.mkdir(parents=True)
    chosen = iter([gone, there])
    monkeypatch.setattr(run_snapshots, "choose_snapshots", lambda *_, every: [next(chosen)])
    with held_source(config, None, None) as source:
        assert source == there
        assert not delete(there)
    assert delete(there)
    monkeypatch.setattr(run_snapshots, "choose_snapshots", lambda *_, every: [gone])
    with pytest.raises(SnapshotError, match="was deleted before it could be read"), held_source(config, None, None):
        pass


def test_a_version_that_is_not_kept_is_an_error_that_names_those_that_are(config, base, tmp_path):
    assert find_source(config, None, 0) == find_source(config, tmp_path, 0) == base
    with pytest.raises(UsageError, match="has no version 3; the newest that it has: 0"):
        find_source(config, None, 3)
