"""The task's rewards, computed in worker processes, so that none of them can stall or end the searcher.

`python -m tba.searcher.scoring.task_scorer FD` is a worker. Its messages are those of `worker_pool.py`. Each result is
sent as soon as it is known: in order, so that a worker that dies is known to have died of its first item without a
result, or with `begin` if the task scores several at a time. It imports neither torch nor vllm unless the task does.
"""

import asyncio
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

from tba.common.config import TaskSection
from tba.common.errors import TaskError, TbaError, WorkerLost
from tba.common.log import configure, get_logger
from tba.common.system.process import SAFE_PATH
from tba.common.wire.fields import ErrorKind
from tba.searcher.scoring.scoring import Item, Scored, failed, score, score_later, storable, timed_out
from tba.searcher.scoring.worker_pool import LOAD_SECONDS, Connection, PoolSettings, Result, WorkerPool
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt, Reward, Task, least_reward, name_of, scores_concurrently

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
                module="tba.searcher.scoring.task_scorer",
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
            kind: ErrorKind | None = "reward" if error is not None else None
            self._scored.append(Scored(item.ticket, item.text, reward, error, error_kind=kind))

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
                f"task {self._config.name}: {self.last_error} while it loaded the task, {_MAX_STARTS} times in a row; "
                "see its output above"
            )
        return scored

    def _scored_by(self, result: Result) -> Scored:
        item = result.item
        if result.error is not None:
            name = name_of(self._task, item.prompt)
            log.warning("response not scored", task=name, prompt=item.prompt.key, reason=result.error)
            late = result.error == timed_out(self.settings.work_seconds)
            return Scored(
                item.ticket, item.text, *failed(result.error, name), True, "reward_timeout" if late else "worker"
            )
        total, parts, error, is_late = result.value
        self.timeouts += is_late
        kind: ErrorKind | None = None if error is None else "reward_timeout" if is_late else "reward"
        return Scored(item.ticket, item.text, Reward(total, parts), error, is_late, kind)

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


def main() -> None:
    """Serve until the searcher closes the socket."""
    connection = Connection()
    # A program that a reward starts may import its neighbours.
    os.environ.pop(SAFE_PATH, None)
    configure("reward", level="WARNING")
    settings = next(connection.messages)
    try:
        config = TaskSection.model_validate(settings)
        # Private memory only: a healthy process can have an address space many times larger than what it uses.
        resource.setrlimit(resource.RLIMIT_DATA, (config.reward_memory_mib << 20, config.reward_memory_mib << 20))
        task = _load(config)
    except TbaError as refusal:
        connection.send(["refused", f"in a reward worker: {storable(str(refusal))}"])
        sys.exit(1)
    worker = _Worker(connection, task, config)
    connection.send(["ready"])
    if not scores_concurrently(task):
        for batch in connection.messages:
            worker.score_in_order(batch)
        return
    # One event loop for all batches: a task may keep connections, which belong to a loop.
    with asyncio.Runner() as runner:
        for batch in connection.messages:
            runner.run(worker.score_together(batch))


class _Worker:
    """Scores batches of (ticket, fields of the prompt, response, finished)."""

    def __init__(self, connection: Connection, task: Task, config: TaskSection) -> None:
        self._connection = connection
        self._task = task
        self._config = config
        self._own_pid = os.getpid()
        self._running: list[int] = []

    def score_in_order(self, batch: Sequence[Any]) -> None:
        """Score one response after the other."""
        for ticket, fields, response, finished in batch:
            memory_mib = self._config.reward_memory_mib
            self._send(ticket, *score(self._task, Prompt(*fields), response, finished, memory_mib))

    async def score_together(self, batch: Sequence[Any]) -> None:
        """Score up to `task.reward_concurrency` responses at a time."""
        free = asyncio.Semaphore(self._config.reward_concurrency)

        async def score_one(ticket: int, fields: Sequence[Any], response: str, finished: bool) -> None:
            async with free:
                self._running.append(ticket)
                self._connection.send(["begin", self._running])
                outcome = await score_later(
                    self._task,
                    Prompt(*fields),
                    response,
                    finished,
                    self._config.reward_seconds,
                    self._config.reward_memory_mib,
                )
                self._running.remove(ticket)
                self._send(ticket, *outcome)
                if self._running:
                    self._connection.send(["begin", self._running])

        await asyncio.gather(*(score_one(*item) for item in batch))

    def _send(self, ticket: int, reward: Reward, error: str | None, timed_out: bool = False) -> None:
        # If the reward forked, this may be the child, which must not reply as well.
        if os.getpid() != self._own_pid:
            os._exit(0)
        self._connection.send(["results", [[ticket, [reward.total, reward.parts, error, timed_out], None]]])


def _load(config: TaskSection) -> Task:
    """Load the task. Raises TbaError, also if the limit leaves too little memory: another start has no more."""
    try:
        return load_task(config)
    except MemoryError:
        # The sentence is formatted after this block, when the memory that the task had allocated is free again.
        pass
    raise TaskError(
        f"task {config.name} does not load in task.reward_memory_mib = {config.reward_memory_mib}: out of memory; "
        "raise it"
    )


if __name__ == "__main__":
    main()
