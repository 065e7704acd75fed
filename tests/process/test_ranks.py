"""Several real processes that train one model over gloo make the steps that one process makes."""

import multiprocessing
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tba.tests.unit import rank_lab

RESUMED = ("all", "tied", "learned_z", "lora", "reset", "ema")


def train_over(ranks: int, directory: Path, scenarios: list[str]) -> None:
    """Run scenarios in so many processes; their results are in the directory."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tba.tests.unit.rank_lab", "torch.distributed.fsdp", "peft"])
    processes = [
        context.Process(target=rank_lab.main, args=(rank, ranks, directory, scenarios)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(200)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()


class Trained:
    """Results of scenarios by number of ranks; all scenarios of a number of ranks run in one start."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = cache(self._directory)
        self.result = cache(self._result)

    def _directory(self, ranks: int) -> Path:
        """Where these ranks left their files. Two go on from where one process stopped as well."""
        directory = self.root / f"ranks{ranks}"
        directory.mkdir()
        if ranks == 2:
            self.copy_checkpoints(directory, after=1)
            train_over(2, directory, [*rank_lab.SCENARIOS, *(f"{name}/again" for name in RESUMED)])
        elif ranks > 2:
            train_over(ranks, directory, ["plain", "one_prompt", "lora"])
        return directory

    def _result(self, scenario: str, ranks: int) -> dict[str, Any]:
        directory = self.directory(ranks)
        if ranks == 1:
            return rank_lab.run(scenario, directory)
        result: dict[str, Any] = torch.load(directory / f"{scenario}.pt")
        return result

    def copy_checkpoints(self, target: Path, *, after: int) -> None:
        """What so many ranks left, where `NAME/again` goes on from it."""
        for scenario in RESUMED:
            self.result(scenario, after)
            shutil.copytree(self.directory(after) / f"{scenario}.after", target / scenario / "again")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("ranks"))


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, tolerance: float) -> None:
    """Losses, gradient norms and everything else that is measured, and the weights after the last step."""
    for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance, rel=tolerance)
        assert mine["grad_norm"] > 0
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert torch.allclose(found["weights"][name], weight, atol=tolerance, rtol=0), name


def tolerance_of(scenario: str) -> float:
    """Models are float64; the head that predicts log Z is float32 in any model."""
    return 1e-6 if scenario == "learned_z" else 1e-9


@pytest.mark.parametrize("scenario", [name for name in rank_lab.SCENARIOS if "half" not in name])
def test_two_ranks_make_the_steps_of_one(trained, scenario):
    assert_same(trained.result(scenario, 2), trained.result(scenario, 1), tolerance=tolerance_of(scenario))


@pytest.mark.parametrize("scenario", ["plain", "one_prompt", "lora"])
def test_so_do_three_ranks_some_of_which_have_nothing_to_do(trained, scenario):
    assert_same(trained.result(scenario, 3), trained.result(scenario, 1), tolerance=1e-9)


@pytest.mark.parametrize("scenario", ["packed", "packed_whole"])
def test_packed_on_two_ranks_is_padded_on_one(trained, scenario):
    assert_same(trained.result(scenario, 2), trained.result("plain", 1), tolerance=1e-9)


def test_a_moved_reference_is_a_different_one(trained):
    """So that equal losses after a resume say something of the references."""
    first, second = ([trained.result(name, 2)["metrics"][step]["kl"] for name in ("reset", "ema")] for step in (0, 1))
    assert first[0] == first[1]
    assert second[0] == 0  # the policy itself, which has not moved since
    assert abs(second[1]) > 1e-3


@pytest.mark.parametrize("scenario", ["half", "lora_half"])
def test_two_ranks_in_bfloat16_are_as_near_as_bfloat16_is(trained, scenario):
    found, expected = (trained.result(scenario, ranks)["metrics"][0] for ranks in (2, 1))
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.02)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


def test_gradients_are_reduced_once_a_step_where_ranks_keep_them_whole(trained):
    steps, sharded_groups = 2, 3  # two layers and the rest
    pieces = 3 * 4  # five prompts of four rows over two ranks, row by row
    assert trained.result("small_parts_whole", 2)["reductions"] == steps * sharded_groups
    assert trained.result("small_parts", 2)["reductions"] == steps * sharded_groups * pieces


def test_one_process_goes_on_from_two_and_two_from_one(trained, tmp_path):
    trained.copy_checkpoints(tmp_path / "one", after=1)
    trained.copy_checkpoints(tmp_path / "two", after=2)
    for scenario in RESUMED:
        again, tolerance = f"{scenario}/again", tolerance_of(scenario)
        straight = rank_lab.run(again, tmp_path / "one")
        assert_same(rank_lab.run(again, tmp_path / "two"), straight, tolerance=tolerance)
        assert_same(trained.result(again, 2), straight, tolerance=tolerance)


@pytest.mark.parametrize("scenario", ["reset", "ema"])
def test_ranks_that_go_on_with_a_moved_reference_make_the_steps_of_one_process_that_never_stopped(
    trained, tmp_path, scenario
):
    straight = rank_lab.run(scenario, tmp_path, steps=4)
    assert_same(trained.result(f"{scenario}/again", 2), straight | {"metrics": straight["metrics"][2:]}, tolerance=1e-9)
