"""The weights directory of a run is deleted, moved and replaced under load: the run says so, and goes on."""

import re
from collections.abc import Callable
from functools import partial

from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.hands import HANDS, repair
from tba.tests.process.conftest import arithmetic
from tba.tests.runner import size


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
    for hand in size(HANDS[::3], HANDS):
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
