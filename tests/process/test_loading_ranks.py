"""Several processes load one model: rank 0 reads it, the others receive their shards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tba.tests.helpers.ranks import differ, load, refuse, run_ranks
from tba.tests.helpers.trainer import save_tiny_model
from tba.trainer.model.scorer import load_model, weights_of

RANKS = 3
OFFLOAD = ("none", "optimizer")
MODEL = {"vocabulary": 1000, "hidden": 640, "layers": 8, "tie": True}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What `load` has found on each rank, with and without offload."""
    directory = tmp_path_factory.mktemp("loaded")
    save_tiny_model(directory / "model", **MODEL)
    for offload in OFFLOAD:
        run_ranks(load, RANKS, directory, offload)
        (directory / "rendezvous").unlink()
    found = {name: [torch.load(directory / f"{name}{rank}.pt") for rank in range(RANKS)] for name in OFFLOAD}
    whole = load_model(directory / "model", torch.device("cpu"))
    expected = {"weights": weights_of(whole), "masters": dict(whole.named_parameters())}
    return found | {"expected": [expected | {"buffers": dict(whole.named_buffers())}]}


@pytest.mark.parametrize("offload", OFFLOAD)
def test_all_ranks_have_the_weights_and_buffers_of_the_files(loaded, offload):
    (expected,) = loaded["expected"]
    for found in loaded[offload]:
        assert_equal(found["policy"], expected["weights"])
        assert_equal(found["reference"], expected["weights"])
        assert_equal(found["buffers"], expected["buffers"])
        if offload == "optimizer":
            assert_equal(found["masters"], expected["masters"])


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_only_rank_0_has_memory_for_a_whole_model(loaded):
    (expected,) = loaded["expected"]
    one_model = sum(weight.nbytes for weight in expected["weights"].values())
    first, *others = (found["bytes"] for found in loaded["none"])
    # When it loads the reference, its policy is sharded.
    assert one_model < first < 2.3 * one_model
    # A third of the policy and of the reference, a layer on its way, and what libraries allocate.
    assert max(others) < 1.5 * one_model


def test_an_output_head_that_config_json_does_not_describe_is_refused_by_every_rank(tmp_path: Path):
    model = save_tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    # One process trains it: transformers leaves weights apart that differ.
    alone = load_model(model, torch.device("cpu"))
    assert not torch.equal(alone.get_input_embeddings().weight, alone.get_output_embeddings().weight)
    run_ranks(refuse, RANKS, tmp_path)


def test_ranks_with_other_settings_than_rank_0_are_refused_by_every_rank(tmp_path: Path):
    save_tiny_model(tmp_path / "model")
    run_ranks(differ, RANKS, tmp_path)
