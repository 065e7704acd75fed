"""What a task is: prompts with stable keys, and a score for each response."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# The reward part that `tba eval` averages: 1 for a right answer, 0 for a wrong one.
CORRECT = "correct"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. `key` is unique in the task and the same in every process and run."""

    key: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Reward:
    """A score. `total` is what is trained on; `parts` are named numbers for people, `correct` among them."""

    total: float
    parts: dict[str, float]


class Task(Protocol):
    """Prompts to train on, prompts to evaluate on, and a scorer for both."""

    name: str

    def prompts(self) -> Sequence[Prompt]:
        """The training prompts, in an order that never changes."""

    def held_out(self) -> Sequence[Prompt]:
        """Prompts that are never trained on."""

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """Score a response: decoded, without special tokens. `finished`: it ended itself, not by length."""


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hex sha256 over keys, texts and answers in order: equal for equal data."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.key}\0{prompt.text}\0{prompt.answer}\0".encode())
    return digest.hexdigest()
