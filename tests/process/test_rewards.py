"""Rewards and environments that misbehave in real worker processes: each fails alone, and the others go on."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tba.common.config import TaskSection
from tba.common.errors import EXIT_CONFIG, TaskError
from tba.searcher.scoring import task_scorer
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt
from tba.tests.process.conftest import collect, submit

MISDEEDS = {
    "raises": "reward of hostile: ValueError: lone ? surrogate",
    "interrupts": "reward of hostile: KeyboardInterrupt",
    "hangs": "reward of hostile: timed out after 5 s",
    "exits": "reward of hostile: the worker died with exit code 3",
    "segfaults": "reward of hostile: the worker was killed by SIGSEGV",
    "eats": "reward of hostile: out of memory (limit 256 MiB)",
    "huge": "reward of hostile: ValueError: a reward is at least -1e+09 and at most 1e+09, not 10000000000.0",
    "infinite": "reward of hostile: ValueError: a reward must be finite, not inf with parts {}",
    "nothing": "reward of hostile: TypeError: score returned NoneType, not a Reward",
    "text": "reward of hostile: TypeError: total of a reward is a str, not a number",
    "prints": None,
    "forks": None,
    "writes": "reward of hostile: what came from the worker is malformed: the reward may write to its file descriptors",
}

# All others are errors of the reward itself.
KINDS = {"hangs": "reward_timeout", "exits": "worker", "segfaults": "worker", "writes": "worker"}

SECONDS = 5.0
HELPERS = str(Path(__file__).parents[1] / "helpers")


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Make Rewards of a task of hostile_task.py or hostile_environments.py; at the end they leave no process."""
    monkeypatch.setenv("PYTHONPATH", HELPERS, prepend=os.pathsep)
    monkeypatch.syspath_prepend(HELPERS)
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path))
    mark, opened = f"{os.getpid()}-{time.monotonic_ns()}", []
    # Processes of other tests run the same programs.
    monkeypatch.setenv("HOSTILE_MARK", mark)

    def make(name, **keys):
        limits = {"reward_workers": 1, "reward_seconds": SECONDS, "reward_memory_mib": 256} | keys
        config = TaskSection(name=name, **limits)
        opened.append(Rewards(load_task(config), config))
        return opened[-1]

    yield make
    for rewards in opened:
        rewards.close()
    assert not [one for one in psutil.process_iter(["environ"]) if mark in (one.info["environ"] or {}).values()]


def score_all(scorer, texts):
    prompt = load_task(TaskSection()).prompts()[0]
    submit(scorer, [(prompt, text) for text in texts])
    return collect(scorer)


def test_every_misdeed_fails_alone_and_the_rest_of_its_batch_is_scored(make):
    scorer = make("hostile_task:HostileTask", reward_workers=2)
    texts = [text for misdeed in MISDEEDS for text in ("good", misdeed, "good")]
    for text, scored in zip(texts, score_all(scorer, texts), strict=True):
        assert scored.error == MISDEEDS.get(text), text
        assert scored.error_kind == (KINDS.get(text, "reward") if scored.error else None), text
        assert scored.reward.total == (0.0 if scored.error else 1.0), text
    assert scorer.timeouts == 1
    assert scorer.errors == sum(error is not None for error in MISDEEDS.values())


def test_a_worker_that_is_killed_while_it_starts_is_started_again(make, tmp_path):
    scorer = make("hostile_task:Unsteady")
    assert [scored.error for scored in score_all(scorer, ["good", "raises"])] == [None, MISDEEDS["raises"]]
    assert (tmp_path / "killed").exists()


def test_a_worker_that_is_not_ready_in_time_is_started_again(make, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(task_scorer, "LOAD_SECONDS", 3.0)
    scorer = make("hostile_task:SlowOnce")
    assert [scored.error for scored in score_all(scorer, ["good", "raises"])] == [None, MISDEEDS["raises"]]
    assert (tmp_path / "slow").exists()
    assert "reward worker did not start" in caplog.text


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("Hungry", r"hostile_task:Hungry does not load in task\.reward_memory_mib = 256: out of"),
        ("HeldBack", "in a reward worker: .* hostile_task:HeldBack cannot be loaded: OSError: no licence server"),
    ],
)
def test_a_task_that_does_not_load_in_a_worker_is_an_error_of_the_configuration(make, task, sentence):
    scorer = make(f"hostile_task:{task}")
    with pytest.raises(TaskError, match=sentence) as raised:
        score_all(scorer, ["good"])
    assert raised.value.exit_code == EXIT_CONFIG


def test_without_workers_the_searcher_scores_and_plays_itself(make):
    found = score_all(make("hostile_task:HostileTask", reward_workers=0), ["good", "raises"])
    assert [(scored.reward.total, scored.error, scored.error_kind) for scored in found] == [
        (1.0, None, None),
        (0.0, MISDEEDS["raises"], "reward"),
    ]
    played = play(make(ENVIRONMENTS, reward_workers=0), ["good", "step raises"])
    assert answers(played["good"]) == expected("good")
    assert played["step raises"][-1].error == "environment of hostile: step(): ValueError: no such move"


def test_a_coroutine_scores_several_responses_and_each_fails_alone(make):
    scorer = make("hostile_task:Judge", reward_concurrency=3)
    texts = ["together", "together", "together", "late", "raises", "good", "text"]
    found = score_all(scorer, texts)
    errors = {"late": MISDEEDS["hangs"], "raises": MISDEEDS["raises"], "text": MISDEEDS["text"]}
    assert [scored.error for scored in found] == [errors.get(text) for text in texts]
    assert [scored.interrupted for scored in found] == [text == "late" for text in texts]
    kinds = {"late": "reward_timeout", "raises": "reward", "text": "reward"}
    assert [scored.error_kind for scored in found] == [kinds.get(text) for text in texts]
    assert scorer.timeouts == 1
    # As many as allowed, and no more, were under way.
    assert score_all(scorer, ["most"])[0].reward.total == 3.0


def test_a_coroutine_that_blocks_its_worker_is_an_error_and_the_others_are_scored(make):
    scorer = make("hostile_task:Judge", reward_seconds=3.0, reward_concurrency=1)
    found = score_all(scorer, ["good", "hangs", "good"])
    assert [scored.error for scored in found] == [None, "reward of hostile: timed out after 8 s", None]
    assert [scored.interrupted for scored in found] == [False, True, False]


ENVIRONMENTS = "hostile_environments:HostileEnvironments"
REPLIES = ["a", "b", "c", "stop"]
# By the key of its prompt, what an episode ends with: the kind of error, and the sentence on it.
ENVIRONMENT_MISDEEDS = {
    "environment raises": ("environment", "environment(): ValueError: no such move"),
    "environment kills": ("worker", "environment(): the worker was killed by SIGKILL"),
    "reset hangs": ("turn_timeout", "reset(): timed out after 5 s"),
    "reset raises": ("environment", "reset(): ValueError: no such move"),
    "reset leaves": ("environment", "reset(): SystemExit: 4"),
    "reset exits": ("worker", "reset(): the worker died with exit code 3"),
    "reset kills": ("worker", "reset(): the worker was killed by SIGKILL"),
    "reset eats": ("environment", "reset(): out of memory (limit 256 MiB)"),
    "reset strings": (
        "environment",
        "reset(): ValueError: the message 'hello': write (role, content), two strings, or",
    ),
    "reset large": ("environment", "reset(): ValueError: an answer of 10,485,764 bytes, and at most 1,048,576 are"),
    "reset none": ("environment", "reset(): TypeError: NoneType returned, not a list of messages"),
    "reset text": ("environment", "reset(): TypeError: str returned, not a list of messages"),
    "step hangs": ("turn_timeout", "step(): timed out after 5 s"),
    "step late": ("turn_timeout", "step(): timed out after 5 s"),
    "step raises": ("environment", "step(): ValueError: no such move"),
    "step leaves": ("environment", "step(): SystemExit: 4"),
    "step exits": ("worker", "step(): the worker died with exit code 3"),
    "step kills": ("worker", "step(): the worker was killed by SIGKILL"),
    "step eats": ("environment", "step(): out of memory (limit 256 MiB)"),
    "step none": ("environment", "step(): TypeError: NoneType returned, not a Turn"),
    "step tuple": ("environment", "step(): TypeError: tuple returned, not a Turn"),
    "step nan": ("environment", "step(): ValueError: a reward must be finite, not nan with parts {}"),
    "step strings": ("environment", "step(): ValueError: the message 'hello': write (role, content), two strings, or"),
    "step large": ("environment", "step(): ValueError: an answer of 10,485,764 bytes, and at most 1,048,576 are"),
    "close hangs": ("turn_timeout", "close(): timed out after 5 s"),
    "close raises": ("environment", "close(): ValueError: no such move"),
    "close exits": ("worker", "close(): the worker died with exit code 3"),
}


def play(rewards, keys, replies=REPLIES):
    """Play an episode for each key, all at the same time, until it is done or fails. Returns the results by key."""
    tickets = dict(enumerate(keys))
    found: dict[str, list[Any]] = {key: [] for key in keys}
    given: dict[str, list[Any]] = {key: [] for key in keys}
    for ticket, key in tickets.items():
        rewards.play(ticket, Prompt(key, "question"), [])
    while rewards.waiting:
        for scored in rewards.wait(1.0):
            key = tickets[scored.ticket]
            found[key].append(scored)
            if scored.error is None and not scored.turn.done and len(given[key]) < len(replies):
                given[key] = [*given[key], (replies[len(given[key])], True)]
                rewards.play(scored.ticket, Prompt(key, "question"), given[key])
    return found


def answers(results):
    return [scored.turn.messages[0][1] for scored in results if scored.turn is not None]


def expected(key):
    return [f"begin {key}", "1 a", "2 a b", "3 a b c", "4 a b c stop"]


def test_each_misdeed_fails_its_own_episode_and_names_the_call(make):
    rewards = make(ENVIRONMENTS, reward_workers=2)
    good = [f"good{n}" for n in range(6)]
    found = play(rewards, [*good, *ENVIRONMENT_MISDEEDS, "step forks"])
    for key, (kind, sentence) in ENVIRONMENT_MISDEEDS.items():
        last = found[key][-1]
        assert (last.error_kind, last.turn) == (kind, None), last
        assert last.error.startswith(f"environment of hostile: {sentence}"), last.error
    for key in [*good, "step forks"]:
        assert answers(found[key]) == expected(key)
        assert sum(one.reward.total for one in found[key]) == 2.0
    assert rewards.timeouts == 4


def test_a_worker_that_ran_out_of_memory_retires_and_its_other_episodes_go_on(make):
    rewards = make(ENVIRONMENTS)
    first = [worker.process.pid for worker in rewards._task.workers]
    found = play(rewards, ["one", "step eats", "two"])
    assert found["step eats"][-1].error.endswith("step(): out of memory (limit 256 MiB)")
    assert [answers(found[key]) for key in ("one", "two")] == [expected("one"), expected("two")]
    assert [worker.process.pid for worker in rewards._task.workers] != first


def test_an_environment_with_shared_state_is_told_apart_when_it_is_repeated(make):
    found = play(make("hostile_environments:Shared"), ["shared", "step kills"])["shared"][-1]
    assert found.error_kind == "environment"
    assert "step(): another answer than before when the episode was repeated in another worker" in found.error


def test_a_random_environment_is_not_repeated(make):
    found = play(make("hostile_environments:Luck"), ["shared", "step kills"])["shared"][-1]
    assert (found.error_kind, found.interrupted) == ("worker", True)
    assert found.error.endswith("its worker was replaced, and a random environment cannot be repeated")


def test_coroutines_of_several_environments_run_together_and_each_has_its_deadline(make):
    rewards = make("hostile_environments:Coroutines")
    for ticket, key in enumerate(play(rewards, ["one", "two", "three"], replies=[])):
        rewards.play(ticket, Prompt(key, "question"), [("3", True)])
    found = []
    while rewards.waiting:
        found += rewards.wait(1.0)
    assert [one.turn.done for one in found] == [True] * 3
    for reply in ("late", "stubborn"):
        late = play(rewards, ["one"], replies=[reply])["one"][-1]
        assert (late.error_kind, late.error) == ("turn_timeout", "environment of hostile: step(): timed out after 5 s")


def test_a_call_that_waits_holds_up_no_other_episode(make):
    rewards = make("hostile_environments:Coroutines")
    play(rewards, ["one", "two"], replies=[])
    rewards.play(0, Prompt("one", "question"), [("2", True)])
    # Sent, and begun in the only worker.
    rewards.wait(1.0)
    rewards.play(1, Prompt("two", "question"), [("2", True)])
    found = []
    while rewards.waiting:
        found += rewards.wait(1.0)
    assert [one.turn and one.turn.done for one in found] == [True] * 2


def test_an_episode_can_end_with_a_last_turn_or_by_closing_it(make):
    rewards = make(ENVIRONMENTS)
    for ticket, how in enumerate([{"last": True}, {"close": True}]):
        prompt = Prompt("close raises", "question")
        rewards.play(ticket, prompt, [])
        assert _next(rewards).error is None
        rewards.play(ticket, prompt, [("a", True)], **how)
        assert _next(rewards).error == "environment of hostile: close(): ValueError: no such move"


def _next(rewards):
    # Messages alone end a wait: a call that is not sent at once would exceed the time limit of the test.
    while not (found := rewards.wait(600.0)):
        pass
    return found[0]


def test_a_worker_ends_without_a_traceback_when_its_searcher_was_killed():
    searcher, worker = socket.socketpair()
    script = "\n".join(
        [
            "from tba.searcher.scoring.worker_pool import Connection",
            "connection = Connection()",
            "connection.send('a reply that is never read')",
            "input()",
            "connection.send('one that cannot be sent')",
            "assert list(connection.messages) == []",
        ]
    )
    command = [sys.executable, "-c", script, str(worker.fileno())]
    pipe = subprocess.PIPE
    with worker, subprocess.Popen(command, pass_fds=[worker.fileno()], stdin=pipe, stderr=pipe) as process:
        worker.close()
        searcher.recv(1, socket.MSG_PEEK)
        searcher.close()
        _, errors = process.communicate(b"\n")
    assert (process.returncode, errors) == (0, b"")
