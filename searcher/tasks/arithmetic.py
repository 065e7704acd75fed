"""Two-digit additions and subtractions: "47+38=" is answered with "85", "23-61=" with "-38".

The whole task is 16,200 problems. It needs no data file and one searcher scores thousands of answers a second,
so the complete loop can be watched on a laptop.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Sequence
from itertools import product

from tba.searcher.tasks.task import Prompt, Reward

_OPERANDS = range(10, 100)
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub}
_INTEGER = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)


class ArithmeticTask:
    """Every sum and difference of two two-digit numbers, a fixed part of them held out.

    The order, and so the split, follows from a hash of the problem text: the same in every process, run and
    Python version. Problems with the smallest hashes are held out.
    """

    name = "arithmetic"

    def __init__(self, held_out_size: int = 256) -> None:
        problems = _all_problems()
        if not 0 < held_out_size < len(problems):
            raise ValueError(f"held_out_size must be 1 to {len(problems) - 1}, got {held_out_size}")
        self._held_out = problems[:held_out_size]
        self._prompts = problems[held_out_size:]

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """1 for the exact answer, 0 for anything else. An answer that did not end by itself is wrong.

        `format` tells a wrong number from a response that is no number. It is reported and not rewarded.
        """
        correct = float(finished and response == prompt.answer)
        well_formed = float(finished and _INTEGER.fullmatch(response) is not None)
        return Reward(total=correct, parts={"correct": correct, "format": well_formed})


def _all_problems() -> tuple[Prompt, ...]:
    problems = [_problem(a, sign, b) for sign, a, b in product(_OPERATIONS, _OPERANDS, _OPERANDS)]
    return tuple(sorted(problems, key=lambda problem: _stable_hash(problem.key)))


def _problem(a: int, sign: str, b: int) -> Prompt:
    text = f"{a}{sign}{b}"
    return Prompt(key=text, text=f"{text}=", answer=str(_OPERATIONS[sign](a, b)))


def _stable_hash(text: str) -> bytes:
    # Python's hash() of a string changes from process to process.
    return hashlib.sha256(text.encode()).digest()
