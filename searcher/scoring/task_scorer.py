"""The task's rewards and environments, in worker processes, so that none of them can stall or end the searcher.

`python -m tba.searcher.scoring.task_scorer FD` is a worker. Its messages are those of `worker_pool.py`. Each result is
sent as soon as it is known: in order, so that a worker that dies is known to have died of its first item without a
result, or with `begin` if the task scores several at a time or has environments. It imports neither torch nor vllm
unless the task does.
"""

import asyncio
import contextlib
import inspect
import math
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from tba.common.config import TaskSection
from tba.common.data_files import require_unicode
from tba.common.errors import TaskError, TbaError, WorkerLost
from tba.common.log import configure, get_logger
from tba.common.rendering import message_of
from tba.common.system.process import SAFE_PATH
from tba.common.wire.fields import MAX_REWARD_PARTS, ErrorKind
from tba.searcher.scoring import scoring
from tba.searcher.scoring.scoring import Call, Item, Outcome, Scored
from tba.searcher.scoring.worker_pool import LOAD_SECONDS, Connection, PoolSettings, Result, WorkerPool
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt, Reward, Task, Turn, has_environment, is_random, name_of, scores_concurrently

log = get_logger(__name__)

# Large enough that a message costs little per item, small enough that all workers get some.
_BATCH = 32
# Failed starts in a row, with pauses of 1, 2, 4 and 8 s between them.
_MAX_STARTS = 5
# A worker ends a coroutine itself after task.reward_seconds, and is replaced if it has not done so this much later.
_GRACE_SECONDS = 5.0
# Of the messages of one answer, in UTF-8.
MAX_ANSWER_BYTES = 1 << 20
_RANDOM = "its worker was replaced, and a random environment cannot be repeated"
_DIFFERENT = (
    "another answer than before when the episode was repeated in another worker: the environment is not a function of "
    "prompt key and replies; seed it with the key, or set random = True"
)


class _Failed(Exception):
    """A method of the task failed, for this reason."""

    def __init__(self, origin: str, reason: str, kind: ErrorKind) -> None:
        super().__init__(reason)
        self.outcome: Outcome = None, scoring.failed(reason, origin)[1], kind


class Player:
    """Answers an `Item.message`; many may be under way, one of each episode. Holds environments by ticket.

    What it returns is within the limits, whatever the task returned. A coroutine ends after `seconds`; to limit other
    methods is the business of the process that watches this one.
    """

    def __init__(self, task: Task, seconds: float = math.inf, memory_mib: int | None = None) -> None:
        # An environment has been; the process should answer nothing more.
        self._out_of_memory = False
        # Freed then, to send the error with: the packer alone takes 1 MiB.
        self._reserve = bytearray(4 << 20)
        self._task: Any = task
        self._seconds = seconds
        self._memory_mib = memory_mib
        self._held: dict[int, tuple[Prompt, Any]] = {}

    def _begin(self, ticket: int, origin: str, *, awaits: bool) -> None:
        """Note that a method is called, and once more if it has to be awaited."""

    async def answer(self, ticket: int, fields: Sequence[Any] | None, *asked: Any) -> Outcome:
        """Score a response or call an environment, whose prompt is not given if it is held here."""
        prompt = self._held[ticket][0] if fields is None else Prompt(*fields)
        try:
            if isinstance(asked[0], str):
                return await self._call(ticket, prompt, "", lambda: self._task.score(prompt, *asked)), None, None
            return await self._play(ticket, prompt, Call(*asked)), None, None
        except _Failed as failure:
            # The first error is the one to report.
            with contextlib.suppress(_Failed):
                await self._close(ticket)
            return failure.outcome

    async def _play(self, ticket: int, prompt: Prompt, asked: Call) -> Turn:
        call, replies = partial(self._call, ticket, prompt), () if asked.close else asked.replies
        answer = _checked(Turn())
        # Attributes are looked up in the call: an environment may lack a method.
        if not asked.close and ticket not in self._held:
            if replies and is_random(self._task, prompt):
                raise _Failed(scoring.origin_of(self._task, prompt, "step()"), _RANDOM, "worker")
            self._held[ticket] = prompt, await call("environment()", lambda: self._task.environment(prompt))
            answer = await call("reset()", lambda: self._held[ticket][1].reset(prompt))
        for number, reply in enumerate(replies):
            if asked.told and scoring.digest(answer) != asked.told[number]:
                method = "step()" if number else "reset()"
                raise _Failed(scoring.origin_of(self._task, prompt, method), _DIFFERENT, "environment")
            answer = await call("step()", lambda: self._held[ticket][1].step(*reply))  # noqa: B023
        if asked.close or asked.last or answer.done:
            await self._close(ticket)
        return answer

    async def _close(self, ticket: int) -> None:
        if ticket in self._held:
            prompt, environment = self._held.pop(ticket)
            await self._call(ticket, prompt, "close()", lambda: environment.close())  # noqa: PLW0108

    async def _call(self, ticket: int, prompt: Prompt, method: str, function: Callable[[], Any]) -> Any:
        """Call a method of an environment, or without a name `score`, and check what it returns. Raises _Failed."""
        origin = scoring.origin_of(self._task, prompt, method)
        self._begin(ticket, origin, awaits=False)
        end = time.monotonic() + self._seconds
        try:
            found = function()
            if inspect.isawaitable(found):
                self._begin(ticket, origin, awaits=True)
                async with asyncio.timeout(self._seconds):
                    found = await found
            # A coroutine may ignore that it is cancelled, and other methods are not.
            if time.monotonic() > end:
                raise TimeoutError
            return _CHECKS[method](found) if method in _CHECKS else found
        # A task may call sys.exit or raise KeyboardInterrupt.
        except BaseException as error:
            if isinstance(error, MemoryError):
                self._reserve.clear()
            kind: ErrorKind = "turn_timeout" if method else "reward_timeout"
            reason = scoring.timed_out(self._seconds)
            if time.monotonic() <= end:
                kind = "environment" if method else "reward"
                reason = scoring.described(error, self._task, prompt, method, self._memory_mib)
            self._out_of_memory |= bool(method) and isinstance(error, MemoryError)
            raise _Failed(origin, reason, kind) from error


def _turn_of(reward: Reward) -> Turn:
    return Turn((), reward.total, True, reward.parts)


def _checked(turn: Any) -> Turn:
    """Return what an environment answered, checked. Raises TypeError, ValueError."""
    if not isinstance(turn, Turn):
        raise TypeError(f"{type(turn).__name__} returned, not a Turn")
    answered: Any = turn.messages
    if isinstance(answered, str) or not isinstance(answered, Sequence):
        raise TypeError(f"{type(answered).__name__} returned, not a list of messages")
    messages = [message_of(message) for message in answered]
    require_unicode(messages)
    # The third field of a message is all of it.
    size = sum(len(text.encode()) for message in messages for text in (message[2:] or message))
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {size:,} bytes, and at most {MAX_ANSWER_BYTES:,} are possible")
    reward = scoring.checked_numbers(turn.reward, turn.parts, MAX_REWARD_PARTS)
    # In one order, so that an answer which is repeated has the same digest.
    return Turn(messages, reward.total, bool(turn.done), dict(sorted(reward.parts.items())))


_CHECKS: dict[str, Callable[[Any], Turn]] = {
    "": lambda reward: _turn_of(scoring.checked_score(reward)),
    "reset()": lambda messages: _checked(Turn(messages)),
    "step()": _checked,
}


class TaskScorer(WorkerPool):
    """Scores in `task.reward_workers` processes; with 0 of them, `submit` scores in this process."""

    def __init__(self, task: Task, config: TaskSection) -> None:
        self._task = task
        self._config = config
        self._scored: list[Scored] = []
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
                refills=together,
                load_seconds=LOAD_SECONDS,
                work_seconds=config.reward_seconds,
            )
        )

    def submit(self, item: Item) -> None:
        if self._config.reward_workers:
            super().submit(item)
            return
        if item.call is None:
            outcome = _outcome(*scoring.score(self._task, item.prompt, item.text, item.finished))
        else:
            outcome = scoring.event_loop().run(self._player.answer(*item.message(held=bool(self.told[item.ticket]))))
        self._scored.append(self._scored_by(item, *outcome))

    def done(self) -> list[Scored]:
        """What was scored since the last call, at once. Raises TaskError, or WorkerLost if none loads the task."""
        scored, self._scored = self._scored, []
        scored += [self._scored_by(result.item, *self._outcome_of(result)) for result in self.poll()]
        if self.refusal:
            raise TaskError(self.refusal)
        if self.failed_starts >= _MAX_STARTS:
            raise WorkerLost(
                f"task {self._config.name}: {self.last_error} while it loaded the task, {_MAX_STARTS} times in a row; "
                "see its output above"
            )
        return scored

    def _outcome_of(self, result: Result) -> Outcome:
        """Return what the worker answered, or what becomes of an item that its worker did not survive."""
        item = result.item
        if result.error is None:
            fields, error, kind = result.value
            self.timeouts += kind in ("reward_timeout", "turn_timeout")
            return Turn(*fields) if fields else None, error, kind
        name = name_of(self._task, item.prompt)
        log.warning("response not scored", task=name, prompt=item.prompt.key, reason=result.error)
        what = "reward" if item.call is None else "environment"
        late_kind: ErrorKind = "reward_timeout" if item.call is None else "turn_timeout"
        error = scoring.failed(result.error, result.doing or f"{what} of {name}")[1]
        return None, error, late_kind if result.late else "worker"

    def _scored_by(self, item: Item, turn: Turn | None, error: str | None, kind: ErrorKind | None) -> Scored:
        """Return the result of an item, and forget its episode if that is over."""
        reward = Reward(turn.reward, dict(turn.parts)) if turn else Reward(0.0, {})
        call = item.call
        if call is None:
            return Scored(item.ticket, item.text, reward, error, kind)
        if turn is None or turn.done or call.last or call.close:
            del self.told[item.ticket]
            self.release(item.ticket)
        else:
            self.told[item.ticket].append(scoring.digest(turn))
        if turn is not None:
            # Lists, if they come from a worker.
            messages: Any = tuple(map(tuple, turn.messages))
            turn = turn._replace(messages=messages)
        return Scored(item.ticket, None, reward, error, kind, turn)


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
        connection.send(["refused", f"in a reward worker: {scoring.storable(str(refusal))}"])
        sys.exit(1)
    worker = _Worker(connection, task, config)
    connection.send(["ready"])
    if not (scores_concurrently(task) or has_environment(task)):
        for batch in connection.messages:
            worker.score_in_order(batch)
        return
    # One event loop: a task may keep connections, which belong to a loop.
    asyncio.run(worker.answer_together())


class _Worker(Player):
    """Answers batches of `Item.message`."""

    def __init__(self, connection: Connection, task: Task, config: TaskSection) -> None:
        super().__init__(task, config.reward_seconds, config.reward_memory_mib)
        self._connection = connection
        self._own_pid = os.getpid()
        self._free = asyncio.Semaphore(config.reward_concurrency)
        # By ticket: the origin of what is called, and whether it is awaited.
        self._running: dict[int, tuple[str, bool]] = {}

    def score_in_order(self, batch: Sequence[Any]) -> None:
        """Score one response after the other, without an event loop, so that a scorer may run its own."""
        for ticket, fields, response, finished in batch:
            reward, error = scoring.score(self._task, Prompt(*fields), response, finished, self._memory_mib)
            self._send(["results", [[ticket, _outcome(reward, error), None]]])

    async def answer_together(self) -> None:
        """Answer up to `task.reward_concurrency` items at a time, unless a method does not wait; return at the end."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        # An event loop has weak references alone.
        answering = set[asyncio.Task[None]]()

        def receive() -> None:
            batches = self._connection.receive()
            if batches is None:
                over.set()
                return
            for item in chain.from_iterable(batches):
                answering.add(task := loop.create_task(self._answer_one(*item)))
                task.add_done_callback(done)

        def done(task: "asyncio.Task[None]") -> None:
            answering.discard(task)
            if task.exception() is not None:
                task.print_stack()
                os._exit(1)

        loop.add_reader(self._connection, receive)
        await over.wait()

    async def _answer_one(self, ticket: int, *asked: Any) -> None:
        async with self._free:
            outcome = await self.answer(ticket, *asked)
            self._running.pop(ticket, None)
            self._send(["results", [[ticket, outcome, None]]])
            if self._out_of_memory:
                # So the other episodes of this worker go on elsewhere.
                self._send(["begin", []])
                os._exit(0)
            if self._running:
                self._send_running()

    def _begin(self, ticket: int, origin: str, *, awaits: bool) -> None:
        self._running[ticket] = origin, awaits
        self._send_running()

    def _send_running(self) -> None:
        origins, awaits = zip(*self._running.values(), strict=True)
        grace = _GRACE_SECONDS if any(awaits) else 0.0
        self._send(["begin", [*self._running], origins, self._seconds + grace])

    def _send(self, message: Sequence[Any]) -> None:
        # If the task forked, this may be the child, which must not reply as well.
        if os.getpid() != self._own_pid:
            os._exit(0)
        self._connection.send(message)


def _outcome(reward: Reward, error: str | None) -> Outcome:
    return (None, error, "reward") if error else (_turn_of(reward), None, None)


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
