"""The reward of a response: the task's, and beside it the reward model's where there is one.

submit ──┬──► task's workers ──┬──► both are there ──► done
         └──► reward model ────┘
"""

import multiprocessing.connection
import time
from dataclasses import dataclass

from tba.common.config import TaskSection
from tba.common.wire import LARGEST_REWARD
from tba.searcher.model_rewards import ModelScore, ModelScorer
from tba.searcher.scores import Item, Scored
from tba.searcher.task_rewards import TaskScorer
from tba.searcher.tasks.scoring import failed
from tba.searcher.tasks.task import Prompt, Reward, Task

MODEL_PART = "reward_model"  # the part of the reward with the model's logit


@dataclass(slots=True)
class _Open:
    item: Item
    by_task: Scored | None = None
    by_model: ModelScore | None = None


class Rewards:
    """Scores responses in other processes; `done` has those that are scored.

    `model` is closed with it. Start it in the main thread and before the engine.
    """

    def __init__(self, task: Task, config: TaskSection, model: ModelScorer | None = None) -> None:
        self._task = TaskScorer(task, config)
        self._model = model
        self._open: dict[int, _Open] = {}
        self.errors = 0
        self.latency_seconds = 0.0

    @property
    def waiting(self) -> int:
        """Responses submitted and not yet returned by `done`."""
        return len(self._open)

    @property
    def timeouts(self) -> int:
        """How often a reward took too long."""
        return self._task.timeouts + (self._model.timeouts if self._model is not None else 0)

    def submit(self, ticket: int, prompt: Prompt, text: str, finished: bool) -> None:
        """Queue a response; `text` has no lone surrogates."""
        item = Item(ticket, prompt, text, finished, time.monotonic())
        self._open[ticket] = _Open(item)
        self._task.submit(item)
        if self._model is not None:
            self._model.submit(item)

    def done(self) -> list[Scored]:
        """What is scored by now. Never blocks. Raises TaskError and WorkerLost as `TaskScorer.done`."""
        came: dict[int, None] = {}  # tickets in order, each once
        for scored in self._task.done():
            self._open[scored.ticket].by_task = scored
            came[scored.ticket] = None
        for score in self._model.done() if self._model is not None else ():
            self._open[score.ticket].by_model = score
            came[score.ticket] = None
        return [answer for ticket in came if (answer := self._answer(ticket)) is not None]

    def wait(self, seconds: float) -> list[Scored]:
        """Like `done`, after something came from a worker or `seconds` passed."""
        channels = [*self._task.channels, *(self._model.channels if self._model is not None else ())]
        if channels:
            multiprocessing.connection.wait(channels, seconds)
        return self.done()

    def close(self) -> None:
        """End the workers and what they started."""
        self._task.close()
        if self._model is not None:
            self._model.close()

    def _answer(self, ticket: int) -> Scored | None:
        """The whole reward of a response, once all of it is there."""
        one = self._open[ticket]
        if one.by_task is None or (self._model is not None and one.by_model is None):
            return None
        del self._open[ticket]
        answer = one.by_task
        if self._model is not None and one.by_model is not None and answer.error is None:
            answer = _sum(answer, one.by_model, self._model.config.weight)
        self.latency_seconds = time.monotonic() - one.item.submitted_at
        self.errors += answer.error is not None
        return answer


def _sum(scored: Scored, judged: ModelScore, weight: float) -> Scored:
    if judged.error is not None:
        return Scored(scored.ticket, scored.text, *failed(f"model: {judged.error}"))
    total, parts = scored.reward.total + weight * judged.score, {**scored.reward.parts, MODEL_PART: judged.score}
    if not abs(total) <= LARGEST_REWARD:
        return Scored(scored.ticket, scored.text, *failed(f"model: the reward would be {total}"))
    return Scored(scored.ticket, scored.text, Reward(total, parts), None)
