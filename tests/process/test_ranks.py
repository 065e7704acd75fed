"""Several real processes that train one model over gloo make the steps that one process makes."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tba.common.process import RENDEZVOUS_VARIABLE
from tba.tests.unit import rank_lab

from .conftest import clean_environment


def train_over(ranks: int, directory: Path, scenarios: list[str]) -> None:
    """Run scenarios in so many processes; their results are in the directory."""
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), RENDEZVOUS_VARIABLE: str(directory / "meeting")}
        environment = clean_environment() | place | {"GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "tba.tests.unit.rank_lab", str(directory), *scenarios]
        processes.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        )
    try:
        for process in processes:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors.decode()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """The result of a scenario over so many ranks; all scenarios of a number of ranks run in one start."""

    @cache
    def directory_of(ranks: int) -> Path:
        directory = tmp_path_factory.mktemp(f"ranks{ranks}")
        train_over(ranks, directory, list(rank_lab.SCENARIOS) if ranks == 2 else ["plain", "one_prompt", "lora"])
        return directory

    return lambda scenario, ranks: torch.load(directory_of(ranks) / f"{scenario}.pt")


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, tolerance: float) -> None:
    """Losses, gradient norms and everything else that is measured, and the weights after the last step."""
    for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance, rel=tolerance)
        assert mine["grad_norm"] > 0
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert torch.allclose(found["weights"][name], weight, atol=tolerance, rtol=0), name


@pytest.mark.parametrize("scenario", [name for name in rank_lab.SCENARIOS if "half" not in name])
def test_two_ranks_make_the_steps_of_one(trained, scenario):
    # The head that predicts log Z is float32 in any model.
    tolerance = 1e-6 if scenario == "learned_z" else 1e-9
    assert_same(trained(scenario, 2), rank_lab.run(scenario), tolerance=tolerance)


@pytest.mark.parametrize("scenario", ["plain", "one_prompt", "lora"])
def test_so_do_three_ranks_some_of_which_have_nothing_to_do(trained, scenario):
    assert_same(trained(scenario, 3), rank_lab.run(scenario), tolerance=1e-9)


@pytest.mark.parametrize("scenario", ["half", "lora_half"])
def test_two_ranks_in_bfloat16_are_as_near_as_bfloat16_is(trained, scenario):
    found, expected = trained(scenario, 2), rank_lab.run(scenario)
    assert found["metrics"][0]["loss"] == pytest.approx(expected["metrics"][0]["loss"], rel=0.02)
    assert found["metrics"][0]["grad_norm"] == pytest.approx(expected["metrics"][0]["grad_norm"], rel=0.05)
