"""Several real processes that train one model over gloo make the same steps as one process.

Four of them are two nodes of two: each node has a whole model, sharded over its ranks (HSDP).
"""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tba.tests.helpers import ranks as helper
from tba.tests.process.conftest import free_port

# Some of the scenarios that the same processes run have adapters.
pytestmark = pytest.mark.needs("peft")
RESUMED = ("all", "tied", "learned_z", "lora", "reset", "ema", "offload")
ON_THREE = ["plain", "one_prompt", "lora"]
ON_NODES = ["plain", "small_chunks", "recomputed", "packed_gathered", "offload_tied", "stale", "packed_lora"]


def train_over(ranks: int, directory: Path, scenarios: list[str]) -> None:
    """Run scenarios in `ranks` processes, which write their results to the directory."""
    helper.run_ranks(helper.main, ranks, directory, scenarios, free_port() if ranks == 4 else 0)


class Trained:
    """Results of scenarios by number of ranks. All scenarios of a number of ranks run in the same processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = cache(self._directory)
        self.result = cache(self._result)

    def _directory(self, ranks: int) -> Path:
        """Train with this number of ranks. Two and four ranks also resume from the checkpoints of one process."""
        directory = self.root / f"ranks{ranks}"
        directory.mkdir()
        if ranks == 3:
            train_over(3, directory, ON_THREE)
        elif ranks > 1:
            self.copy_checkpoints(directory, after=1)
            scenarios = helper.SCENARIOS if ranks == 2 else ON_NODES
            train_over(ranks, directory, [*scenarios, *(f"{name}/again" for name in RESUMED)])
        return directory

    def _result(self, scenario: str, ranks: int) -> dict[str, Any]:
        directory = self.directory(ranks)
        if ranks == 1:
            return helper.run(scenario, directory)
        result: dict[str, Any] = torch.load(directory / f"{scenario}.pt")
        return result

    def copy_checkpoints(self, target: Path, *, after: int) -> None:
        """Copy the checkpoints of `after` ranks to where `NAME/again` resumes from them."""
        for scenario in RESUMED:
            self.result(scenario, after)
            shutil.copytree(self.directory(after) / f"{scenario}.after", target / scenario / "again")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("ranks"))


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, tolerance: float) -> None:
    """Compare all metrics and numbers of rows of each step, and the weights after the last one."""
    for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance, rel=tolerance)
        assert mine["grad_norm"] > 0
    for mine, theirs in zip(found["rows"], expected["rows"], strict=True):
        for name, column in theirs.items():
            found_N, expected_N = (torch.tensor(np.array(values, float)) for values in (mine[name], column))
            assert torch.allclose(found_N, expected_N, atol=tolerance, rtol=tolerance, equal_nan=True), name
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert torch.allclose(found["weights"][name], weight, atol=tolerance, rtol=0), name


def tolerance_of(scenario: str) -> float:
    """Return the tolerance: models are float64, but the head that predicts log Z is always float32."""
    return 1e-6 if "learned_z" in scenario else 1e-9


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [
        *((2, name) for name in helper.SCENARIOS if "half" not in name),
        # Some of three have no rows.
        *((3, name) for name in ON_THREE),
        # Two nodes, of which each has a whole model.
        *((4, name) for name in ON_NODES),
    ],
)
def test_ranks_make_the_same_steps_as_one_process(trained, ranks, scenario):
    assert_same(trained.result(scenario, ranks), trained.result(scenario, 1), tolerance=tolerance_of(scenario))


@pytest.mark.parametrize("scenario", ["packed", "packed_gathered"])
def test_packed_rows_on_two_ranks_equal_padded_rows_on_one(trained, scenario):
    assert_same(trained.result(scenario, 2), trained.result("plain", 1), tolerance=1e-9)


def test_an_updated_reference_changes_the_kl(trained):
    """Otherwise equal losses after a resume would say nothing about the reference."""
    first, second = ([trained.result(name, 2)["metrics"][step]["kl"] for name in ("reset", "ema")] for step in (0, 1))
    assert first[0] == first[1]
    # The reference was just reset to the policy.
    assert second[0] == 0
    assert abs(second[1]) > 1e-3


@pytest.mark.parametrize("scenario", ["half", "lora_half", "offload_half"])
def test_two_ranks_in_bfloat16_agree_with_one_up_to_rounding(trained, scenario):
    found, expected = (trained.result(scenario, ranks)["metrics"][0] for ranks in (2, 1))
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.02)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


def test_gradients_are_reduced_once_per_step_if_ranks_keep_them_gathered(trained):
    # The sharded groups are two layers and the rest; five prompts of four rows are computed row by row on two ranks.
    steps, sharded_groups, chunks = 2, 3, 3 * 4
    assert trained.result("small_chunks_gathered", 2)["reductions"] == steps * sharded_groups
    assert trained.result("small_chunks", 2)["reductions"] == steps * sharded_groups * chunks
    # Four ranks have a prompt or two each. Over the nodes gradients are added once.
    assert trained.result("small_chunks", 4)["reductions"] == steps * sharded_groups * 2 * 4
    assert trained.result("small_chunks", 4)["sums"] == steps * sharded_groups


def test_one_process_resumes_from_two_and_two_or_two_nodes_from_one(trained, tmp_path):
    trained.copy_checkpoints(tmp_path / "one", after=1)
    trained.copy_checkpoints(tmp_path / "two", after=2)
    for scenario in RESUMED:
        again, tolerance = f"{scenario}/again", tolerance_of(scenario)
        straight = helper.run(again, tmp_path / "one")
        assert_same(helper.run(again, tmp_path / "two"), straight, tolerance=tolerance)
        assert_same(trained.result(again, 2), straight, tolerance=tolerance)
        assert_same(trained.result(again, 4), straight, tolerance=tolerance)


@pytest.mark.parametrize("scenario", ["reset", "ema"])
def test_ranks_that_resume_an_updated_reference_make_the_steps_of_an_uninterrupted_process(trained, tmp_path, scenario):
    straight = helper.run(scenario, tmp_path, steps=4)
    last = straight | {name: straight[name][2:] for name in ("metrics", "rows")}
    assert_same(trained.result(f"{scenario}/again", 2), last, tolerance=1e-9)
