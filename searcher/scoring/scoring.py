"""Score a response with a task, whatever its scorer does short of ending the process; and what workers are asked."""

import asyncio
import atexit
import hashlib
import math
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import msgpack

from tba.common.errors import named
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
# The part of the reward, among those of a phase, that is the reward without phases.
WHOLE = "reward"
_DIGEST_BYTES = 8


class Call(NamedTuple):
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
        if held:
            return [self.ticket, None, *self.call._replace(replies=self.call.replies[-1:], told=())]
        return [self.ticket, astuple(self.prompt), *self.call]


# What becomes of an item: a turn within the limits, as a score is one too, or an error and its kind.
Outcome = tuple[Turn | None, str | None, ErrorKind | None]


@dataclass(frozen=True, slots=True)
class Scored:
    """A scored response: its reward, or a reward of 0 and an error of some `ErrorKind`.

    Of an environment's call, `turn` is the answer, and `reward` that of the turn; after an error the episode is over.
    """

    ticket: int
    text: str | None
    reward: Reward
    error: str | None
    error_kind: ErrorKind | None = None
    turn: Turn | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the task did not return or raise: it exceeded its time limit, or its worker died."""
        return self.error_kind in ("reward_timeout", "turn_timeout", "worker")


@dataclass(slots=True)
class Group:
    """The responses to one visit of a prompt, or a part of them. `done` holds the finished rows, `size` in the end.

    `closes`: these rows are the last of the visit. All have this `metadata`. Those of a guided group begin with the
    tokens of `prefix`; that of a plain group is None. `version` is the policy's when the visit began.
    """

    visit: Visit
    prompt: Prompt
    prompt_ids: Int32
    size: int
    metadata: dict[str, Any] = field(default_factory=dict)
    prefix: Int32 | None = None
    version: int = 0
    done: list[Trajectory] = field(default_factory=list)
    closes: bool = True


def digest(turn: Turn) -> bytes:
    """Return what tells a checked turn from another one, also after they were sent."""
    return hashlib.sha256(msgpack.packb(turn)).digest()[:_DIGEST_BYTES]


def score(
    task: Task, prompt: Prompt, response: str, finished: bool, memory_mib: int | None = None
) -> tuple[Reward, str | None]:
    """Return (reward, error), a reward of 0 if the scorer fails. Without a worker a coroutine runs here to its end."""
    try:
        reward = task.score(prompt, response, finished)
        return checked_score(event_loop().run(_awaited(reward)) if isinstance(reward, Awaitable) else reward), None
    # A verifier may call sys.exit or raise KeyboardInterrupt.
    except BaseException as error:  # noqa: BLE001
        return failed(described(error, task, prompt, "", memory_mib), origin_of(task, prompt))


def origin_of(task: Task, prompt: Prompt, method: str = "") -> str:
    """Return what an error is said to be of: the reward, or this method of the environment, of the prompt's task."""
    name = name_of(task, prompt)
    return f"environment of {name}: {method}" if method else f"reward of {name}"


def failed(reason: str, origin: str = "reward") -> tuple[Reward, str]:
    """The reward and the error of a response that could not be scored."""
    return Reward(0.0, {}), storable(f"{origin}: {reason}"[:_ERROR_CHARACTERS])


def phased(scored: Scored, weights: Mapping[str, float]) -> Scored:
    """Return a response with the reward of its phase (`task.phases`), and the reward without phases as a part.

    It gets an error if it has not all of the parts, one named like the whole, or a sum beyond what a row holds.
    """
    if scored.error is not None:
        return scored
    parts = scored.reward.parts | {WHOLE: scored.reward.total}
    problem, total = "", 0.0
    if WHOLE in scored.reward.parts:
        problem = f"the task has a part {WHOLE} of its own, which names the whole reward here: rename it"
    elif missing := sorted(weights.keys() - parts.keys()):
        problem = f"the response has no part {missing[0]}, only {', '.join(parts)}"
    else:
        total = sum(weight * parts[name] for name, weight in weights.items())
        # The difference of two infinities is no number, and no comparison with it is true.
        if len(parts) > MAX_REWARD_PARTS or not abs(total) <= LARGEST_REWARD:
            problem = f"a reward of {total:g} with {len(parts)} parts is beyond what a row holds"
    if problem:
        return Scored(scored.ticket, scored.text, *failed(f"task.phases: {problem}"), error_kind="reward")
    return replace(scored, reward=Reward(total, parts))


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


def described(error: BaseException, task: Task, prompt: Prompt, method: str, memory_mib: int | None) -> str:
    """Return an error of a task's code as a text, and log where it was raised. `method` is an environment's."""
    if isinstance(error, MemoryError):
        return f"out of memory (limit {memory_mib} MiB)" if memory_mib else "out of memory"
    try:
        said = named(error)
    # The code of an exception's message is the task's, too.
    except Exception:  # noqa: BLE001
        said = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    # The line of the task, and not of a library that it calls.
    frame = next((frame for frame in reversed(frames) if "site-packages" not in frame.filename), frames[-1])
    # Only the first of the errors of one line is written; the others are counted (DuplicateFilter).
    log.warning(
        f"environment {method} failed" if method else "reward failed",
        task=name_of(task, prompt),
        at=f"{frame.filename}:{frame.lineno}",
        prompt=prompt.key,
        error=storable(said.splitlines()[0]),
    )
    return said


def checked_score(reward: Any) -> Reward:
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
