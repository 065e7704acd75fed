"""A smaller version of another task, for quick runs and tests."""

from collections.abc import Sequence

from tba.searcher.tasks.task import Prompt, Reward, Task


class LimitedTask:
    """The first `limit` training and `held_out_limit` held-out prompts of a task; 0 is all."""

    def __init__(self, task: Task, limit: int, held_out_limit: int) -> None:
        self.name = task.name
        self._task = task
        self._limit = limit or None
        self._held_out_limit = held_out_limit or None

    def prompts(self) -> Sequence[Prompt]:
        return self._task.prompts()[: self._limit]

    def held_out(self) -> Sequence[Prompt]:
        return self._task.held_out()[: self._held_out_limit]

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        return self._task.score(prompt, response, finished)
