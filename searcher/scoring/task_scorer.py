"""The task's rewards and environments, in worker processes, so that none of them can stall or end the searcher.

`python -m tba.searcher.scoring.task_scorer FD` is a worker. Its messages are those of `worker_pool.py`. Each result is
sent as soon as it is known: in order, so that a worker that dies is known to have died of its first item without a
result, or with `begin` if the task scores several at a time or has environments. It imports neither torch nor vllm
unless the task does. After an environment has run out of memory a worker retires, so that its other episodes go on
elsewhere.
"""

import asyncio
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tba.common.config import TaskSection
from tba.common.errors import TaskError, TbaError, WorkerLost
from tba.common.log import configure, get_logger
from tba.common.system.process import SAFE_PATH
from tba.searcher.scoring.player import Player
from tba.searcher.scoring.scoring import Answer, Item, Scored, event_loop, failed, score, storable
from tba.searcher.scoring.worker_pool import LOAD_SECONDS, Connection, PoolSettings, Result, WorkerPool
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import (
    Prompt,
    Reward,
    Task,
    Turn,
    has_environment,
    least_reward,
    name_of,
    scores_concurrently,
)

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
        # The digests of the answers to each episode.
        self.told: dict[int, list[bytes]] = defaultdict(list)
        self._player = Player(task)
        together = scores_concurrently(task) or has_environment(task)
        super().__init__(
            PoolSettings(
                name="reward worker",
                module="tba.searcher.scoring.task_scorer",
                settings=config.model_dump(mode="json"),
                workers=config.reward_workers,
                batch=max(_BATCH, config.reward_concurrency) if together else _BATCH,
                load_seconds=LOAD_SECONDS,
                work_seconds=config.reward_seconds,
            )
        )

    def submit(self, item: Item) -> None:
        """Queue a response, or a call of an environment."""
        if self._config.reward_workers:
            super().submit(item)
            return
        if item.call is None:
            answer = Answer.of(*score(self._task, item.prompt, item.text, item.finished))
        else:
            answer = event_loop().run(self._player.answer(*item.message(held=bool(self.told[item.ticket]))))
        self._scored.append(self._scored_by(item, answer))

    def done(self) -> list[Scored]:
        """The responses scored since the last call. Never blocks.

        Raises TaskError if the task does not load in a worker, WorkerLost if no worker lives until it has loaded it.
        """
        scored, self._scored = self._scored, []
        scored += [self._scored_by(result.item, self._answer_of(result)) for result in self.poll()]
        self._check_least(scored)
        if self.refusal:
            raise TaskError(self.refusal)
        if self.failed_starts >= _MAX_STARTS:
            raise WorkerLost(
                f"task {self._config.name}: {self.last_error} while it loaded the task, {_MAX_STARTS} times in a row; "
                "see its output above"
            )
        return scored

    def _answer_of(self, result: Result) -> Answer:
        """Return what the worker answered, or what becomes of an item that its worker did not survive."""
        item = result.item
        if result.error is None:
            answer = Answer(*result.value)
            self.timeouts += answer.kind in ("reward_timeout", "turn_timeout")
            return answer
        name = name_of(self._task, item.prompt)
        log.warning("response not scored", task=name, prompt=item.prompt.key, reason=result.error)
        what, late_kind = ("reward", "reward_timeout") if item.call is None else ("environment", "turn_timeout")
        kind: Any = late_kind if result.late else "worker"
        return Answer.of(*failed(result.error, result.doing or f"{what} of {name}"), kind)

    def _scored_by(self, item: Item, answer: Answer) -> Scored:
        """Return the result of an item, and forget its episode if that is over."""
        reward, call = Reward(answer.reward, answer.parts), item.call
        if call is None:
            return Scored(item.ticket, item.text, reward, answer.error, answer.kind)
        if answer.done or call.last or call.close:
            del self.told[item.ticket]
            self.release(item.ticket)
        else:
            self.told[item.ticket].append(answer.digest)
        # Lists, if they come from a worker.
        messages: Any = tuple(map(tuple, answer.messages))
        turn = None if answer.error else Turn(messages, *answer[1:4])
        return Scored(item.ticket, None, reward, answer.error, answer.kind, turn)

    def _check_least(self, scored: list[Scored]) -> None:
        """Log once that a reward is lower than the task says."""
        # The rewards of turns add up to that of an episode.
        low = [one for one in scored if one.error is None and one.turn is None and one.reward.total < self._least]
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
    if not (scores_concurrently(task) or has_environment(task)):
        for batch in connection.messages:
            worker.score_in_order(batch)
        return
    # One event loop for all batches: a task may keep connections, which belong to a loop.
    with asyncio.Runner() as runner:
        for batch in connection.messages:
            runner.run(worker.answer_together(batch))


class _Worker:
    """Answers batches of `Item.message`."""

    def __init__(self, connection: Connection, task: Task, config: TaskSection) -> None:
        self._connection = connection
        self._task = task
        self._config = config
        self._own_pid = os.getpid()
        self._player = Player(task, config.reward_seconds, config.reward_memory_mib, self._begin)
        # By ticket: the origin of what is called, and whether it is awaited.
        self._running: dict[int, tuple[str, bool]] = {}

    def score_in_order(self, batch: Sequence[Any]) -> None:
        """Score one response after the other, without an event loop, so that a scorer may run its own."""
        for ticket, fields, response, finished in batch:
            scored = score(self._task, Prompt(*fields), response, finished, self._config.reward_memory_mib)
            self._send(["results", [[ticket, Answer.of(*scored), None]]])

    async def answer_together(self, batch: Sequence[Any]) -> None:
        """Answer up to `task.reward_concurrency` items at a time, unless a method does not wait."""
        free = asyncio.Semaphore(self._config.reward_concurrency)

        async def answer(ticket: int, *asked: Any) -> None:
            async with free:
                answer = await self._player.answer(ticket, *asked)
                self._running.pop(ticket, None)
                self._send(["results", [[ticket, answer, None]]])
                if self._player.out_of_memory:
                    self._send(["retire"])
                    os._exit(0)
                if self._running:
                    self._send_running()

        await asyncio.gather(*(answer(*item) for item in batch))

    def _begin(self, ticket: int, origin: str, awaits: bool) -> None:
        self._running[ticket] = origin, awaits
        self._send_running()

    def _send_running(self) -> None:
        origins, awaits = zip(*self._running.values(), strict=True)
        grace = _GRACE_SECONDS if any(awaits) else 0.0
        self._send(["begin", [*self._running], origins, self._config.reward_seconds + grace])

    def _send(self, message: Sequence[Any]) -> None:
        # If the task forked, this may be the child, which must not reply as well.
        if os.getpid() != self._own_pid:
            os._exit(0)
        self._connection.send(message)


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
