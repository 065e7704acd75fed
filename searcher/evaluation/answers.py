"""Answers to prompts, by the stages of a searcher: one that cannot be generated or scored is a counted error."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tba.common.config import Config
from tba.common.wire.messages import MAX_RESPONSES, MAX_STORED_TEXT, Visit
from tba.common.wire.trajectory import Trajectory
from tba.searcher.build import LoadedTask
from tba.searcher.engines.engine import Engine, SamplingSettings
from tba.searcher.episodes import Episodes, Limits
from tba.searcher.pipeline import GenerationStage, ScoringStage
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import storable
from tba.searcher.tasks.task import Prompt, least_reward_for

_WAIT_SECONDS = 1.0
# Limit of the texts of an evaluation, which must fit the header of a message.
_STORED_BYTES = 8 << 20


class Question(NamedTuple):
    """A request for one answer to the prompt with this key."""

    key: str
    sampling: SamplingSettings


class Answering:
    """Asks the same questions of one snapshot after the other. Responses that are cut off are scored as they are."""

    def __init__(
        self,
        config: Config,
        loaded: LoadedTask,
        prompts: Sequence[Prompt],
        engine: Engine,
        rewards: Rewards,
        questions: Sequence[Question],
    ) -> None:
        task, renderer, stopping = loaded
        self._task, self._engine, self.questions = task, engine, questions
        # The lease of a visit is the number of its question, from 1 on.
        self._visits = [Visit(lease=n, epoch=0, prompt_key=one.key) for n, one in enumerate(questions, 1)]
        self._generation = GenerationStage(
            engine, task, prompts, renderer, lambda visit, _: questions[visit.lease - 1].sampling, samples=1
        )
        limits, version = Limits.of(config), lambda: engine.weights_version
        episodes = Episodes(self._generation.ask, rewards, renderer, stopping, limits, version)
        self._scoring = ScoringStage(rewards, stopping, "score", episodes)

    def answer(self, go_on: Callable[[int], bool] = lambda _: True) -> list[Trajectory] | None:
        """Return the answers in the order of the questions, as rows; those with an error have their least reward.

        `go_on` is called with the number of finished answers; returns None if it returned False.
        """
        waiting, rows = deque(self._visits), dict[int, Trajectory]()
        while len(rows) < len(self._visits):
            # One load in the engine and one behind it, as in a searcher.
            while waiting and self._has_room:
                for episode in self._generation.submit(waiting.popleft()):
                    self._scoring.play(*episode)
            for response in self._generation.done():
                self._scoring.submit(response)
            is_busy = self._generation.waiting or (waiting and self._has_room)
            for group in self._scoring.done(0.0 if is_busy else _WAIT_SECONDS):
                (row,) = group.done
                if row.error is not None:
                    # Where every reward is negative, 0 would be better than any answer.
                    row = replace(row, reward=least_reward_for(self._task, group.prompt), reward_parts={})
                rows[row.lease] = row
            if not go_on(len(rows)):
                return None
        return [rows[visit.lease] for visit in self._visits]

    @property
    def _has_room(self) -> bool:
        load = max(self._engine.in_flight, len(self._scoring.episodes))
        return load < 2 * self._engine.max_in_flight


def for_storage(texts: Sequence[str], prompts: Sequence[Prompt], answers: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """Return the first responses as fields of `HeldOutResponse`: one per text of a prompt, as many as there is room."""
    found, size = [], 0
    for text, prompt, one in zip(texts[:MAX_RESPONSES], prompts, answers, strict=False):
        # What a response comes to is at its end.
        cut = [storable(part[-MAX_STORED_TEXT:]) for part in (text, prompt.answer, one.text or "")]
        size += sum(len(part.encode()) for part in cut)
        if size > _STORED_BYTES:
            break
        fields = dict(zip(("prompt_text", "answer", "response"), cut, strict=True))
        score = {"reward": one.reward, "reward_parts": one.reward_parts, "error": one.error}
        found.append({"prompt": prompt.key, **fields, **score})
    return found
