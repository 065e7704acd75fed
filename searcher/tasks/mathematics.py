"""Mathematics with symbolic answers, such as MATH-500 (Lightman et al. 2023, arXiv 2305.20050).

The answer of a response is its last `\\boxed{...}`; of a response without one, the last expression that math-verify
finds. Which answers are right, `verdict.py` decides.
"""

import re
from typing import Any

from tba.common.errors import TaskError
from tba.common.log import get_logger
from tba.searcher.tasks.answers import last_boxed, why_no_gold
from tba.searcher.tasks.rows import RowsTask, answers_in, question_in
from tba.searcher.tasks.task import CORRECT, Prompt, Reward
from tba.searcher.tasks.verdict import MAX_CHARACTERS, NotMainThread, is_readable, is_right, is_text, math_verify, parse

log = get_logger(__name__)

_PROBLEM_COLUMNS = ("problem", "question", "prompt")
_ANSWER_COLUMNS = ("answer", "final_answer", "solution")
_TEMPLATE = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
# What a response without a box states as its answer: words, for which math-verify does not look, or two numbers.
_STATED = re.compile(r"(?i:answer)\W{0,5}(?:is|:)[\s*:$]*([^\n]*)")
_HEDGED = re.compile(r"not\b|.*\b(?:or|and) [$\\({\d-]")


class MathTask(RowsTask):
    """Problems from local files or the hub. Raises TaskError if the data is missing or malformed, MissingExtra.

    `problem` and `answer` are the names of columns; empty takes the first of problem, question, prompt and of answer,
    final_answer, solution. A problem may also be a list of messages. The gold answer is what follows `####`, else the
    last `\\boxed{...}`, else the whole text. `prompt` is the text of a prompt, with the problem in place of
    `{problem}`. `subset` and the splits are those of a data set on the hub.
    """

    name = "math"

    def __init__(
        self,
        train: str,
        test: str = "",
        problem: str = "",
        answer: str = "",
        prompt: str = _TEMPLATE,
        subset: str = "",
        train_split: str = "train",
        test_split: str = "test",
    ) -> None:
        math_verify()
        self._template = prompt
        columns = ((problem,) if problem else _PROBLEM_COLUMNS, (answer,) if answer else _ANSWER_COLUMNS)
        self._load(train, test, columns, options=("problem", "answer"), subset=subset, splits=(train_split, test_split))

    def check(self) -> None:
        """Raise TaskError for a gold answer that math-verify cannot read: no response to it could be right."""
        bad = [prompt for prompt in (*self._prompts, *self._held_out) if not self._is_readable(prompt)]
        if bad:
            others = f"; {len(bad) - 1} more, such as {[one.answer for one in bad[1:6]]}" if bad[1:] else ""
            raise TaskError(
                f"task math: the gold answer {bad[0].answer!r} of prompt {bad[0].key} cannot be read as mathematics: "
                f"correct or remove it; the prompt begins {bad[0].text[:80]!r}{others}"
            )

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """Return 1 for a right answer in a finished response, else 0.

        Raises what SymPy and math-verify raise, also for a time limit: whether the answer is right is then unknown.
        Raises RuntimeError outside the main thread, where their time limits do not work.
        """
        boxed, gold = last_boxed(response), prompt.answer
        correct = float(finished and is_right(gold, _answer(response, boxed, gold)))
        return Reward(correct, {CORRECT: correct, "has_boxed": float(boxed is not None)})

    def _is_readable(self, prompt: Prompt) -> bool:
        try:
            return is_readable(prompt.answer)
        except (MemoryError, NotMainThread):
            raise
        # A BaseException. On a busy machine any answer may take so long, and it can be read another time.
        except math_verify().errors.TimeoutException:
            log.warning("gold answer not read in time", task=self.name, prompt=prompt.key)
            return True
        # They raise many types for what they cannot read.
        except Exception as error:  # noqa: BLE001
            log.warning("gold answer not read", task=self.name, prompt=prompt.key, error=repr(error)[:200])
            return False

    def _prompt(self, row: Any, *columns: str) -> Prompt:
        answer, *others = answers_in(row, columns[1], several=True)
        if others:
            raise ValueError(f"the column {columns[1]} has {1 + len(others)} answers: write one, as a list in one text")
        gold = answer.rpartition("####")[2] if "####" in answer else last_boxed(answer) or answer
        if reason := why_no_gold(gold, math=True):
            raise ValueError(f"the gold answer {gold!r:.60}: {reason}: correct or remove the row")
        solution = row.get("solution")
        question = question_in(row, columns[0], self._template, "{problem}")
        return Prompt(**question, answer=gold.strip(), demonstration=solution if isinstance(solution, str) else "")


def _answer(response: str, boxed: str | None, gold: str) -> str:
    """The answer of a response: its box, or what math-verify finds in a response without one."""
    if boxed is not None:
        return boxed
    end = re.sub(r"</?answer>", "\n", response[-MAX_CHARACTERS:])
    stated = _STATED.findall(end)
    if stated and (is_text(gold) or _HEDGED.match(stated[-1])):
        return str(stated[-1])
    return next((one for one in reversed(parse(end)) if isinstance(one, str)), "")
