"""Games that need no data file: `guess`, a number from hints, and `calculator`, arithmetic with a tool.

Both are environments, and both are functions of the prompt and the replies: no luck, so any objective may train on
data of any age (docs/objectives.md).
"""

import ast
import hashlib
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from tba.common.errors import TaskError
from tba.searcher.tasks.task import CORRECT, PARSE_ERROR, Environment, ListedTask, Prompt, Turn

_NUMBER = re.compile(r"-?\d+", re.ASCII)
_CALL = re.compile(r"calc\((.{1,100})\)", re.ASCII)
_MAX_DIGITS = 12
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def _draw(key: str, count: int) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % count


class GuessTask(ListedTask):
    """Find a hidden number from 1 to `numbers`; the answer to a wrong guess is " higher" or " lower".

    The reward is 1 for the number, which ends the game, and 0 without it; `search.max_turns` is the number of guesses.
    A reply without a number ends the game as a `parse_error`. With `hints = false` the answer is always " wrong", for
    what a policy achieves that is told nothing. There are `held_out` more prompts for evaluation.

    Raises TaskError for options that make no game.
    """

    name = "guess"

    def __init__(self, numbers: int = 7, prompts: int = 2_000, held_out: int = 300, hints: bool = True) -> None:
        if numbers < 2 or prompts < 1 or held_out < 0:
            raise TaskError("task guess needs at least 2 numbers and 1 prompt: correct task.options")
        self._numbers = numbers
        self._hints = hints
        self._held_out = [self._prompt(f"held-out-{n}") for n in range(held_out)]
        self._prompts = [self._prompt(f"{n}") for n in range(prompts)]

    def environment(self, prompt: Prompt) -> "GuessGame":
        return GuessGame(int(prompt.answer), self._hints)

    def _prompt(self, key: str) -> Prompt:
        return Prompt(key, f"guess 1 to {self._numbers} :", answer=str(1 + _draw(key, self._numbers)))


@dataclass(eq=False)
class GuessGame(Environment):
    """One game of `GuessTask`."""

    number: int
    hints: bool

    def step(self, reply: str, finished: bool) -> Turn:
        if (found := _NUMBER.search(reply)) is None or len(found[0]) > _MAX_DIGITS:
            return Turn(done=True, parts={CORRECT: 0.0, PARSE_ERROR: 1.0})
        guess = int(found[0])
        if guess == self.number:
            return Turn(reward=1.0, done=True, parts={CORRECT: 1.0})
        hint = ("higher" if guess < self.number else "lower") if self.hints else "wrong"
        return Turn((("user", f" {hint} :"),), parts={CORRECT: 0.0})


class CalculatorTask(ListedTask):
    """Multiply two numbers of `digits` digits, with a calculator: `calc(47*38)` is answered with " = 1786".

    The reward is 1 for the product as the last number of a reply without a call, which ends the game. The part
    `calls` counts the calls. A call that is no arithmetic of whole numbers, with +, - and *, is answered with " error".
    """

    name = "calculator"

    def __init__(self, digits: int = 2, prompts: int = 2_000, held_out: int = 300) -> None:
        if not 1 <= digits <= _MAX_DIGITS // 2 or prompts < 1 or held_out < 0:
            raise TaskError(f"task calculator needs 1 to {_MAX_DIGITS // 2} digits and 1 prompt: correct task.options")
        low, found = 10 ** (digits - 1), []
        for key in map(str, range(held_out + prompts)):
            left, right = (low + _draw(f"{side} {key}", 9 * low) for side in ("left", "right"))
            text = f"What is {left}*{right}? You may ask calc(...) first.\n"
            found.append(Prompt(key, text, answer=str(left * right)))
        self._held_out, self._prompts = found[:held_out], found[held_out:]

    def environment(self, prompt: Prompt) -> "Calculator":
        return Calculator(prompt.answer)


@dataclass(eq=False)
class Calculator(Environment):
    """One game of `CalculatorTask`."""

    answer: str

    def step(self, reply: str, finished: bool) -> Turn:
        if (call := _CALL.search(reply)) or "calc(" in reply:
            value = calculate(call[1]) if call else "error"
            return Turn((("user", f" = {value}\n"),), parts={CORRECT: 0.0, "calls": 1.0})
        numbers = _NUMBER.findall(reply)
        right = float(bool(numbers) and numbers[-1] == self.answer)
        return Turn(reward=right, done=True, parts={CORRECT: right, PARSE_ERROR: float(not numbers)})


def calculate(expression: str) -> str:
    """Return the value of sums, differences and products of whole numbers, "error" for anything else."""
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error"
    return str(value)


def _value(node: ast.expr) -> int:
    """Raises ValueError for what is no arithmetic of whole numbers, or has too many digits."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("not arithmetic of whole numbers")
    if abs(value) >= 10**_MAX_DIGITS:
        raise ValueError("too many digits")
    return value
