"""The weights directory of a run is deleted, moved and replaced under load: the run says so, and goes on."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tba.tests.helpers.checks import wait_until
from tba.tests.process.conftest import arithmetic


def delete(weights: Path) -> None:
    # The trainer writes into it meanwhile.
    while weights.exists():
        shutil.rmtree(weights, ignore_errors=True)


def move(weights: Path) -> None:
    weights.rename(weights.with_name("aside"))


def replace(weights: Path) -> None:
    move(weights)
    weights.mkdir()


def replace_by_a_file(weights: Path) -> None:
    move(weights)
    weights.write_text("not a directory")


def repair(weights: Path) -> None:
    if (aside := weights.with_name("aside")).exists():
        weights.unlink() if weights.is_file() else shutil.rmtree(weights, ignore_errors=True)
        aside.rename(weights)


def test_a_run_whose_weights_directory_changes_hands_names_it_and_trains_on_after_the_repair(
    make_config, start_tba, tmp_path
):
    run = make_config(**arithmetic(train={"steps": 1_000_000, "prompts_per_step": 2, "checkpoint_every": 1}))
    process = start_tba("run", run.file)
    weights, logs = tmp_path / "weights/test", run.directory / "logs"

    def said(name: str, sentence: str) -> int:
        return len(re.findall(sentence, (logs / name).read_text()))

    def failed() -> int:
        return said("trainer.log", f"error: publishing .*{weights}")

    def loaded() -> int:
        return said("search-0.log", "weights loaded")

    def wait_for_more(*counts: Callable[[], int]) -> None:
        before = [count() for count in counts]
        wait_until(lambda: all(count() > n for count, n in zip(counts, before, strict=True)), what=f"{hand.__name__}")

    def says_or_goes_on(published: int) -> bool:
        return failed() > failures[-1] or loaded() >= published

    wait_until(run.steps_trained, what="steps")
    failures: list[int] = []
    for hand in (delete, move, replace, replace_by_a_file):
        wait_for_more(run.steps_trained)
        failures.append(failed())
        hand(weights)
        # Or nothing was in it that the next publication needs.
        published = loaded() + 2
        wait_until(partial(says_or_goes_on, published), what=f"a sentence on {hand.__name__}")
        repair(weights)
        wait_for_more(run.steps_trained, loaded)
    process.terminate()
    assert process.wait(60) == 0
    assert not any("Traceback" in file.read_text() for file in logs.iterdir())
