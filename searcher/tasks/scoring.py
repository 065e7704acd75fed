"""Calling a task's scorer, whatever it does short of ending the process."""

import math
import traceback

from tba.common.log import get_logger
from tba.common.wire import LARGEST_REWARD
from tba.searcher.tasks.task import Prompt, Reward, Task

log = get_logger(__name__)

_ERROR_CHARACTERS = 2_000
_MAX_PARTS = 64
_MAX_NAME = 100


def score(
    task: Task, prompt: Prompt, response: str, finished: bool, memory_mib: int | None = None
) -> tuple[Reward, str | None]:
    """(reward, error). A scorer that raises, or gives no finite numbers, gets a reward of 0 and a sentence."""
    try:
        return _checked(task.score(prompt, response, finished)), None
    except MemoryError:
        limit = f" (limit {memory_mib} MiB)" if memory_mib else ""
        return failed(f"out of memory{limit}")
    except BaseException as error:  # noqa: BLE001  # a verifier may call sys.exit, or raise KeyboardInterrupt
        log.error("reward failed", task=task.name, prompt=prompt.key, trace=storable(traceback.format_exc()))
        return failed(f"{type(error).__name__}: {error}")


def failed(reason: str) -> tuple[Reward, str]:
    """The reward of an item that has none."""
    return Reward(0.0, {}), storable(f"reward: {reason}"[:_ERROR_CHARACTERS])


def storable(text: str) -> str:
    """UTF-8 without lone surrogates."""
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
