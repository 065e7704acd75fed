"""What goes to the rewards and what comes back."""

from dataclasses import dataclass

from tba.searcher.tasks.task import Prompt, Reward


@dataclass(frozen=True, slots=True)
class Item:
    """A response to score; `text` has no lone surrogates. `ticket` is the caller's."""

    ticket: int
    prompt: Prompt
    text: str
    finished: bool
    submitted_at: float


@dataclass(frozen=True, slots=True)
class Scored:
    """An answer: a reward, or a reward of 0 and the sentence of an error."""

    ticket: int
    text: str | None
    reward: Reward
    error: str | None
