"""A worker that scores with the task: `python -m tba.searcher.scoring.task_worker FD`, started by `task_scorer.py`.

Its messages are those of `worker_pool.py`. Each result is sent as soon as it is known: in order, so that a worker that
dies is known to have died of its first item without a result, or with `begin` if the task scores several at a time. It
imports neither torch nor vllm unless the task does.
"""

import asyncio
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

from tba.common.config import TaskSection
from tba.common.errors import TaskError, TbaError
from tba.common.log import configure
from tba.common.system.process import SAFE_PATH
from tba.searcher.scoring.scoring import score, score_later, storable
from tba.searcher.scoring.worker_process import Connection
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt, Reward, Task, scores_concurrently


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
