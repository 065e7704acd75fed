"""The pipeline's stages with a fake engine that refuses requests: every response becomes a row."""

from typing import Any

import numpy as np
import pytest

from tba.common.config import Config
from tba.common.errors import EngineError
from tba.common.rendering import PromptRenderer
from tba.common.wire.messages import Visit
from tba.searcher.engines.engine import Generation
from tba.searcher.engines.stopping import Stopping
from tba.searcher.episodes import Episodes, Limits
from tba.searcher.pipeline import Exploration, GenerationStage, Pipeline, ScoringStage
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks.arithmetic import ArithmeticTask

SAMPLES = 2


class FakeEngine:
    """Answers each request with tokens 1 and 2 at the next step; refuses every `refuse_every`-th request."""

    weights_version = 0

    def __init__(self, refuse_every: int = 0, stop_reason: str = "eos") -> None:
        self._refuse_every = refuse_every
        self._stop_reason = stop_reason
        self._requests: list[Any] = []
        self._seen = 0

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def submit(self, request) -> None:
        self._seen += 1
        if self._refuse_every and self._seen % self._refuse_every == 0:
            raise EngineError("too long")
        self._requests.append(request)

    def step(self) -> list[Generation]:
        requests, self._requests = self._requests, []
        ids, logprobs, runs = np.array([1, 2], np.int32), np.full(2, -0.5, np.float32), np.array([[0, 2]], np.int32)
        return [Generation(request.id, ids, logprobs, runs, self._stop_reason, 0.0) for request in requests]


class FakeTokenizer:
    bos_token_id = None

    def __init__(self, *, broken: bool = False) -> None:
        self._broken = broken

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [len(text)]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if self._broken:
            raise IndexError("no such token")
        return "85"


class FakeDelivery:
    def __init__(self) -> None:
        self.groups: list[Any] = []

    def submit(self, rows, lease) -> None:
        self.groups.append((lease, rows))


@pytest.fixture
def make():
    """Create a pipeline, its scoring stage and its delivery."""
    opened = []

    def make(engine, tokenizer, **keys):
        config, task = Config.model_validate({"task": {"reward_workers": 0} | keys}), ArithmeticTask()
        rewards = Rewards(task, config.task)
        delivery: Any = FakeDelivery()
        opened.append(rewards)
        exploration = Exploration(config.search, run_seed=0, searcher="s")
        renderer, stopping = PromptRenderer(tokenizer, config.task), Stopping(tokenizer, (), ())
        generation = GenerationStage(engine, task, renderer, exploration, SAMPLES)
        episodes = Episodes(generation.ask, rewards, renderer, stopping, Limits.of(config), lambda: 0)
        scoring = ScoringStage(rewards, stopping, config.task.truncated, episodes)
        return Pipeline(generation, scoring, delivery), scoring, delivery

    yield make
    for rewards in opened:
        rewards.close()


def visits(count: int) -> list[Visit]:
    prompts = ArithmeticTask().prompts()
    return [Visit(lease=n + 1, epoch=0, prompt_key=prompts[n].key) for n in range(count)]


@pytest.mark.parametrize(
    ("refuse_every", "broken", "errors", "kind"),
    [
        (2, False, ["", "not generated: too long"], "generation"),
        (0, True, ["reward: not decoded: IndexError: no such token"] * SAMPLES, "decoding"),
    ],
)
def test_a_response_that_cannot_be_generated_or_decoded_is_a_row_with_its_error(
    make, refuse_every, broken, errors, kind
):
    pipeline, scoring, delivery = make(FakeEngine(refuse_every), FakeTokenizer(broken=broken))
    pipeline.submit(visits(1))
    pipeline.step(generate=True, wait_seconds=0.0)
    ((_, rows),) = delivery.groups
    assert sorted(row.error or "" for row in rows) == errors
    assert [row.error_kind for row in rows] == [kind if row.error else None for row in rows]
    assert scoring.errors == sum(error != "" for error in errors)


@pytest.mark.slow
def test_a_thousand_failures_in_a_row_end_the_searcher(make):
    pipeline, _, _ = make(FakeEngine(refuse_every=1), FakeTokenizer())
    pipeline.submit(visits(500))
    with pytest.raises(EngineError, match="1000 rollouts in a row failed, the last one: not generated: too long"):
        pipeline.step(generate=True, wait_seconds=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("stop_reason", "warnings"), [("length", 1), ("eos", 0)])
def test_responses_of_which_most_reach_the_length_limit_are_told_once(make, caplog, stop_reason, warnings):
    pipeline, _, _ = make(FakeEngine(stop_reason=stop_reason), FakeTokenizer())
    for _ in range(3):
        pipeline.submit(visits(100))
        pipeline.step(generate=True, wait_seconds=0.0)
    assert [record.getMessage() for record in caplog.records].count("responses do not end") == warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truncated", "reward", "error"),
    [("score", 0.0, None), (-1.0, -1.0, None), ("mask", 0.0, "not trained on: cut off after 2 tokens, and task.trunc")],
)
def test_a_response_that_was_cut_off_is_scored_penalised_or_left_out_of_training(make, truncated, reward, error):
    for stop_reason in ("eos", "length"):
        engine = FakeEngine(stop_reason=stop_reason)
        pipeline, scoring, delivery = make(engine, FakeTokenizer(), truncated=truncated)
        pipeline.submit(visits(1))
        pipeline.step(generate=True, wait_seconds=0.0)
        ((_, rows),) = delivery.groups
        # The parts of the task's reward stay. A finished answer is not affected.
        assert all({"correct", "format"} == row.reward_parts.keys() for row in rows)
        assert {row.reward for row in rows} == {reward if stop_reason == "length" else 0.0}
        assert {(row.error or "")[:50] for row in rows} == {(error or "")[:50] if stop_reason == "length" else ""}
        assert {row.error_kind for row in rows} == {"masked" if error and stop_reason == "length" else None}
        assert scoring.errors == 0
