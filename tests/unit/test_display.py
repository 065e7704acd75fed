"""What `tba run` says where there is no terminal, and how things are counted in sentences."""

import io

import pytest
from rich.console import Console

from tba.common.clock import ManualClock
from tba.common.quantity import quantity
from tba.common.wire import ClientStatus, Status
from tba.deploy.display import Display, explain


def make_status(step: int = 0, **changes) -> Status:
    numbers = dict.fromkeys(
        ("uptime_seconds", "epoch", "prompts", "trajectories", "errors", "duplicates", "sampleable", "puts_per_second",
         "database_bytes", "queued_bytes", "commit_seconds"), 0,
    )  # fmt: skip
    fields = {"run_name": "r", "step": step, "finished": False, "rejected": {}, "trainer_waits_for": "", "clients": []}
    return Status.model_validate(numbers | fields | changes)


def make_client(role: str, **changes) -> ClientStatus:
    fields = {"role": role, "sender": f"{role}.1", "host": "h", "silent_seconds": 0.1, "activity": "training"}
    numbers = {"reason": "", "weights_version": None, "metrics": {}, "trajectories": 0, "duplicates": 0, "leases": 0}
    return ClientStatus.model_validate(fields | numbers | changes)


@pytest.fixture
def pipe():
    """A display without a terminal, its clock, and what it has printed."""
    clock, output = ManualClock(), io.StringIO()
    return Display(Console(file=output, width=200), steps=80, clock=clock), clock, output


def test_without_a_terminal_a_line_that_says_nothing_new_is_printed_once_a_minute(pipe):
    display, clock, output = pipe
    for _ in range(121):
        display.show(make_status(), starting={"trainer"})
        clock.advance(1)
    assert output.getvalue() == "step 0/80  the trainer is loading the model\n" * 3


def test_without_a_terminal_what_changes_is_printed_every_few_seconds_and_the_last_line_in_any_case(pipe):
    display, clock, output = pipe
    for step in range(1, 11):
        display.show(make_status(step))
        clock.advance(1)
    display.show(make_status(10), last=True)
    steps = [line.split()[1] for line in output.getvalue().splitlines()]
    assert steps == ["1/80", "6/80", "10/80"]


def test_what_is_awaited_at_the_start_is_said():
    assert explain(make_status()) == "no trainer has connected yet: it does when its model is loaded"
    assert explain(make_status(), {"trainer", "searcher"}) == "the trainer is loading the model"
    former = make_client("trainer", activity="gone")
    assert explain(make_status(5, clients=[former])) == "the trainer left after step 5"
    assert explain(make_status(5, clients=[former]), {"trainer"}) == "the trainer is loading the model"
    waiting = make_status(clients=[make_client("trainer")], trainer_waits_for="0 of 8 prompts have trajectories")
    assert explain(waiting, {"searcher"}).endswith(
        "(0 of 8 prompts have trajectories); the searchers are loading the model"
    )


def test_a_noun_follows_its_number():
    assert [quantity(n, "step") for n in (0, 1, 2, 1024)] == ["0 steps", "1 step", "2 steps", "1024 steps"]
    assert [quantity(n, "entry is", "entries are") for n in (1, 2)] == ["1 entry is", "2 entries are"]
