"""The task protocol: prompts with stable keys, and a scorer for their responses."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tba.common.errors import TaskError

# The reward part that `tba eval` averages: 1 for a right answer, 0 for a wrong one.
CORRECT = "correct"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. `key` is unique within the task and the same in every process and run."""

    key: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Reward:
    """A score. `total` is the reward of training; `parts` are named numbers for reports, one of them `correct`."""

    total: float
    parts: dict[str, float]


class Task(Protocol):
    """Prompts to train on, prompts to evaluate on, and a scorer for both."""

    name: str

    def prompts(self) -> Sequence[Prompt]:
        """Return the training prompts, always in the same order."""

    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts of evaluation, which are never trained on."""

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """Score a decoded response without special tokens. `finished` is False if it was cut off by its length."""


class LimitedTask:
    """The first `limit` training and `held_out_limit` held-out prompts of another task; 0 means all of them."""

    def __init__(self, task: Task, limit: int, held_out_limit: int) -> None:
        self.name = task.name
        self.score = task.score
        self._task = task
        self._limit = limit or None
        self._held_out_limit = held_out_limit or None

    def prompts(self) -> Sequence[Prompt]:
        return self._task.prompts()[: self._limit]

    def held_out(self) -> Sequence[Prompt]:
        return self._task.held_out()[: self._held_out_limit]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return the hex sha256 of all keys, texts and answers, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.key}\0{prompt.text}\0{prompt.answer}\0".encode())
    return digest.hexdigest()


def check_prompts(task: Task) -> None:
    """Raise TaskError if there are no training prompts, or two of them have the same key."""
    first: dict[str, int] = {}
    for number, prompt in enumerate(task.prompts(), 1):
        if (earlier := first.setdefault(prompt.key, number)) != number:
            raise TaskError(
                f"task {task.name}: the prompts {earlier} and {number} have the same key {prompt.key!r}: give every "
                "prompt a key of its own"
            )
    if not first:
        raise TaskError(f"task {task.name} has no prompts")
