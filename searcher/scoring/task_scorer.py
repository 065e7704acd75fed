"""The task's rewards, computed in worker processes, so that none of them can stall or end the searcher."""

from tba.common.config import TaskSection
from tba.common.errors import TaskError, WorkerLost
from tba.common.log import get_logger
from tba.searcher.scoring.scoring import Item, Scored, failed, score
from tba.searcher.scoring.worker_pool import LOAD_SECONDS, PoolSettings, Result, WorkerPool
from tba.searcher.tasks.task import Reward, Task, least_reward, name_of, scores_concurrently

log = get_logger(__name__)

# Large enough that a message costs little per item, small enough that all workers get some.
_BATCH = 32
# Failed starts in a row, with pauses of 1, 2, 4 and 8 s between them.
_MAX_STARTS = 5
# A worker ends a coroutine itself after task.reward_seconds, and is replaced if it has not done so this much later.
_GRACE_SECONDS = 5.0


class TaskScorer(WorkerPool):
    """Scores in `task.reward_workers` processes; with 0 of them, `submit` scores in this process."""

    def __init__(self, task: Task, config: TaskSection) -> None:
        self._task = task
        self._config = config
        self._scored: list[Scored] = []
        self._least = least_reward(task)
        self._logged_least = False
        concurrent = scores_concurrently(task)
        super().__init__(
            PoolSettings(
                name="reward worker",
                module="tba.searcher.scoring.task_worker",
                settings=config.model_dump(mode="json"),
                workers=config.reward_workers,
                batch=max(_BATCH, config.reward_concurrency) if concurrent else _BATCH,
                load_seconds=LOAD_SECONDS,
                work_seconds=config.reward_seconds + (_GRACE_SECONDS if concurrent else 0.0),
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
        scored += [self._scored_by(result) for result in self.poll()]
        self._check_least(scored)
        if self.refusal:
            raise TaskError(self.refusal)
        if self.failed_starts >= _MAX_STARTS:
            raise WorkerLost(
                f"task {self._config.name}: {self.trouble} while it loaded the task, {_MAX_STARTS} times in a row; "
                "see its output above"
            )
        return scored

    def _scored_by(self, result: Result) -> Scored:
        item = result.item
        if result.error is not None:
            name = name_of(self._task, item.prompt)
            log.warning("response not scored", task=name, prompt=item.prompt.key, reason=result.error)
            return Scored(item.ticket, item.text, *failed(result.error, name), interrupted=True)
        total, parts, error, timed_out = result.value
        self.timeouts += timed_out
        return Scored(item.ticket, item.text, Reward(total, parts), error, interrupted=timed_out)

    def _check_least(self, scored: list[Scored]) -> None:
        """Log once that a reward is lower than the task says."""
        low = [one for one in scored if one.error is None and one.reward.total < self._least]
        if low and not self._logged_least:
            self._logged_least = True
            log.warning(
                "a reward is below the task's least_reward, which objective.reward_floor may refer to: correct it",
                task=self._task.name,
                reward=low[0].reward.total,
                least_reward=self._least,
            )
