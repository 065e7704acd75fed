"""Play episodes: hold their environments, call them, and repeat an episode whose environment is lost.

A player answers calls of any number of episodes, one call of each at a time. Each answer is checked, so that what
leaves a reward worker is a `Turn` within the limits, whatever the environment returned.
"""

import asyncio
import contextlib
import hashlib
import inspect
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack

from tba.common.data_files import require_unicode
from tba.common.rendering import Message, message_of
from tba.common.wire.fields import MAX_REWARD_PARTS, ErrorKind
from tba.searcher.scoring.scoring import checked_numbers, described, failed, timed_out
from tba.searcher.tasks.task import Environment, Prompt, Task, Turn, is_random, name_of

# Of the messages of one answer, in UTF-8.
MAX_ANSWER_BYTES = 1 << 20
_DIGEST_BYTES = 8


class Answer(NamedTuple):
    """The fields of a checked Turn."""

    messages: Sequence[Message]
    reward: float
    done: bool
    parts: dict[str, float]


class Outcome(NamedTuple):
    """What a call led to: an answer and its digest, or an error and its kind (`ErrorKind`).

    `out_of_memory` if the process should take no more calls.
    """

    answer: Answer | None
    digest: bytes = b""
    error: str | None = None
    kind: ErrorKind | None = None
    out_of_memory: bool = False


class _Failed(Exception):
    """A call of `method` failed, for a reason that is found here or because of the error that is the cause."""

    def __init__(self, method: str, reason: str = "", kind: ErrorKind = "environment") -> None:
        super().__init__(reason)
        self.method = method
        self.kind = kind


class Player:
    """Holds the environments of episodes by ticket.

    `begin(ticket, method, awaits)` is told before each call of an environment, and again if it has to be awaited. A
    coroutine ends after `seconds`, if they are given; to limit other methods is the owner's business.
    """

    def __init__(
        self,
        task: Task,
        seconds: float | None = None,
        memory_mib: int | None = None,
        begin: Callable[[int, str, bool], None] = lambda *_: None,
    ) -> None:
        self._task = task
        self._seconds = seconds
        self._memory_mib = memory_mib
        self._begin = begin
        self._held: dict[int, tuple[Prompt, Environment]] = {}

    async def play(self, ticket: int, fields: Sequence[Any] | None, *call: Any) -> Outcome:
        """Answer a call as `Item.message` has it: without the fields of a prompt, that of an episode held here."""
        prompt = self._held[ticket][0] if fields is None else Prompt(*fields)
        try:
            answer = await self._play(ticket, prompt, *call)
            return Outcome(answer, _digest(answer))
        except _Failed as failure:
            name, cause = name_of(self._task, prompt), failure.__cause__
            out_of_memory = isinstance(cause, MemoryError)
            reason = str(failure)
            if cause is not None:
                reason = described(cause, f"environment {failure.method}", name, prompt.key, self._memory_mib)
            if out_of_memory:
                self._held.pop(ticket, None)
            # The first error is the one to report.
            with contextlib.suppress(_Failed):
                await self._close(ticket)
            error = failed(f"{failure.method}: {reason}", name, what="environment")[1]
            return Outcome(None, b"", error, failure.kind, out_of_memory)

    async def _play(
        self,
        ticket: int,
        prompt: Prompt,
        replies: Sequence[tuple[str, bool]],
        last: bool,
        close: bool,
        told: Sequence[bytes],
    ) -> Answer:
        if close:
            await self._close(ticket)
            return _checked(Turn())
        if ticket not in self._held:
            answer = await self._begin_episode(ticket, prompt, replies, told)
        else:
            answer = await self._step(ticket, *replies[-1])
        if last or answer.done:
            await self._close(ticket)
        return answer

    async def _begin_episode(
        self, ticket: int, prompt: Prompt, replies: Sequence[tuple[str, bool]], told: Sequence[bytes]
    ) -> Answer:
        """Make and reset an environment, give it all replies, and return its last answer."""
        if replies and is_random(self._task, prompt):
            raise _Failed("step()", "its worker was replaced, and a random environment cannot be repeated", "worker")
        task: Any = self._task
        environment = await self._call(ticket, "environment()", lambda: task.environment(prompt))
        self._held[ticket] = prompt, environment
        answer: Answer = await self._call(ticket, "reset()", lambda: environment.reset(prompt), _of_reset)
        for number, reply in enumerate(replies):
            if _digest(answer) != told[number]:
                raise _Failed(
                    "step()" if number else "reset()",
                    "another answer than before when the episode was repeated in another worker: the environment is "
                    "not a function of prompt key and replies; seed it with the key, or set random = True",
                )
            answer = await self._step(ticket, *reply)
        return answer

    async def _step(self, ticket: int, reply: str, finished: bool) -> Answer:
        environment = self._held[ticket][1]
        answer: Answer = await self._call(ticket, "step()", lambda: environment.step(reply, finished), _checked)
        return answer

    async def _close(self, ticket: int) -> None:
        if ticket in self._held:
            await self._call(ticket, "close()", self._held.pop(ticket)[1].close)

    async def _call(
        self, ticket: int, method: str, call: Callable[[], Any], check: Callable[[Any], Any] = lambda answer: answer
    ) -> Any:
        """Call a method and check what it returns. Raises _Failed."""
        self._begin(ticket, method, False)
        end = time.monotonic() + (math.inf if self._seconds is None else self._seconds)
        try:
            async with asyncio.timeout(self._seconds):
                answer = call()
                if inspect.isawaitable(answer):
                    self._begin(ticket, method, True)
                    answer = await answer
            # A coroutine may ignore that it is cancelled, and other methods are not.
            if time.monotonic() > end:
                raise TimeoutError
            return check(answer)
        # An environment may call sys.exit or raise KeyboardInterrupt.
        except BaseException as error:
            if self._seconds is not None and time.monotonic() > end:
                raise _Failed(method, timed_out(self._seconds), "turn_timeout") from None
            raise _Failed(method) from error


def _of_reset(messages: Any) -> Answer:
    return _checked(Turn(messages))


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
    numbers = checked_numbers(turn.reward, turn.parts, MAX_REWARD_PARTS)
    return Answer(messages, numbers.total, bool(turn.done), numbers.parts)


def _digest(answer: Answer) -> bytes:
    return hashlib.sha256(msgpack.packb(answer)).digest()[:_DIGEST_BYTES]
