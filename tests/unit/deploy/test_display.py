"""The display of `tba run` without a terminal, and counted nouns."""

import io
import re
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tba.cli.inspection import for_machines
from tba.cli.models import _print_in_parts
from tba.common.errors import quantity
from tba.common.run_status import Facts, describe
from tba.common.wire.messages import Status
from tba.deploy.display import Display, clients_table, status_view, summary_line
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.statuses import make_client, make_status

# What a supervisor reports while the trainer, or a searcher, loads its model.
LOADS = {kind: make_client("monitor", activity="watching", metrics={kind: 1.0}) for kind in ("trainer", "search")}


def explain(facts: Facts) -> str:
    return describe(facts).sentence


def last_line(facts: Facts) -> str:
    return summary_line(facts, not_none(facts.status), 80, None)


@pytest.fixture
def pipe():
    """Return a display without a terminal, its clock, and its output."""
    clock, output = ManualClock(), io.StringIO()
    return Display(Console(file=output, width=200), steps=80, clock=clock), clock, output


def test_an_unchanged_line_is_printed_once_a_minute_changes_every_few_seconds_and_the_last_line_always(pipe):
    display, clock, output = pipe
    for _ in range(121):
        display.show(Facts(make_status(clients=[LOADS["trainer"]])))
        clock.advance(1)
    assert output.getvalue() == "step 0/80  the trainer is loading the model\n" * 3
    clock.advance(10)
    for step in range(1, 11):
        display.show(Facts(make_status(step)))
        clock.advance(1)
    display.show(Facts(make_status(10)), last=True)
    assert [line.split()[1] for line in output.getvalue().splitlines()[3:]] == ["1/80", "6/80", "10/80"]


def test_the_explanation_names_what_a_starting_run_waits_for():
    assert describe(Facts(None, starting=True)) == ("starting", "`tba run` is starting the buffer")
    assert explain(Facts(make_status())) == "no trainer has connected yet: it loads its model first"
    engines_first = make_status(clients=[LOADS["search"]])
    assert explain(Facts(engines_first)) == "no trainer has connected yet: the searchers are loading the model"
    finished = make_status(60, finished=True)
    assert describe(Facts(finished)) == ("finished", "finished after 60 steps; the buffer serves it again")
    resumed = make_status(60, finished=True, clients=[LOADS["trainer"]])
    assert describe(Facts(resumed)) == ("starting", "the trainer is loading the model")
    previous = make_client("trainer", activity="gone")
    assert explain(Facts(make_status(60, finished=True, clients=[previous]))) == "finished after 60 steps"
    assert explain(Facts(make_status(5, clients=[previous]))) == "the trainer left after step 5"
    restarted = make_status(5, clients=[previous, LOADS["trainer"]])
    assert explain(Facts(restarted)) == "the trainer is loading the model"
    clients = [make_client("trainer"), LOADS["search"]]
    waiting = make_status(clients=clients, trainer_waits_for="0 of 8 prompts have trajectories")
    assert explain(Facts(waiting)).endswith("0 of 8 prompts have trajectories); the searchers are loading the model")


def test_who_has_left_a_finished_run_is_not_called_gone():
    status = make_status(80, clients=[make_client("searcher", sender="vm-cpu0.1", activity="gone")])
    assert "  gone  " in shown(status)
    done = Facts(make_status(80, finished=True, clients=[make_client("trainer", activity="gone")]))
    assert last_line(done) == "step 80/80  finished after 80 steps"
    after = shown(msgspec.structs.replace(status, finished=True))
    assert ("finished" in after, "gone" in after) == (True, False)


def printed(view: Any, **console: Any) -> str:
    text = io.StringIO()
    Console(file=text, width=200, **console).print(view)
    return text.getvalue()


def shown(status: Status, **console: Any) -> str:
    return printed(clients_table(status), **console)


def test_two_searchers_of_one_name_are_told_apart():
    senders = ["vm-cpu0.1a2b", "vm-cpu0.3c4d", "vm-cpu1.5e6f"]
    lines = shown(make_status(5, clients=[make_client("searcher", sender=sender) for sender in senders])).splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["vm-cpu0.1a2b", "vm-cpu0.3c4d", "vm-cpu1"]


def test_what_is_in_the_way_and_a_warning_are_shown_next_to_what_the_trainer_does():
    told = "stale responses have lost 1.2 nats"
    trainer, warns = make_client("trainer"), make_client("trainer", warning=told)
    publishing = make_client("trainer", warning=told, activity="publishing", reason="v8 waits for disk space")
    lagging = Facts(make_status(5, clients=[trainer], no_recent_data="the last batch found no data"))
    assert explain(lagging) == "the trainer is training; the last batch found no data"
    assert last_line(lagging).endswith("the last batch found no data")
    warned, writing = (Facts(make_status(5, clients=[client])) for client in (warns, publishing))
    assert explain(warned) == f"the trainer is training; {told}"
    assert last_line(warned).endswith(told)
    assert explain(writing) == f"the trainer is publishing: v8 waits for disk space; {told}"
    assert last_line(writing).endswith(f"v8 waits for disk space  {told}")
    waiting = make_status(5, clients=[warns], trainer_waits_for="32 prompts")
    assert explain(Facts(waiting)) == f"the trainer waits for data (32 prompts); no searcher is connected; {told}"
    assert last_line(Facts(waiting)).endswith(told)
    assert told not in explain(Facts(msgspec.structs.replace(waiting, finished=True)))
    assert told not in explain(Facts(make_status(5, clients=[make_client("trainer", warning=told, activity="gone")])))
    stall = {"reason": "publication", "sentence": "check it"}
    assert explain(Facts(make_status(5, clients=[warns], stall=stall))) == f"check it; {told}"
    # Searchers load while the trainer trains on stored answers.
    loading = Facts(make_status(26, clients=[trainer, LOADS["search"]]))
    assert last_line(loading).endswith("  the searchers are loading the model")


def test_a_noun_agrees_with_its_number():
    assert [quantity(n, "step") for n in (0, 1, 2, 1024)] == ["0 steps", "1 step", "2 steps", "1024 steps"]
    assert [quantity(n, "entry is", "entries are") for n in (1, 2)] == ["1 entry is", "2 entries are"]


def test_names_from_the_network_are_neither_markup_nor_escape_sequences():
    status = make_status(clients=[])
    hostile = make_client("searcher", sender="x[/].1", activity="[bold]\x1b[2J", reason="\x1b]0;title\x07")
    status = msgspec.structs.replace(status, clients=[hostile], trainer_waits_for="[/]\x1b[31m")
    output = io.StringIO()
    console = Console(file=output, width=200)
    console.print(clients_table(status))
    display = Display(console, steps=10, clock=ManualClock())
    display.note("a sentence with [/] in it")
    display.show(Facts(status))
    assert "x[/]" in output.getvalue()
    assert "[bold]" in output.getvalue()
    assert "\x1b" not in output.getvalue()


def test_a_terminal_that_cannot_redraw_gets_lines():
    output = io.StringIO()
    dumb = Console(file=output, width=200, force_terminal=True, _environ={"TERM": "dumb"})
    display = Display(dumb, steps=80, clock=ManualClock())
    with display.live:
        display.show(Facts(make_status(5, clients=[make_client("trainer")])))
        assert output.getvalue().startswith("step 5/80 ")


def test_a_wide_table_of_evaluations_is_printed_in_parts_that_fit(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    names = ["version", "step", *(f"pass_at_{k}" for k in range(12))]
    _print_in_parts(names, [dict.fromkeys(names, "0.7917 [0.6, 0.9]") | {"version": 917}])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.lstrip().startswith("917 ") for line in lines) == 5, "each part names the version"
    assert " ".join(lines).count("0.7917 [0.6, 0.9]") == 13, "no cell is broken"


def test_the_figures_of_the_live_display_are_never_broken_in_the_middle():
    status = make_status(5, clients=[make_client("trainer", metrics={"loss": 0.5, "reward": 0.25, "staleness": 3.0})])
    output = io.StringIO()
    display = Display(Console(file=output, width=60, force_terminal=True), steps=80, clock=ManualClock())
    with display.live:
        display.show(Facts(status))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown) if "loss" in line or "in the buffer" in line]
    assert len(set(lines)) == 2
    assert all(re.fullmatch(r"loss.* trajectories/s|[\d,]+ in the buffer .*epoch 0.*", line) for line in lines), lines


def test_a_stall_replaces_the_numbers_and_names_its_reason_for_machines():
    stall = {"reason": "process_fails", "sentence": "on h: trainer failed 3 times: CUDA out of memory"}
    facts = Facts(make_status(5, clients=[make_client("searcher", activity="generating")], stall=stall))
    assert last_line(facts) == f"step 5/80  {stall['sentence']}"
    assert for_machines(facts)["stall"] == stall
    assert for_machines(Facts(make_status()))["stall"] is None


def test_the_waits_of_an_evaluator_and_of_a_searcher_that_is_ahead_are_no_fault():
    evaluator = make_client("evaluator", activity="waiting", reason="the next kept snapshot", weights_version=None)
    status = make_status(5, clients=[evaluator, make_client("searcher", activity="waiting", reason="weights")])
    lines = shown(status, color_system="standard", force_terminal=True).splitlines()
    (listed,) = [line for line in lines if "the next kept snapshot" in line]
    (searcher,) = [line for line in lines if ": weights" in line]
    assert ("\x1b[33m" in listed, "\x1b[33m" in searcher) == (False, True)
    ahead = make_client("searcher", activity="waiting", reason="224 of 224 prompts under way")
    assert "normal while the trainer trains" in shown(make_status(5, clients=[ahead, make_client("trainer")]))
    assert "normal" not in shown(make_status(5, clients=[ahead]))


def test_a_line_names_no_time_that_is_unknown_and_says_that_nothing_arrives_or_what_fails():
    at_work = [make_client("trainer"), make_client("searcher")]
    idle, busy = (make_status(5, clients=at_work, puts_per_second=rate) for rate in (0.0, 0.3))
    line = last_line(Facts(idle))
    assert ("no new trajectories" in line, "left" in line) == (True, False)
    line = summary_line(Facts(busy), busy, 80, 61.0)
    assert (" 0.3 trajectories/s" in line, "left 61 s" in line) == (True, True)
    view = status_view(make_status(errors=1204, common_error="reward: no \x1b"), "a")
    assert "1,204 with an error, most often: reward: no \\x1b" in printed(view)
