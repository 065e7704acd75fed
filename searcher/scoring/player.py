"""Answer what a reward worker is asked: score responses, and play episodes, whose environments it holds.

Many answers may be under way at a time, one of each episode. What leaves a reward worker is within the limits, whatever
the task returned.
"""

import asyncio
import contextlib
import inspect
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tba.common.data_files import require_unicode
from tba.common.rendering import message_of
from tba.common.wire.fields import MAX_REWARD_PARTS, ErrorKind
from tba.searcher.scoring.scoring import (
    Answer,
    checked_numbers,
    checked_score,
    described,
    failed,
    origin_of,
    timed_out,
)
from tba.searcher.tasks.task import Prompt, Task, Turn, is_random

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
        self.answer = Answer.of(*failed(reason, origin), kind)


class Player:
    """Holds the environments of episodes by ticket.

    `begin(ticket, origin, awaits)` is told before each call of a method, and again if it has to be awaited. A coroutine
    ends after `seconds`; to limit other methods is the owner's business. Once an environment was `out_of_memory`, the
    process should answer nothing more.
    """

    def __init__(
        self,
        task: Task,
        seconds: float = math.inf,
        memory_mib: int | None = None,
        begin: Callable[[int, str, bool], None] = lambda *_: None,
    ) -> None:
        self.out_of_memory = False
        self._task: Any = task
        self._seconds = seconds
        self._memory_mib = memory_mib
        self._begin = begin
        self._held: dict[int, tuple[Prompt, Any]] = {}

    async def answer(self, ticket: int, fields: Sequence[Any] | None, *asked: Any) -> Answer:
        """Answer an `Item.message`: a response, or a call of an environment, without a prompt if it is held here."""
        prompt = self._held[ticket][0] if fields is None else Prompt(*fields)
        try:
            if isinstance(asked[0], str):
                scored: Answer = await self._call(ticket, prompt, "", self._task.score, *asked)
                return scored
            return await self._play(ticket, prompt, *asked)
        except _Failed as failure:
            # The first error is the one to report.
            with contextlib.suppress(_Failed):
                await self._close(ticket)
            return failure.answer

    async def _play(
        self,
        ticket: int,
        prompt: Prompt,
        replies: Sequence[tuple[str, bool]],
        last: bool,
        close: bool,
        told: Sequence[bytes],
    ) -> Answer:
        call = partial(self._call, ticket, prompt)
        answer = _checked(Turn())
        if close:
            replies = ()
        elif ticket not in self._held:
            if replies and is_random(self._task, prompt):
                raise _Failed(origin_of(self._task, prompt, "step()"), _RANDOM, "worker")
            self._held[ticket] = prompt, await call("environment()", self._task.environment, prompt)
            answer = await call("reset()", self._held[ticket][1].reset, prompt)
        for number, reply in enumerate(replies):
            if told and answer.digest != told[number]:
                method = "step()" if number else "reset()"
                raise _Failed(origin_of(self._task, prompt, method), _DIFFERENT, "environment")
            answer = await call("step()", self._held[ticket][1].step, *reply)
        if close or last or answer.done:
            await self._close(ticket)
        return answer

    async def _close(self, ticket: int) -> None:
        if ticket in self._held:
            prompt, environment = self._held.pop(ticket)
            await self._call(ticket, prompt, "close()", environment.close)

    async def _call(self, ticket: int, prompt: Prompt, method: str, function: Callable[..., Any], *given: Any) -> Any:
        """Call a method of an environment, or without a name `score`, and check what it returns. Raises _Failed."""
        origin = origin_of(self._task, prompt, method)
        self._begin(ticket, origin, False)
        end = time.monotonic() + self._seconds
        try:
            found = function(*given) if method else function(prompt, *given)
            if inspect.isawaitable(found):
                self._begin(ticket, origin, True)
                async with asyncio.timeout(self._seconds):
                    found = await found
            # A coroutine may ignore that it is cancelled, and other methods are not.
            if time.monotonic() > end:
                raise TimeoutError
            return _CHECKS[method](found) if method in _CHECKS else found
        # A task may call sys.exit or raise KeyboardInterrupt.
        except BaseException as error:
            is_late = time.monotonic() > end
            self.out_of_memory |= bool(method) and isinstance(error, MemoryError)
            reason = (
                timed_out(self._seconds) if is_late else described(error, self._task, prompt, method, self._memory_mib)
            )
            kinds: tuple[ErrorKind, ErrorKind] = (
                ("environment", "turn_timeout") if method else ("reward", "reward_timeout")
            )
            raise _Failed(origin, reason, kinds[is_late]) from error


def _checked(turn: Any) -> Answer:
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
    reward = checked_numbers(turn.reward, turn.parts, MAX_REWARD_PARTS)
    return Answer(messages, reward.total, bool(turn.done), reward.parts)


_CHECKS: dict[str, Callable[[Any], Answer]] = {
    "": lambda reward: Answer.of(checked_score(reward)),
    "reset()": lambda messages: _checked(Turn(messages)),
    "step()": _checked,
}
