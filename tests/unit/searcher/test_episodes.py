"""Episodes: why each one ends, and the row that it becomes."""

import random
import runpy
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tba.common.config import Config
from tba.common.errors import EngineError, TaskError
from tba.common.rendering import PromptRenderer
from tba.common.wire.codec import decode_request, encode_request
from tba.common.wire.messages import Visit
from tba.searcher.build import LoadedTask
from tba.searcher.engines.engine import ContextOverflow, Generation, SamplingSettings
from tba.searcher.engines.stopping import Stopping
from tba.searcher.episodes import Episodes, Limits
from tba.searcher.pipeline import Exploration, GenerationStage, Pipeline, ScoringStage
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks.games import CalculatorTask, GuessTask, calculate
from tba.searcher.tasks.task import LimitedTask, Prompt, Turn
from tba.tests.helpers.engines import cpu_engine, logprobs_of
from tba.tests.helpers.puts import make_trajectory, put_message

ROOT = Path(__file__).parents[3]
SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=100)
LIMITS = Limits(tokens=40, turn_tokens=40, turns=4, seconds=60.0)


@pytest.fixture(scope="session")
def game(tmp_path_factory):
    """The untrained model of the example, its tokenizer and its directory."""
    prepare = runpy.run_path(str(ROOT / "examples/game/prepare.py"))
    directory = tmp_path_factory.mktemp("game")
    model, tokenizer = prepare["build"](7)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return tokenizer, directory


class Script:
    """Replies with given texts, one per turn; an EngineError among them is raised instead."""

    def __init__(self, tokenizer, replies):
        self.tokenizer, self.replies, self.contexts = tokenizer, list(replies), []

    def __call__(self, context, sampling, on_done, first):
        assert first == bool(self.contexts)
        reply = self.replies.pop(0)
        if isinstance(reply, EngineError):
            raise reply
        self.contexts.append(context.tolist())
        ids = np.array(self.tokenizer.encode(reply), np.int32)[: sampling.max_tokens]
        on_done(
            Generation(0, ids, np.full(len(ids), -0.5, np.float32), np.array([[3, len(ids)]], np.int32), "eos", 0.1)
        )


def play(tokenizer, replies, task, limits=LIMITS, paused=0.0):
    """Return the episode of the first prompt, played with these replies, and the contexts of its turns.

    For `paused` seconds of it nothing can be generated.
    """
    config = Config.model_validate({"task": {"reward_workers": 0}})
    rewards, script = Rewards(task, config.task), Script(tokenizer, replies)
    episodes = Episodes(
        script, rewards, PromptRenderer(tokenizer, config.task), Stopping(tokenizer, (), ()), limits, lambda: 7
    )
    episodes.begin(0, task.prompts()[0], SAMPLING)
    episodes.paused_seconds = paused
    while not (ended := episodes.ended()):
        for scored in rewards.wait(1.0):
            episodes.told(scored)
    rewards.close()
    return ended[0], script.contexts


class Answers(GuessTask):
    """A game that answers its n-th reply with a function of n."""

    def __init__(self, turn):
        super().__init__()
        self.turn = turn

    def environment(self, prompt):
        steps = count(1)
        return SimpleNamespace(
            reset=lambda prompt: (), step=lambda reply, finished: self.turn(next(steps)), close=lambda: None
        )


@pytest.mark.parametrize(
    ("turn", "error_kind"),
    [
        (lambda n: Turn([("", "x"), ("r" * 300, "y" * 5000), *[("user", " :")] * 100]), None),
        (lambda n: Turn(reward=1e9), "environment"),
        (lambda n: Turn(parts={f"{n} {k}": 1.0 for k in range(40)}), "environment"),
    ],
    ids=["messages", "rewards", "parts"],
)
def test_whatever_an_environment_answers_its_row_is_one_that_the_buffer_stores(game, turn, error_kind):
    task = Answers(turn)
    limits = Limits(tokens=100_000, turn_tokens=40, turns=2, seconds=60.0)
    episode, _ = play(game[0], [wrong(task)] * 2, task, limits)
    assert (episode.error_kind, bool(episode.error)) == (error_kind, error_kind is not None)
    fields = {**episode.tokens()._asdict(), "reward": episode.reward, "reward_parts": episode.parts}
    ends = {"stop_reason": episode.stop_reason, "error": episode.error, "error_kind": episode.error_kind}
    message, frames = put_message([replace(make_trajectory(), **fields, **ends)])
    sent = encode_request(message, id=1, role="searcher", sender="s.1", run="", frames=frames)
    decode_request([memoryview(frame) for frame in sent])


def limited(task: Any) -> LimitedTask:
    """Return a task as it is loaded."""
    return LimitedTask(task, 0, 0)


def right(task):
    return f" {task.prompts()[0].answer}"


def wrong(task):
    return f" {int(task.prompts()[0].answer) % 7 + 1}"


@pytest.mark.parametrize(
    ("replies", "changes", "stop_reason", "reward"),
    [
        ("wr", {}, "completed", 1.0),
        ("wwww", {}, "max_turns", 0.0),
        ("wx", {}, "parse_error", 0.0),
        # Two turns and the hint between them take four tokens.
        ("www", {"tokens": 4}, "max_tokens", 0.0),
        # The hint after the second turn does not fit.
        ("www", {"tokens": 5}, "max_tokens", 0.0),
        ("wc", {}, "context_overflow", 0.0),
        ("r", {"turns": 1}, "completed", 1.0),
    ],
)
def test_an_episode_ends_for_one_of_the_documented_reasons(game, replies, changes, stop_reason, reward):
    tokenizer, _ = game
    task = GuessTask()
    texts = {"r": right(task), "w": wrong(task), "x": " lower", "c": ContextOverflow("full")}
    episode, _ = play(tokenizer, [texts[reply] for reply in replies], task, replace(LIMITS, **changes))
    assert (episode.stop_reason, episode.reward, episode.error, episode.error_kind) == (stop_reason, reward, None, None)


def fail(step: int) -> Turn:
    """Answer the first reply."""
    return {1: Turn((("user", " wrong :"),))}[step]


@pytest.mark.parametrize(
    ("task", "seconds", "stop_reason", "kind", "turns"),
    [
        (Answers(fail), 60.0, "environment_error", "environment", 2),
        (GuessTask(), 0.0, "episode_timeout", "episode_timeout", 1),
    ],
)
def test_a_failed_episode_is_an_error_and_never_a_reward(game, task, seconds, stop_reason, kind, turns):
    episode, _ = play(game[0], [wrong(task)] * 4, task, replace(LIMITS, seconds=seconds))
    assert (episode.stop_reason, episode.error_kind, episode.reward) == (stop_reason, kind, 0.0)
    assert len(episode.turns) == turns
    assert episode.error
    if kind == "episode_timeout":
        # Without the time in which nothing could be generated.
        limits = replace(LIMITS, seconds=seconds)
        assert play(game[0], [right(task)], task, limits, paused=60.0)[0].stop_reason == "completed"


def test_the_context_of_a_turn_is_what_was_sampled_and_what_was_answered(game):
    tokenizer, _ = game
    task = GuessTask()
    episode, contexts = play(tokenizer, [wrong(task), right(task)], task)
    hint = " higher :" if int(wrong(task)) < int(right(task)) else " lower :"
    texts = [task.prompts()[0].text, wrong(task), hint, right(task)]
    prompt, first, answer, second = (tokenizer.encode(text) for text in texts)
    assert contexts == [prompt, prompt + first + answer]
    row = episode.tokens()
    assert row.prompt_ids.tolist() == prompt
    assert row.response_ids.tolist() == first + answer + second
    assert row.loss_mask.tolist() == [1, 0, 0, 1]
    assert row.logprobs.tolist() == [-0.5, 0, 0, -0.5]
    assert row.version_runs.tolist() == [[3, 4]]
    assert [(turn["start"], turn["tokens"], turn["reward"]) for turn in row.turns] == [(0, 1, 0.0), (3, 1, 1.0)]
    assert row.turns[0]["messages"] == [["user", hint]]


class Delivered:
    def __init__(self):
        self.leases, self.groups = set(), []

    def submit(self, rows, lease, *, closes):
        self.groups.append(rows)


def groups_of(game, task, samples, workers, kind=Stopping, *, singly=False):
    """Return the groups that a real engine and real workers make of three visits."""
    tokenizer, directory = game
    config = Config.model_validate(
        {
            "task": {"name": "guess", "reward_workers": workers},
            "search": {"engine": "transformers", "max_turns": 4, "turn_tokens": 2},
        }
    )
    stopping, renderer = kind(tokenizer, (), [tokenizer.eos_token_id]), PromptRenderer(tokenizer, config.task)
    engine = cpu_engine(directory, stopping=stopping, max_in_flight=8)
    rewards, delivery = Rewards(task, config.task), Delivered()
    settings = Exploration(config.search, run_seed=0, searcher="s").settings
    generation = GenerationStage(engine, LoadedTask(task, renderer, stopping), task.prompts(), settings, samples)
    episodes = Episodes(generation.ask, rewards, renderer, stopping, Limits.of(config), lambda: 5)
    scoring = ScoringStage(rewards, stopping, "score", episodes, singly=singly)
    pipeline = Pipeline(generation, scoring, cast(Any, delivery))
    pipeline.submit(Visit(lease=n + 1, epoch=0, prompt_key=prompt.key) for n, prompt in enumerate(task.prompts()[:3]))
    while len(delivery.groups) < 3:
        pipeline.step(generate=pipeline.generating, wait_seconds=0.1)
    rewards.close()
    return delivery.groups


class Undecodable(Stopping):
    def scored_text(self, tokens):
        raise IndexError("no such token")

    whole_text = scored_text


class Closed(GuessTask):
    def environment(self, prompt):
        raise OSError("no board left")


class Endless(GuessTask):
    """A prompt that leaves no room for a reply."""

    def _prompt(self, key):
        return replace(super()._prompt(key), text="guess" + " 1" * 100)


@pytest.mark.parametrize(
    ("task", "stopping", "kind", "version"),
    [(GuessTask(), Undecodable, "decoding", 0), (Closed(), Stopping, "environment", 5)],
)
def test_an_episode_without_a_text_or_a_turn_is_a_row_of_the_weights_that_served(game, task, stopping, kind, version):
    for rows in groups_of(game, task, 2, 0, stopping):
        assert [(row.error_kind, row.version_runs[0, 0]) for row in rows] == [(kind, version)] * 2
        assert all(row.text in (None, "") for row in rows)


def test_episodes_that_never_begin_end_the_searcher(game, monkeypatch):
    monkeypatch.setattr("tba.searcher.pipeline._MAX_FAILURES_IN_A_ROW", 3)
    with pytest.raises(
        EngineError, match=r"^3 rollouts in a row failed, the last one: not generated: the prompt leaves"
    ):
        groups_of(game, Endless(), 2, 0)


def test_the_text_of_a_prompt_with_an_environment_is_a_message_and_token_ids_are_refused():
    class Ids(GuessTask):
        def _prompt(self, key):
            return Prompt(key, ids=[1, 2], answer="1")

    (prompt, *_) = limited(GuessTask()).prompts()
    assert prompt.messages == (("user", prompt.text),)
    with pytest.raises(TaskError, match="the prompt '0' has token ids and an environment: use a text"):
        limited(Ids()).prompts()


def test_each_recorded_log_probability_is_that_of_a_forward_pass_over_the_row(game):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(game[1], dtype="float32")
    rows = [row for group in groups_of(game, GuessTask(), 8, workers=1) for row in group]
    assert max(len(row.turns) for row in rows) == 4
    for row in rows:
        expected = logprobs_of(model, row.prompt_ids, row.response_ids)
        assert np.allclose(row.logprobs, expected * row.loss_mask, atol=1e-4)


@pytest.mark.parametrize("singly", [False, True])
def test_a_group_without_three_quarters_of_its_episodes_is_not_trained_on(game, singly):
    class Few(GuessTask):
        count = 0

        def environment(self, prompt):
            self.count += 1
            if self.count % 3 == 0:
                raise OSError("no board left")
            return super().environment(prompt)

    for rows in groups_of(game, Few(), 3, workers=0, singly=singly):
        kinds = sorted(row.error_kind for row in rows)
        assert kinds == ["environment", "group", "group"]
        reasons = {row.error for row in rows if row.error_kind == "group"}
        assert reasons == {"not trained on: 1 of the 3 episodes of its group failed"}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("47*38", "1786"),
        ("-3+4*5", "17"),
        ("2**9", "error"),
        ("1/2", "error"),
        ("__import__('os')", "error"),
        ("9" * 13, "error"),
    ],
)
def test_the_calculator_knows_sums_differences_and_products_alone(expression, value):
    assert calculate(expression) == value


@pytest.mark.slow
def test_the_warm_start_of_the_calculator_imitates_its_episodes(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    prepare = runpy.run_path(str(ROOT / "examples/calculator/prepare.py"))
    tokenizer = prepare["build_tokenizer"](prepare["TOKENS"], prepare["TOKEN"], 96)
    task, rows = CalculatorTask(), list(prepare["replies"](random.Random(0)))
    for number, prompt in enumerate(task.prompts()):
        first, second = rows[2 * number : 2 * number + 2]
        context, _, answer = second["prompt"].partition("<eos>")
        game = task.environment(prompt)
        turn = game.step(context.removeprefix(first["prompt"]), True)
        assert (first["prompt"], turn.messages, turn.done) == (prompt.text, (("user", answer),), False)
        assert [game.step(text, True).reward for text in (second["response"], f"so {prompt.answer}", "0")] == [1, 1, 0]
        assert tokenizer.decode(tokenizer(second["prompt"])["input_ids"]) == second["prompt"]
    calls = sum(row["response"].startswith("calc") for row in rows)
    assert calls == pytest.approx(0.15 * len(task.prompts()), rel=0.2)
