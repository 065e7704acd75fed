"""The task's rewards, computed in worker processes, so that none of them can stall or end the searcher."""

from tba.common.config import TaskSection
from tba.common.errors import TaskError, WorkerLost
from tba.searcher.scoring.scoring import Item, Scored, failed, score
from tba.searcher.scoring.worker_pool import PoolSettings, Result, WorkerPool
from tba.searcher.tasks.task import Reward, Task

# Large enough that a message costs little per item, small enough that all workers get some.
_BATCH = 32
# Failed starts in a row, with pauses of 1, 2, 4 and 8 s between them.
_MAX_STARTS = 5


class TaskScorer(WorkerPool):
    """Scores in `task.reward_workers` processes; with 0 of them, `submit` scores in this process."""

    def __init__(self, task: Task, config: TaskSection) -> None:
        self._task = task
        self._config = config
        self._scored: list[Scored] = []
        super().__init__(
            PoolSettings(
                name="reward worker",
                section="task",
                module="tba.searcher.scoring.task_worker",
                settings={"task": config.model_dump(mode="json"), "memory_mib": config.reward_memory_mib},
                workers=config.reward_workers,
                batch=_BATCH,
                load_seconds=config.load_seconds,
                work_seconds=config.reward_seconds,
            )
        )

    def submit(self, item: Item) -> None:
        """Queue a response."""
        if self._config.reward_workers:
            super().submit(item)
        else:
            reward, error = score(self._task, item.prompt, item.text, item.finished)
            self._scored.append(Scored(item.ticket, item.text, reward, error))

    def done(self) -> list[Scored]:
        """The responses scored since the last call. Never blocks.

        Raises TaskError if the task does not load in a worker, WorkerLost if no worker lives until it has loaded it.
        """
        scored, self._scored = self._scored, []
        scored += [_scored(result) for result in self.poll()]
        if self.refusal:
            raise TaskError(self.refusal)
        if self.failed_starts >= _MAX_STARTS:
            raise WorkerLost(
                f"task {self._config.name}: {self.trouble} while it loaded the task, {_MAX_STARTS} times in a row; "
                "see its output above"
            )
        return scored


def _scored(result: Result) -> Scored:
    if result.error is not None:
        return Scored(result.item.ticket, result.item.text, *failed(result.error))
    total, parts, error = result.value
    return Scored(result.item.ticket, result.item.text, Reward(total, parts), error)
