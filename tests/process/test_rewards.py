"""Rewards that misbehave in real worker processes: each fails alone, and the other responses get their rewards."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba.common.config import TaskSection
from tba.common.errors import EngineError, TaskError
from tba.searcher.engines.engine import Generation, SamplingSettings
from tba.searcher.evaluation.answers import Question, answer
from tba.searcher.evaluation.measure import Measured, measure_greedy
from tba.searcher.scoring import task_scorer
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt

MISDEEDS = {
    "raises": "reward of hostile: ValueError: lone ? surrogate",
    "interrupts": "reward of hostile: KeyboardInterrupt: ",
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


@pytest.fixture
def hostile(monkeypatch, tmp_path):
    """Make the hostile tasks importable, here and in the processes that are started."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    folder = tmp_path / "misdeeds"
    folder.mkdir()
    monkeypatch.setenv("HOSTILE_FOLDER", str(folder))
    return folder


@pytest.fixture
def scorer(hostile):
    scorer = make_scorer("HostileTask", reward_workers=2, reward_seconds=5.0, reward_memory_mib=256)
    yield scorer
    scorer.close()


def make_scorer(name, **keys):
    config = TaskSection(name=f"hostile_task:{name}", **keys)
    return Rewards(load_task(config), config)


def score_all(scorer, texts):
    prompt = load_task(TaskSection()).prompts()[0]
    for ticket, text in enumerate(texts):
        scorer.submit(ticket, prompt, text, True)
    answers = {}
    while scorer.waiting:
        for scored in scorer.wait(1.0):
            assert scored.ticket not in answers
            answers[scored.ticket] = scored
    return [answers[ticket] for ticket in range(len(texts))]


def test_every_misdeed_fails_alone_and_the_rest_of_its_batch_is_scored(scorer):
    texts = [text for misdeed in MISDEEDS for text in ("good", misdeed, "good")]
    for text, scored in zip(texts, score_all(scorer, texts), strict=True):
        assert scored.error == MISDEEDS.get(text), text
        assert scored.error_kind == (KINDS.get(text, "reward") if scored.error else None), text
        assert scored.reward.total == (0.0 if scored.error else 1.0), text
    assert scorer.timeouts == 1
    assert scorer.errors == sum(error is not None for error in MISDEEDS.values())


def test_a_worker_that_is_killed_while_it_starts_is_started_again(hostile):
    scorer = make_scorer("Unsteady", reward_workers=1)
    assert [scored.error for scored in score_all(scorer, ["good", "raises"])] == [None, MISDEEDS["raises"]]
    assert (hostile / "killed").exists()
    scorer.close()


def test_a_worker_that_is_not_ready_in_time_is_started_again(hostile, caplog, monkeypatch):
    monkeypatch.setattr(task_scorer, "LOAD_SECONDS", 3.0)
    scorer = make_scorer("SlowOnce", reward_workers=1)
    assert [scored.error for scored in score_all(scorer, ["good", "raises"])] == [None, MISDEEDS["raises"]]
    assert (hostile / "slow").exists()
    assert "reward worker did not start" in caplog.text
    scorer.close()


def test_the_error_of_a_task_that_does_not_fit_in_its_memory_names_the_setting(hostile):
    scorer = make_scorer("Hungry", reward_workers=1, reward_memory_mib=256)
    with pytest.raises(TaskError, match=r"hostile_task:Hungry does not load in task\.reward_memory_mib = 256: out of"):
        score_all(scorer, ["good"])
    scorer.close()


def test_without_workers_the_searcher_scores_immediately(hostile):
    scorer = make_scorer("HostileTask", reward_workers=0)
    prompt = load_task(TaskSection()).prompts()[0]
    for ticket, text in enumerate(["good", "raises"]):
        scorer.submit(ticket, prompt, text, True)
    assert [(scored.reward.total, scored.error, scored.error_kind) for scored in scorer.wait(0.0)] == [
        (1.0, None, None),
        (0.0, MISDEEDS["raises"], "reward"),
    ]
    assert scorer.waiting == 0
    scorer.close()


def test_a_coroutine_scores_several_responses_and_each_fails_alone(hostile):
    scorer = make_scorer("Judge", reward_workers=1, reward_seconds=5.0, reward_concurrency=3)
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
    scorer.close()


def test_a_coroutine_that_blocks_its_worker_is_an_error_and_the_others_are_scored(hostile):
    scorer = make_scorer("Judge", reward_workers=1, reward_seconds=3.0, reward_concurrency=1)
    found = score_all(scorer, ["good", "hangs", "good"])
    assert [scored.error for scored in found] == [None, "reward of hostile: timed out after 8 s", None]
    assert [scored.interrupted for scored in found] == [False, True, False]
    scorer.close()


class EchoEngine:
    """Answers a prompt with its own tokens, two prompts per step; those in capital letters are cut off."""

    def __init__(self) -> None:
        self._requests: list[Any] = []

    def submit(self, request) -> None:
        if not len(request.prompt_ids):
            raise EngineError("the prompt has no tokens")
        self._requests.append(request)

    max_in_flight = 4

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def step(self) -> list[Generation]:
        some, self._requests = self._requests[:2], self._requests[2:]
        none, runs = np.zeros(0, np.float32), np.zeros((0, 2), np.int32)
        return [
            Generation(one.id, one.prompt_ids, none, runs, "length" if one.prompt_ids[0] < 97 else "eos", 0.0)
            for one in some
        ]


class Letters:
    """A tokenizer of code points."""

    bos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def evaluate(scorer, texts, go_on=lambda _: True, least=0.0) -> dict[str, float] | None:
    greedy = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=8)
    prompts = [Prompt(f"p{n}", text, "") for n, text in enumerate(texts)]
    questions = [Question(n, np.asarray(Letters().encode(text), np.int32), greedy) for n, text in enumerate(texts)]
    engine: Any = EchoEngine()
    decode = lambda ids: "".join(map(chr, ids))  # noqa: E731
    answers = answer(engine, scorer, decode, prompts, questions, go_on, lambda _: least)
    if answers is None:
        return None
    measured = Measured(seed=0)
    measure_greedy(measured, answers)
    return measured.metrics


def test_an_evaluation_counts_everything_that_cannot_be_answered_or_scored(scorer):
    texts = ["good", "", "GOOD", *(misdeed for misdeed in MISDEEDS if misdeed != "prints")]
    found = evaluate(scorer, texts, least=-1.0)
    assert found is not None
    assert not {"accuracy", "reward"} & found.keys()
    assert found["unfinished"] == pytest.approx(1 / 15)
    assert found["failed"] == pytest.approx(13 / 15)


def test_an_evaluation_can_be_given_up(scorer):
    assert evaluate(scorer, ["good"] * 9, go_on=lambda finished: finished < 2) is None
