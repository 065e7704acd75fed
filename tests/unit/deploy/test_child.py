"""What is quoted of a child that fails, and how long children may take to end, by the size of the model."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tba.common.config import Config
from tba.deploy.child import Child, drain_seconds
from tba.tests.helpers.trainer import save_tiny_model, tiny_model

_TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\n'


@pytest.mark.parametrize(
    ("output", "quoted"),
    [
        ("12:00:01 train step\nerror: the model does not fit\nresource_tracker: bye\n", "the model does not fit"),
        (f"{_TRACEBACK}torch.OutOfMemoryError: no memory\nbye\n", "torch.OutOfMemoryError: no memory"),
        ("Segmentation fault\n\n", "Segmentation fault"),
        ("x" * 200_000 + "\nKilled", "Killed"),
        ("", "it wrote nothing"),
    ],
)
def test_a_failed_child_is_quoted_with_its_last_error(tmp_path: Path, output: str, quoted: str):
    log = tmp_path / "c.log"
    log.write_text(output)
    assert Child("c", "c", [], log).quoted_error() == quoted


def test_the_number_of_a_child_that_has_ended_stays_taken_until_it_is_collected():
    with subprocess.Popen(["/bin/true"]) as process:
        child = Child("c", "c", [], None, process=process)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not child.running
        os.kill(process.pid, 0)
        assert process.wait() == 0


def test_only_a_child_that_failed_and_does_not_work_is_in_trouble():
    child = Child("trainer", "trainer", [], None)
    assert child.trouble(5) == ""
    child.failures, child.last_code, child.last_words = 2, 1, "no space"
    assert child.trouble(5) == "trainer starts again in 0 s (failed 2 times, last exit code 1): no space"
    assert child.trouble(1).startswith("trainer broken, starts again")
    child.last_code = -9
    assert child.trouble(5).endswith("(failed 2 times, it was ended by SIGKILL)"), "its last line is no reason"


def drains(path, **sections) -> tuple[Any, Any]:
    """Return the seconds of a child, and of one that trains the model at a path."""
    config = Config.model_validate({"model": {"path": str(path)}, "task": {"train": "t"}} | sections)
    return drain_seconds(config), drain_seconds(config, trains=True)


def test_a_trainer_has_time_for_two_checkpoints_of_its_model_and_ten_minutes_if_that_is_not_known(tmp_path):
    model = save_tiny_model(tmp_path / "model", hidden=64)
    parameters = sum(parameter.numel() for parameter in tiny_model(hidden=64).parameters())
    assert drains(model) == (20, pytest.approx(20 + 2 * 12 * parameters / 0.5e9))
    assert drains(model, lora={"rank": 4}) == (20, 20)
    assert drains("name/model", launch={"drain_seconds": 5.0}) == (5, 5), "a set value holds for all"
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text("{}")
    (damaged / "model.safetensors").write_bytes(b"no header")
    assert drains("name/model") == drains(damaged) == (20, 600)
