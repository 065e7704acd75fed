"""Questions and answers in columns of any names, graded as text, number, regular expression or choice.

The graded part of a response is its last `\\boxed{...}`, else what follows the last `Answer:` at the beginning of a
line, up to the end of the line, else the whole; thoughts up to `</think>` never count.
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from tba.common.errors import TaskError
from tba.common.rendering import message_of, variables_of
from tba.searcher.tasks.answers import last_boxed
from tba.searcher.tasks.gsm8k import last_number
from tba.searcher.tasks.rows import column_of, is_file, key_of, load_prompts, read_rows, text_of, value_in
from tba.searcher.tasks.task import CORRECT, Prompt, Reward

_PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
_ANSWER_COLUMNS = ("answer", "answers", "reward_model.ground_truth")
_PLAIN = "{prompt}"
_ANSWER_LINE = re.compile(r"^[\s*#>_]*(?:the )?(?:final )?answer\s*(?:is\s*)?\**\s*:", re.IGNORECASE | re.MULTILINE)
# The letter of a choice: named in a sentence; alone, or before its text; in brackets.
_OPEN = r"[\s*$\\({\[]*(?:text\w*\{)?\(?"
_NAMED = re.compile(rf"\b(?i:answer|option|choice)\b(?:\s+(?:is|was))?\s*:?{_OPEN}([A-HJ-Z])\b(?!')")
_ALONE = re.compile(rf"^{_OPEN}([A-Za-z])(?:[\s*$)\]}}.:]*$|[)\]}}.:]\s*\S)")
_BRACKETED = re.compile(r"\(([A-Z])\)")


class AnswersTask:
    """Prompts with answers from a local file or the hub. Raises TaskError if the data is missing or malformed.

    `prompt` and `answer` are columns, or fields below them such as `reward_model.ground_truth`; empty takes the first
    of prompt, question, problem, messages and of answer, answers, reward_model.ground_truth. A prompt is a text, which
    stands for `{prompt}` in `format`, or a list of messages. An answer is a text, a number, or a list of right answers.
    `grade` is "exact", "number", "regex" or "choice". `subset` and the splits are those of a data set on the hub.
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
    ) -> None:
        if grade not in ("regex", *_READERS):
            raise TaskError(f"task answers: task.options.grade = {grade!r}: use {', '.join(_READERS)} or regex")
        if _PLAIN not in format:
            raise TaskError(f"task answers: task.options.format = {format!r} has no {_PLAIN}: write where it stands")
        self._grade, self._format = grade, format
        self.notes: list[str] = []

        def load(source: str, split: str) -> list[Prompt]:
            columns: list[str] = []

            def prompt_of(row: Any) -> Prompt:
                # Of the first row, for all.
                if not columns:
                    columns.append(column_of(row, (prompt,) if prompt else _PROMPT_COLUMNS))
                    columns.append(column_of(row, (answer,) if answer else _ANSWER_COLUMNS))
                return self._prompt(row, *columns)

            return load_prompts(self.name, read_rows(self.name, source, split, subset or None), prompt_of, self.notes)

        self._prompts = load(train, train_split)
        self._held_out = load(test or train, test_split) if test or not is_file(train) else []

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """Return 1 for a finished response with one of the right answers, else 0."""
        golds, text = (prompt.answer, *prompt.accepted), response.rpartition("</think>")[2]
        if self._grade == "regex":
            found: Any = text.strip() or None
            right = any(re.search(gold, text) for gold in golds)
        else:
            read_gold, read_response = _READERS[self._grade]
            found = read_response(_answer_in(text))
            right = found is not None and found in map(read_gold, golds)
        correct = float(finished and right)
        return Reward(correct, {CORRECT: correct, "has_answer": float(found is not None)})

    def _prompt(self, row: Any, prompt: str, answer: str) -> Prompt:
        given = value_in(row, answer)
        golds = [text_of(one, f"the column {answer}", numbers=True) for one in _listed(given)]
        if not golds:
            raise ValueError(f"the column {answer} is an empty list")
        for gold in golds:
            self._require_gradable(gold)
        asked = value_in(row, prompt)
        if isinstance(asked, list):
            messages = tuple(message_of(message) for message in asked)
            if not messages or messages[-1][0] == "assistant" or self._format != _PLAIN:
                raise ValueError(f"the column {prompt} has messages: the last is the user's, and format has no effect")
            return Prompt(
                key_of(json.dumps(messages)),
                answer=golds[0],
                messages=messages,
                template_kwargs=variables_of(row),
                accepted=golds[1:],
            )
        text = text_of(asked, f"the column {prompt}")
        variables = variables_of(row)
        shown = self._format.replace(_PLAIN, text)
        return Prompt(key_of(text), shown, golds[0], template_kwargs=variables, accepted=golds[1:])

    def _require_gradable(self, gold: str) -> None:
        """Raise ValueError for an answer to which no response is right, or each."""
        if self._grade == "regex":
            try:
                if re.search(gold, ""):
                    raise ValueError(
                        f"the regular expression {gold!r:.60} matches the empty response, so each is right"
                    )
            except re.error as error:
                raise ValueError(f"the answer {gold!r:.60} is no regular expression: {error}") from error
            return
        read_gold, read_response = _READERS[self._grade]
        expected = read_gold(gold)
        if expected is None or read_response(_answer_in(gold)) != expected:
            raise ValueError(f"the answer {gold!r:.60} cannot be graded with task.options.grade = {self._grade!r}")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _answer_in(text: str) -> str:
    if (boxed := last_boxed(text)) is not None:
        return boxed
    lines = list(_ANSWER_LINE.finditer(text))
    return text[lines[-1].end() :].strip().partition("\n")[0] if lines else text


def _plain(text: str) -> str | None:
    """Return a text without white space that means nothing, and without the asterisks and dollars around it."""
    return " ".join(unicodedata.normalize("NFC", text).split()).strip("*$ ") or None


def _number(gold: str) -> float | None:
    """Return the number that a text is, as `last_number` reads it; None if there is anything else."""
    try:
        number = float(gold.strip(" $%").replace("{,}", ",").replace(",", "").replace("\N{MINUS SIGN}", "-"))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _letter(gold: str) -> str | None:
    found = _ALONE.search(gold.strip())
    return found[1].upper() if found else None


def _choice(text: str) -> str | None:
    """Return the letter that a response chooses, None if it names none or several."""
    if named := _NAMED.findall(text):
        return str(named[-1])
    if alone := _ALONE.search(text.strip().rpartition("\n")[2].strip()):
        return alone[1].upper()
    bracketed = set(_BRACKETED.findall(text))
    return bracketed.pop() if len(bracketed) == 1 else None


# How to read an answer of the data, and the answer of a response; the results are compared.
_READERS: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {
    "exact": (_plain, _plain),
    "number": (_number, last_number),
    "choice": (_letter, _choice),
}
