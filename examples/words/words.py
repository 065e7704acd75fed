"""Word problems of one to three events: the response calculates event by event and ends in "Answer: N".

A task of a user, as docs/tasks.md describes them: `task.name = "examples/words/words.py"`.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tba.searcher.tasks.task import CORRECT, Prompt, Reward

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps")
# Who adds and who takes away; {friend} is another name.
GAINS = ("buys {n} more", "finds {n} more", "gets {n} from {friend}")
LOSSES = ("loses {n}", "sells {n}", "gives {n} to {friend}")

_ANSWER = re.compile(r"Answer: ([0-9]+)\Z", re.ASCII)
_SEED = 5
_PROMPTS, _HELD_OUT = 8000, 256


@dataclass(frozen=True, slots=True)
class Event:
    """What happens to the things: "gives 5 to Ben" has the change -5."""

    text: str
    change: int


@dataclass(frozen=True, slots=True)
class Problem:
    """How many things a person has first, and what happens to them."""

    name: str
    things: str
    start: int
    events: tuple[Event, ...]

    @property
    def text(self) -> str:
        story = " ".join(f"{self.name} {event.text}." for event in self.events)
        return f"{self.name} has {self.start} {self.things}. {story} How many {self.things} does {self.name} have?"

    @property
    def answer(self) -> int:
        return self.start + sum(event.change for event in self.events)

    def solution(self, read: Callable[[Event], int] = lambda event: event.change) -> str:
        """Return the chain of calculations, in which each event changes the number by `read(event)`."""
        steps, number = [], self.start
        for event in self.events:
            change = read(event)
            sign = "+" if change > 0 else "-"
            steps.append(f" {self.name} {event.text}: {number} {sign} {abs(change)} = {number + change}.")
            number += change
        return "".join(steps) + f" Answer: {number}"


class WordProblems:
    """Problems from a generator with a fixed seed: all are different, and the first 256 are held out."""

    name = "words"

    def __init__(self, prompts: int = _PROMPTS) -> None:
        rng, found = random.Random(_SEED), dict[str, Problem]()
        while len(found) < _HELD_OUT + prompts:
            problem = make_problem(rng)
            found[problem.text] = problem
        self._held_out, self.problems = list(found.values())[:_HELD_OUT], list(found.values())[_HELD_OUT:]

    def prompts(self) -> Sequence[Prompt]:
        return [_prompt(problem) for problem in self.problems]

    def held_out(self) -> Sequence[Prompt]:
        return [_prompt(problem) for problem in self._held_out]

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """Return 1 for a finished response whose last words are the right answer, else 0.

        The part `format` is 1 for any number as the answer. It is not rewarded.
        """
        found = _ANSWER.search(response) if finished else None
        correct = float(found is not None and found[1] == prompt.answer)
        return Reward(correct, {CORRECT: correct, "format": float(found is not None)})


def make_problem(rng: random.Random) -> Problem:
    """Return a problem whose numbers stay above 0: the start is 10 to 39, each change 2 to 9."""
    name, start = rng.choice(NAMES), rng.randrange(10, 40)
    events, number = [], start
    for _ in range(rng.choice((1, 2, 2, 3))):
        gains, n = rng.random() < 0.5 or number < 10, rng.randrange(2, 10)
        friend = rng.choice([other for other in NAMES if other != name])
        text = rng.choice(GAINS if gains else LOSSES).format(n=n, friend=friend)
        events.append(Event(text, n if gains else -n))
        number += events[-1].change
    return Problem(name, rng.choice(THINGS), start, tuple(events))


def _prompt(problem: Problem) -> Prompt:
    return Prompt(key=problem.text, text=problem.text, answer=str(problem.answer))
