"""Answers to prompts, generated and scored as in a searcher: a scorer or a prompt that fails is a counted error."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tba.common.errors import EngineError
from tba.common.log import get_logger
from tba.common.wire.messages import MAX_RESPONSES, MAX_STORED_TEXT
from tba.common.wire.trajectory import STOP_EOS, Int32
from tba.searcher.engines.engine import Engine, Generation, Requests, SamplingSettings
from tba.searcher.episodes import CUT_OFF, Ask, Episode, Episodes
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import failed, storable
from tba.searcher.tasks.task import Prompt, Reward

log = get_logger(__name__)

_WAIT_SECONDS = 1.0
# Failed answers that are logged one by one; the evaluation counts all of them.
_MAX_LOGGED = 20
# Limit of the texts of an evaluation, which must fit the header of a message.
_STORED_BYTES = 8 << 20

# Called with the number of finished answers. False ends the evaluation without a result.
Continue = Callable[[int], bool]
# The text of a response that is scored, from its token ids.
Decode = Callable[[list[int]], str]
# The reward of a failed answer to a prompt.
Least = Callable[[Prompt], float]


@dataclass(frozen=True, slots=True)
class Question:
    """A request for one answer to the prompt at this position; `ids` are its tokens, none if it has an environment."""

    prompt: int
    ids: Int32
    sampling: SamplingSettings


@dataclass(slots=True)
class Answer:
    """One answer. With an `error` it could not be generated or scored, and has the least reward of its task.

    `logprob` is the sum over its tokens, in nats, under the distribution that they were sampled from. Of an `episode`
    its tokens are those that were sampled, and the text is all of it.
    """

    question: Question
    response_ids: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    logprob: float = 0.0
    unfinished: bool = False
    text: str = ""
    reward: Reward = field(default_factory=lambda: Reward(0.0, {}))
    error: str | None = None
    episode: Episode | None = None


def answer(
    engine: Engine,
    rewards: Rewards,
    decode: Decode,
    prompts: Sequence[Prompt],
    questions: Sequence[Question],
    go_on: Continue = lambda _: True,
    least: Least = lambda _: 0.0,
    play: Callable[[Ask], Episodes] | None = None,
) -> list[Answer] | None:
    """Return the answers in the order of the questions, None if `go_on` returned False.

    `play` makes what plays the episodes of prompts with an environment, if there are any.
    """
    answers = [Answer(question) for question in questions]
    answering = _Answering(engine, rewards, decode, prompts, least, answers, play)
    while answering.finished < len(answers):
        answering.step()
        if not go_on(answering.finished):
            return None
    if answering.failures > _MAX_LOGGED:
        log.warning("further responses failed", responses=answering.failures - _MAX_LOGGED)
    return answers


def for_storage(texts: Sequence[str], prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the first responses as fields of `HeldOutResponse`: one per text of a prompt, as many as there is room."""
    found, size = [], 0
    for text, prompt, one in zip(texts[:MAX_RESPONSES], prompts, answers, strict=False):
        # What a response comes to is at its end.
        cut = [storable(part[-MAX_STORED_TEXT:]) for part in (text, prompt.answer, one.text)]
        size += sum(len(part.encode()) for part in cut)
        if size > _STORED_BYTES:
            break
        fields = dict(zip(("prompt_text", "answer", "response"), cut, strict=True))
        score = {"reward": one.reward.total, "reward_parts": one.reward.parts, "error": one.error}
        found.append({"prompt": prompt.key, **fields, **score})
    return found


class _Answering:
    """Questions on their way through engine and scorer. Tickets are positions of answers."""

    def __init__(
        self,
        engine: Engine,
        rewards: Rewards,
        decode: Decode,
        prompts: Sequence[Prompt],
        least: Least,
        answers: list[Answer],
        play: Callable[[Ask], Episodes] | None,
    ) -> None:
        self._engine = engine
        self._rewards = rewards
        self._decode = decode
        self._prompts = prompts
        self._least = least
        self._answers = answers
        self._waiting = deque(range(len(answers)))
        self._requests = Requests(engine)
        self._episodes = play(self._requests.ask) if play is not None else None
        self.finished = 0
        self.failures = 0

    def step(self) -> None:
        """Step the engine, and collect the scores that are there."""
        # One load in the engine and one behind it, as in a searcher.
        while self._waiting and self._has_room:
            self._start(self._waiting.popleft())
        self._requests.step()
        if self._rewards.waiting:
            is_busy = self._engine.in_flight or (self._waiting and self._has_room)
            for scored in self._rewards.wait(0.0 if is_busy else _WAIT_SECONDS):
                if self._episodes is not None and scored.ticket in self._episodes:
                    self._episodes.told(scored)
                else:
                    self._finish(scored.ticket, scored.reward, scored.error)
        for episode in self._episodes.ended() if self._episodes is not None else ():
            self._finish_episode(episode)

    @property
    def _has_room(self) -> bool:
        playing = len(self._episodes) if self._episodes is not None else 0
        return max(self._engine.in_flight, playing) < 2 * self._engine.max_in_flight

    def _start(self, number: int) -> None:
        question = self._answers[number].question
        if self._episodes is not None and not len(question.ids):
            self._episodes.begin(number, self._prompts[question.prompt], question.sampling)
            return
        try:
            self._requests.ask(question.ids, question.sampling, partial(self._score, number), first=False)
        except EngineError as error:
            self._finish(number, *failed(f"not generated: {error}"))

    def _finish_episode(self, episode: Episode) -> None:
        one = self._answers[episode.ticket]
        tokens = episode.tokens()
        one.episode = episode
        one.response_ids = tokens.response_ids[tokens.loss_mask != 0]
        one.logprob = float(tokens.logprobs.astype(np.float64).sum())
        one.unfinished = episode.stop_reason in CUT_OFF
        one.text = "\n".join(f"{role}: {text}" for role, text in episode.said)
        self._finish(episode.ticket, Reward(episode.reward, episode.parts), episode.error)

    def _score(self, number: int, generation: Generation) -> None:
        one = self._answers[number]
        one.response_ids = generation.response_ids
        one.logprob = float(generation.logprobs.astype(np.float64).sum())
        one.unfinished = generation.stop_reason != STOP_EOS
        try:
            one.text = storable(self._decode(generation.response_ids.tolist()))
        # The ids are of another vocabulary.
        except Exception as error:  # noqa: BLE001
            self._finish(number, *failed(f"not decoded: {type(error).__name__}: {error}"))
            return
        self._rewards.submit(number, self._prompts[one.question.prompt], one.text, not one.unfinished)

    def _finish(self, number: int, reward: Reward, error: str | None) -> None:
        one = self._answers[number]
        one.reward, one.error = reward, error
        self.finished += 1
        if error is None:
            return
        prompt = self._prompts[one.question.prompt]
        # Where every reward is negative, 0 would be better than any answer.
        one.reward = Reward(self._least(prompt), {})
        self.failures += 1
        if self.failures <= _MAX_LOGGED:
            log.warning("response failed", prompt=prompt.key, reason=error)
