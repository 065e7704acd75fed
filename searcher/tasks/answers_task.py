"""Questions and answers in columns of any names, graded as text, number, regular expression or choice.

The graded part of a response is its last `\\boxed{...}`, else the rest of the last line that begins with `Answer:`,
else all of it. Thoughts, up to `</think>`, are never graded.
"""

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

from tba.common.errors import TaskError
from tba.searcher.tasks.answers import last_boxed, normalised
from tba.searcher.tasks.gsm8k import last_number
from tba.searcher.tasks.rows import RowsTask, answers_in, question_in, require_choices, text_in
from tba.searcher.tasks.task import CORRECT, Prompt, Reward
from tba.searcher.tasks.verdict import MAX_CHARACTERS

_PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
_ANSWER_COLUMNS = ("answer", "answers", "reward_model.ground_truth")
_PLAIN, _REGEX = "{prompt}", "regex"
_FONT = re.compile(r"^\s*\\(?:text\w*|mathrm|mathbf|mbox) ?\{([^{}]*)\}\s*$")
_ANSWER_LINE = re.compile(
    r"^[ \t*#>_]*+(?:the )?(?:final )?answer\s*+(?:is\s*+)?\**+\s*+:", re.IGNORECASE | re.MULTILINE
)
# The letter of a choice: in a sentence, alone or before its text, in brackets.
_OPEN = r"[\s*$\\({\[]*+(?:text\w*\{)?\(?"
# What follows the letter if the text names another one.
_OTHER = (
    r"[\s*$)\]}.:]*+(?:(?:[/&]|(?:,\s*+)?(?:or|and)\b|\\text\{ ?(?:or|and) ?\})\s*+(?:(?i:option|choice)\b)?"
    rf"{_OPEN}[A-HJ-Z]\b(?!')|[,;]{_OPEN}[A-HJ-Z]\b(?!'| [a-z])|[,;]?\s*+(?:\\text\w*\{{)?\([A-Z]\))"
)
_NAMED = re.compile(rf"\b(?i:answer|option|choice)\b(?:\s++(?:is|was))?\s*+:?{_OPEN}([A-HJ-Z])\b(?!')({_OTHER})?")
_ALONE = re.compile(rf"^{_OPEN}([A-Za-z])(?!(?i:{_OTHER}))(?:[\s*$)\]}}.:]*$|[)\]}}.:]\s*\S)")


class AnswersTask(RowsTask):
    """Prompts with answers from a local file or the hub. Raises TaskError if the data is missing or malformed.

    `prompt` and `answer` are columns, or fields below one such as `reward_model.ground_truth`; empty takes the first
    of prompt, question, problem, messages and of answer, answers, reward_model.ground_truth. A prompt is a text, which
    stands for `{prompt}` in `format`, or a list of messages. An answer is a text, a number, or a list of right answers.
    `grade` is "exact", "number", "regex" or "choice". `demonstration` is the column of a right response, with which
    guided responses begin; empty: none. `subset` and the splits are those of a data set on the hub.
    """

    name = "answers"

    def __init__(
        self,
        train: str,
        test: str = "",
        prompt: str = "",
        answer: str = "",
        grade: str = "exact",
        format: str = _PLAIN,
        subset: str = "",
        train_split: str = "train",
        test_split: str = "test",
        demonstration: str = "",
    ) -> None:
        if grade not in _READERS:
            raise TaskError(f"task answers: task.options.grade = {grade!r}: use one of {', '.join(_READERS)}")
        self._grade, self._format, self._demonstration = grade, format, demonstration
        columns = ((prompt,) if prompt else _PROMPT_COLUMNS, (answer,) if answer else _ANSWER_COLUMNS)
        self._load(train, test, columns, options=("prompt", "answer"), subset=subset, splits=(train_split, test_split))

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """Return 1 for a finished response with one of the right answers, else 0."""
        found = _READERS[self._grade][1](response.rpartition("</think>")[2])
        correct = float(finished and any(self._is_right(gold, found) for gold in (prompt.answer, *prompt.accepted)))
        return Reward(correct, {CORRECT: correct, "has_answer": float(found not in (None, ""))})

    def _prompt(self, row: Any, *columns: str) -> Prompt:
        golds, is_regex = answers_in(row, columns[1], several=True), self._grade == _REGEX
        for gold in golds:
            try:
                # No response would be right, or each.
                if self._is_right(gold, "" if is_regex else _READERS[self._grade][1](gold)) == is_regex:
                    raise ValueError(f"the answer {gold!r:.60} cannot be graded with grade = {self._grade!r}")
            except re.error as error:
                raise ValueError(f"the answer {gold!r:.60} is not a regular expression: {error}") from error
        shown = text_in(row, self._demonstration) if self._demonstration else ""
        question = question_in(row, columns[0], self._format, _PLAIN)
        asked = " ".join([question.get("text", ""), *(one[1] for one in question.get("messages", ()))])
        require_choices(row, asked, None if self._grade == "choice" else golds[0])
        return Prompt(**question, answer=golds[0], accepted=golds[1:], demonstration=shown)

    def _is_right(self, gold: str, found: Any) -> bool:
        if self._grade == _REGEX:
            return bool(re.search(gold, found))
        expected = _READERS[self._grade][0](gold)
        return expected is not None and bool(expected == found)


def _graded(text: str) -> str:
    if (boxed := last_boxed(text)) is not None:
        return _FONT.sub(r"\1", boxed)
    text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    lines = list(_ANSWER_LINE.finditer(text))
    return text[lines[-1].end() :].strip().partition("\n")[0] if lines else text


def _plain(text: str) -> str | None:
    """Return a text with single spaces, and without the asterisks and dollars around it; None if it is empty."""
    return " ".join(unicodedata.normalize("NFC", text).split()).strip("*$ ") or None


_number = partial(last_number, alone=True)


def _response_number(text: str) -> Decimal | None:
    """Return the number that a box holds, with any unit, else the last number of the graded part."""
    if (boxed := last_boxed(text)) is None:
        return last_number(_graded(text))
    return _number(re.sub(r"^[^<>!]*(?<!\\not)=", "", normalised(boxed[:MAX_CHARACTERS])))


def _letter(gold: str) -> str | None:
    return found[1].upper() if (found := _ALONE.search(gold.strip())) else None


def _choice(text: str) -> str | None:
    """Return the letter that a text chooses, None if it names none or several."""
    if named := _NAMED.findall(text):
        letter, other = named[-1]
        return None if other else str(letter)
    return _letter(text.strip().rpartition("\n")[2])


# How an answer of the data is read, and a response.
_READERS: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {
    "exact": (_plain, lambda text: _plain(_graded(text))),
    "number": (_number, _response_number),
    "choice": (_letter, lambda text: _choice(_graded(text))),
    _REGEX: (str, str),
}
