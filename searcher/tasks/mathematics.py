"""Mathematics with symbolic answers, such as MATH-500 (Lightman et al. 2023, arXiv 2305.20050).

The answer of a response is its last `\\boxed{...}`; of a response without one, the last expression that math-verify
finds. It is right if it is the gold answer after normalisation, or if math-verify says that both are equal.
"""

import re
import threading
from functools import lru_cache
from typing import Any

from tba.common.errors import MissingExtra, TaskError
from tba.common.log import get_logger
from tba.searcher.tasks.answers import last_boxed, normalised
from tba.searcher.tasks.rows import RowsTask, answers_in, question_in
from tba.searcher.tasks.task import CORRECT, Prompt, Reward

log = get_logger(__name__)

_PROBLEM_COLUMNS = ("problem", "question", "prompt")
_ANSWER_COLUMNS = ("answer", "final_answer", "solution")
_TEMPLATE = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
# Of each parse and each comparison. Three of them take less than the default of task.reward_seconds.
_LIMIT_SECONDS = 3
# A longer answer is compared as text only, and of a response without a box only the end is searched.
_MAX_CHARACTERS = 1_000
_MAX_PARSED_GOLD = 20_000
# math-verify reads only the sign of ASCII.
_MINUS = re.compile("[\N{MINUS SIGN}\N{EN DASH}]")


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
        _math_verify()
        if "{problem}" not in prompt:
            raise TaskError(f"task math: task.options.prompt = {prompt!r} has no {{problem}}: write where it stands")
        self._template = prompt
        columns = ((problem,) if problem else _PROBLEM_COLUMNS, (answer,) if answer else _ANSWER_COLUMNS)
        self._load(train, test, columns, subset=subset, splits=(train_split, test_split))

    def check(self) -> None:
        """Raise TaskError for a gold answer that math-verify cannot read: no response to it could be right."""
        math_verify = _math_verify()
        for prompt in (*self._prompts, *self._held_out):
            try:
                readable = _is_text(prompt.answer) or bool(_parsed_gold(prompt.answer))
            except (MemoryError, _OutsideMainThread):
                raise
            # math-verify and SymPy raise many types for what they cannot read. The former's time limit raises a
            # BaseException.
            except (Exception, math_verify.errors.TimeoutException) as error:  # noqa: BLE001
                log.warning("gold answer not read", task=self.name, prompt=prompt.key, error=repr(error))
                readable = False
            if not readable:
                raise TaskError(
                    f"task math: the gold answer {prompt.answer!r} of prompt {prompt.key} cannot be read as "
                    f"mathematics: correct or remove it; the prompt begins {prompt.text[:80]!r}"
                )

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """Return 1 for a right answer in a finished response, else 0.

        The part `verify_error` is 1 if math-verify failed or took too long: its answer is then unknown, and the reward
        0. Raises RuntimeError outside the main thread, where its time limits do not work.
        """
        math_verify = _math_verify()
        boxed = last_boxed(response)
        correct = failed = False
        if finished:
            try:
                correct = _same(prompt.answer, response, boxed)
            except (MemoryError, _OutsideMainThread):
                raise
            except (Exception, math_verify.errors.TimeoutException) as error:  # noqa: BLE001
                log.warning("answer not verified", task=self.name, prompt=prompt.key, error=repr(error)[:200])
                failed = True
        parts = {CORRECT: float(correct), "has_boxed": float(boxed is not None), "verify_error": float(failed)}
        return Reward(float(correct), parts)

    def _prompt(self, row: Any, *columns: str) -> Prompt:
        (answer,) = answers_in(row, columns[1])
        gold = answer.rpartition("####")[2] if "####" in answer else last_boxed(answer) or answer
        return Prompt(**question_in(row, columns[0], self._template, "{problem}"), answer=gold.strip())


class _OutsideMainThread(RuntimeError):
    """A task that needs the main thread is scored in another one."""


def _same(gold: str, response: str, boxed: str | None) -> bool:
    """Whether the answer of a response is the gold answer. Raises whatever math-verify raises."""
    if boxed is not None and normalised(boxed) == normalised(gold):
        return True
    if _is_text(gold) or (boxed is not None and len(boxed) > _MAX_CHARACTERS):
        return False
    found = _parse(response[-_MAX_CHARACTERS:] if boxed is None else _in_box(boxed))
    verified: bool = _math_verify().verify(
        _parsed_gold(gold), found, timeout_seconds=_LIMIT_SECONDS, raise_on_error=True
    )
    return verified


@lru_cache(_MAX_PARSED_GOLD)
def _parsed_gold(gold: str) -> list[Any]:
    return _parse(_in_box(gold))


def _in_box(answer: str) -> str:
    return f"\\boxed{{{_MINUS.sub('-', answer)}}}"


def _parse(text: str) -> list[Any]:
    if threading.current_thread() is not threading.main_thread():
        raise _OutsideMainThread("math-verify limits its time by a signal, so math is scored in the main thread only")
    parsed: list[Any] = _math_verify().parse(text, parsing_timeout=_LIMIT_SECONDS, raise_on_error=True)
    return parsed


def _is_text(gold: str) -> bool:
    """Whether an answer is words, such as a name. math-verify would read them as products of letters, in any order."""
    return "\\text" in gold and normalised(gold).isalpha()


def _math_verify() -> Any:
    try:
        import math_verify
        import math_verify.errors
    except ImportError:
        raise MissingExtra("math_verify", "math") from None
    return math_verify
