"""Two-digit additions and subtractions: "47+38=" is answered with "85", "23-61=" with "-38".

The task has 16,200 problems and needs no data file. A searcher scores thousands of answers per second, so a complete
run is possible on a laptop.
"""

import hashlib
import operator
import re
from collections.abc import Callable
from itertools import product

from tba.searcher.tasks.task import ListedTask, Prompt, Reward

_OPERANDS = range(10, 100)
_HELD_OUT = 256
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub}
_INTEGER = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)


class ArithmeticTask(ListedTask):
    """Every sum and difference of two two-digit numbers, in the order of hashes; the first 256 are held out."""

    name = "arithmetic"

    def __init__(self) -> None:
        problems = sorted(
            (
                Prompt(f"{a}{sign}{b}", f"{a}{sign}{b}=", answer := str(operation(a, b)), demonstration=answer)
                for (sign, operation), a, b in product(_OPERATIONS.items(), _OPERANDS, _OPERANDS)
            ),
            # Python's hash() of a string differs between processes.
            key=lambda problem: hashlib.sha256(problem.key.encode()).digest(),
        )
        self._held_out, self._prompts = problems[:_HELD_OUT], problems[_HELD_OUT:]

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """Return 1 for the exact answer, 0 for anything else. An answer that was cut off by its length is wrong.

        The part `format` distinguishes a wrong number from a response that is not a number. It is not rewarded.
        """
        correct = float(finished and response == prompt.answer)
        well_formed = float(finished and _INTEGER.fullmatch(response) is not None)
        return Reward(total=correct, parts={"correct": correct, "format": well_formed})
