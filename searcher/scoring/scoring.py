"""Score a response with a task, whatever its scorer does short of ending the process."""

import math
import traceback
from dataclasses import dataclass, field

from tba.common.log import get_logger
from tba.common.wire.fields import LARGEST_REWARD, MAX_REWARD_PARTS
from tba.common.wire.messages import Visit
from tba.common.wire.trajectory import Int32, Trajectory
from tba.searcher.tasks.task import Prompt, Reward, Task

log = get_logger(__name__)

_ERROR_CHARACTERS = 2_000
# The reward model adds one.
_MAX_PARTS = MAX_REWARD_PARTS - 1
_MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class Item:
    """A response to score. `ticket` is the caller's id for it; `text` has no lone surrogates."""

    ticket: int
    prompt: Prompt
    text: str
    finished: bool
    # Monotonic.
    submitted_at: float


@dataclass(frozen=True, slots=True)
class Scored:
    """A scored response: its reward, or a reward of 0 and an error."""

    ticket: int
    text: str | None
    reward: Reward
    error: str | None


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
    """Return (reward, error). A scorer that raises, or returns no finite numbers, results in a reward of 0."""
    try:
        return _checked(task.score(prompt, response, finished)), None
    except MemoryError:
        limit = f" (limit {memory_mib} MiB)" if memory_mib else ""
        return failed(f"out of memory{limit}")
    # A verifier may call sys.exit or raise KeyboardInterrupt.
    except BaseException as error:  # noqa: BLE001
        log.error("reward failed", task=task.name, prompt=prompt.key, trace=storable(traceback.format_exc()))
        return failed(f"{type(error).__name__}: {error}")


def failed(reason: str) -> tuple[Reward, str]:
    """The reward and the error of a response that could not be scored."""
    return Reward(0.0, {}), storable(f"reward: {reason}"[:_ERROR_CHARACTERS])


def storable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _checked(reward: Reward) -> Reward:
    """The reward as finite floats. Raises ValueError."""
    parts = {storable(str(name)): float(value) for name, value in reward.parts.items()}
    if len(parts) > _MAX_PARTS or any(len(name) > _MAX_NAME for name in parts):
        raise ValueError(f"a reward has at most {_MAX_PARTS} parts, with names of at most {_MAX_NAME} characters")
    if not all(math.isfinite(value) for value in (reward.total, *parts.values())):
        raise ValueError(f"a reward must be finite, not {reward.total} with parts {parts}")
    if abs(reward.total) > LARGEST_REWARD:
        raise ValueError(f"a reward is at least {-LARGEST_REWARD:g} and at most {LARGEST_REWARD:g}, not {reward.total}")
    return Reward(float(reward.total), parts)
