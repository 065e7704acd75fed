"""Score a response with a task, whatever its scorer does short of ending the process; and what workers are asked."""

import asyncio
import atexit
import math
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cache
from typing import Any

from tba.common.log import get_logger
from tba.common.wire.fields import LARGEST_REWARD, MAX_REWARD_PARTS, ErrorKind
from tba.common.wire.messages import Visit
from tba.common.wire.trajectory import Int32, Trajectory
from tba.searcher.tasks.task import Prompt, Reward, Task, Turn, name_of

log = get_logger(__name__)

_ERROR_CHARACTERS = 2_000
# The reward model adds one.
_MAX_PARTS = MAX_REWARD_PARTS - 1
_MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an episode's environment: all replies so far, as (text, finished), none for its reset.

    The environment is closed after it if this is the `last`, or instead of it with `close`. `told` are the digests of
    the answers so far, which a replay must give again.
    """

    replies: Sequence[tuple[str, bool]]
    last: bool
    close: bool
    told: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Item:
    """A response to score, or a call of an environment. `ticket` is the caller's id for the response or the episode.

    `text` has no lone surrogates. With a `call`, text and `finished` have no meaning.
    """

    ticket: int
    prompt: Prompt
    text: str
    finished: bool
    # Monotonic.
    submitted_at: float
    call: Call | None = None

    def message(self, *, held: bool) -> list[Any]:
        """Return what a worker is sent. One that has `held` the episode since its reset gets the last reply alone."""
        if self.call is None:
            return [self.ticket, astuple(self.prompt), self.text, self.finished]
        call = self.call
        replies, told = (call.replies[-1:], ()) if held else (call.replies, call.told)
        return [self.ticket, None if held else astuple(self.prompt), replies, call.last, call.close, told]


@dataclass(frozen=True, slots=True)
class Scored:
    """A scored response: its reward, or a reward of 0 and an error of some `ErrorKind`.

    `interrupted` if the task did not return or raise: it exceeded its time limit, or its worker died. Of a call of an
    environment, `turn` is what it answered, and `reward` that of the turn; after an error the episode is over.
    """

    ticket: int
    text: str | None
    reward: Reward
    error: str | None
    interrupted: bool = False
    error_kind: ErrorKind | None = None
    turn: Turn | None = None


@dataclass(slots=True)
class Group:
    """The responses to one visit of a prompt. `done` holds the finished rows, `size` of them in the end."""

    visit: Visit
    prompt: Prompt
    prompt_ids: Int32
    size: int
    done: list[Trajectory] = field(default_factory=list)


def score(
    task: Task, prompt: Prompt, response: str, finished: bool, memory_mib: int | None = None
) -> tuple[Reward, str | None]:
    """Return (reward, error). A scorer that raises, or returns no finite numbers, results in a reward of 0.

    Without a worker a coroutine runs here to its end.
    """
    try:
        reward = task.score(prompt, response, finished)
        return _checked(event_loop().run(_awaited(reward)) if isinstance(reward, Awaitable) else reward), None
    # A verifier may call sys.exit or raise KeyboardInterrupt.
    except BaseException as error:  # noqa: BLE001
        return _raised(error, task, prompt, memory_mib)


async def score_later(
    task: Task, prompt: Prompt, response: str, finished: bool, seconds: float, memory_mib: int
) -> tuple[Reward, str | None, bool]:
    """As `score`, for a task whose `score` may be a coroutine. The last is whether it exceeded `seconds`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            reward = task.score(prompt, response, finished)
            return _checked(await reward if isinstance(reward, Awaitable) else reward), None, False
    except BaseException as error:  # noqa: BLE001
        if limit.expired():
            return *failed(timed_out(seconds), name_of(task, prompt)), True
        return *_raised(error, task, prompt, memory_mib), False


def failed(reason: str, task: str = "", *, what: str = "reward") -> tuple[Reward, str]:
    """The reward and the error of a response that could not be scored by a task, or not at all."""
    origin = f"{what} of {task}" if task else what
    return Reward(0.0, {}), storable(f"{origin}: {reason}"[:_ERROR_CHARACTERS])


def timed_out(seconds: float) -> str:
    """Why a response has no reward after its time limit."""
    return f"timed out after {seconds:g} s"


def storable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


@cache
def event_loop() -> asyncio.Runner:
    """Return the event loop of this process: a task may keep connections, which belong to a loop."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


async def _awaited(reward: Awaitable[Reward]) -> Reward:
    return await reward


def _raised(error: BaseException, task: Task, prompt: Prompt, memory_mib: int | None) -> tuple[Reward, str]:
    name = name_of(task, prompt)
    return failed(described(error, "reward", name, prompt.key, memory_mib), name)


def described(error: BaseException, what: str, task: str, key: str, memory_mib: int | None) -> str:
    """Return an error of a task's code as a text, and log where it was raised."""
    if isinstance(error, MemoryError):
        return f"out of memory (limit {memory_mib} MiB)" if memory_mib else "out of memory"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    trace = storable("".join(traceback.format_exception(error)))
    # Only the first of the errors of one line is written; the others are counted (DuplicateFilter).
    log.warning(f"{what} failed", task=task, at=f"{frame.filename}:{frame.lineno}", prompt=key, trace=trace)
    return f"{type(error).__name__}: {error}"


def _checked(reward: Any) -> Reward:
    """The reward as finite floats. Raises TypeError, ValueError."""
    if not isinstance(reward, Reward):
        raise TypeError(f"score returned {type(reward).__name__}, not a Reward")
    return checked_numbers(reward.total, reward.parts, _MAX_PARTS)


def checked_numbers(total: Any, parts_of: Mapping[str, Any], most: int) -> Reward:
    """A reward and at most so many parts as finite floats. Raises TypeError, ValueError."""
    numbers: dict[str, Any] = {"total": total, **parts_of}
    if texts := [name for name, value in numbers.items() if isinstance(value, str) or not hasattr(value, "__float__")]:
        raise TypeError(f"{texts[0]} of a reward is a {type(numbers[texts[0]]).__name__}, not a number")
    parts = {storable(str(name)): float(value) for name, value in parts_of.items()}
    if len(parts) > most or any(len(name) > _MAX_NAME for name in parts):
        raise ValueError(f"a reward has at most {most} parts, with names of at most {_MAX_NAME} characters")
    if not all(math.isfinite(value) for value in (total, *parts.values())):
        raise ValueError(f"a reward must be finite, not {total} with parts {parts}")
    if abs(total) > LARGEST_REWARD:
        raise ValueError(f"a reward is at least {-LARGEST_REWARD:g} and at most {LARGEST_REWARD:g}, not {total}")
    return Reward(float(total), parts)
