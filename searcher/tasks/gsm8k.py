"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): grade-school word problems; the answer is the last number.

Prompt format and reward follow the TBA paper (section B.1): the reward is 1 if the response is finished and its last
number is the gold answer. The data is a file with the columns `question` and `answer` (final answer after `#### `), or
a data set on the Hugging Face hub.
"""

import re
from decimal import Decimal
from typing import Any

from tba.searcher.tasks.answers import why_no_gold
from tba.searcher.tasks.rows import RowsTask, answers_in, key_of, text_in
from tba.searcher.tasks.task import CORRECT, Prompt, Reward

# Thousands are separated as in 1,234,567 and, in India, as in 12,34,567.
# A number without digits before its point follows neither a word nor another point: "...5" and "end.5" are 5.
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d\d){1,6},\d{3}|\d+)"
_NUMBER = re.compile(rf"(?:(?<!\d)-?{_WHOLE}(?:\.\d+)?|(?<![\w.])-?\.\d+)(?:[eE][+-]?\d{{1,6}}(?!\w))?")
# Thousands with plain spaces, where nothing else is meant ("2 100 bills" are two numbers, "100 200 300" three): after a
# sign or word for a result, a currency, or as the whole text; and up to the end of a line, bracket or sentence, a
# currency or a rate.
_CURRENCY = r"(?:(?:US|[AC])?\\*(?:\${1,2}|[€£¥₹]|Rs\.?))"
_OPENER = (
    rf"(?:(?:(?:=|####|\\boxed\{{|\b[Aa]nswer(?: is:?|:)\**|\A\s*+(?!.*\n\s*\S)) *|\*\*){_CURRENCY}?|{_CURRENCY}) ?-?"
)
_END = r"(?= ?(?:[$€£¥₹]|(?:dollars|euros|per|an?|each|every)\b)|(?:\*\*|\\?[)}\]]|[.!?](?!\w))|[ \r]*$)"
_SPACED = rf"{_OPENER}[1-9](?:\d{{0,2}}|\d? \d{{3}}) \d{{3}}(?:\.\d+)?{_END}"
# What precedes a number that is stated: only there a dash with a space behind it is a sign.
_STATES = r"(?:\A\s*+(?!.*\n\s*\S)|[=#:({*]|\b(?:is|was|of|by|to|equals|at)\b)"
# The minus signs of Unicode, also before a currency, and the ways of LaTeX to separate thousands. A dash after a number
# is that of a range.
_SPELLINGS = (
    (re.compile("[\N{MINUS SIGN}\N{NON-BREAKING HYPHEN}\N{FULLWIDTH HYPHEN-MINUS}]"), "-"),
    (re.compile(r"(?<![\d)\]$%])(?<![\d)\]$%] )\N{EN DASH}(?=[$€£¥₹\d.])"), "-"),
    (re.compile(r"(?:\\(?:text\w*|mathrm|mbox) ?)?\{ ?(-?) ?(\\?[$€£¥₹]) ?\}"), r"\1\2"),
    (re.compile(rf"({_STATES} ?\$?)[-\N{{EN DASH}}\N{{EM DASH}}] (?={_CURRENCY} ?[\d.])"), r"\1-"),
    (re.compile(rf"([=#] ?)[-\N{{EN DASH}}] (?=[\d.])|({_STATES} ?)(?:minus|[Nn]egative) (?=[$€£\d.])"), r"\1\2-"),
    (
        re.compile(r"(?<![\w.,])(\d[\d,]*+|) ?([¼½¾])"),
        lambda found: (found[1] or "0") + {"¼": ".25", "½": ".5", "¾": ".75"}[found[2]],
    ),
    (re.compile(rf"(?<!\d)(?<!\d\$)-(?:\*\*)?{_CURRENCY}\s?(?=[\d.])"), "-"),
    (re.compile(r"\{,\}|,\\!|，"), ","),
    (re.compile(r"(?<=\d)[kK](?!\w)"), "e3"),
    # Formulas of substances: CO2, H2O.
    (re.compile(r"\b(?:CO|SO|NO|CH|NH|H|N|O)[2-4](?=O?(?!\w))(?!\.\d)"), ""),
    # No number is 000: groups of three that end in it are one number.
    (
        re.compile(r"(?<![\w.,])[1-9]\d{0,2}(?: \d{3}(?!\w|[.,]\d))+"),
        lambda found: found[0].replace(" ", "") if found[0].endswith(" 000") else found[0],
    ),
    # The power of a unit.
    (re.compile(r"(?<=[A-Za-z}]) ?\^ ?\{?[23]\}?(?!\.?\d)"), ""),
    (re.compile(r"(?<=\d)( ?(?:[cdk]?m|ft|in|yd))[23](?![\w^])"), r"\1"),
    (re.compile(r"(?<=\d)(?:\\[,!]|[\u00a0\u2007\u2009\u202f])(?=\d{3}(?!\d))"), ""),
    (re.compile(_SPACED, re.MULTILINE), lambda found: re.sub(r"(?<=\d) ", "", found[0])),
    (re.compile(r"(?<![\w.])\d{1,3}(?:['’_]\d{3})+(?!\w)"), lambda found: re.sub(r"\D", "", found[0])),
)
# The solutions have results of a calculator, as in "48/2 = <<48/2=24>>24".
_CALCULATOR = re.compile(r"<<[^<>]*>>")


class Gsm8kTask(RowsTask):
    """GSM8K from local files or the hub. Raises TaskError if the data is missing or malformed."""

    name = "gsm8k"

    def __init__(self, train: str, test: str = "") -> None:
        self._load(train, test, (("question",), ("answer",)), subset="main")

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        found = last_number(response)
        # The last number of an unfinished response may be an intermediate result, or half of a number.
        correct = float(finished and found is not None and found == last_number(prompt.answer))
        return Reward(total=correct, parts={CORRECT: correct, "has_number": float(found is not None)})

    def _prompt(self, row: Any, *columns: str) -> Prompt:
        question, (solution,) = text_in(row, columns[0]), answers_in(row, columns[1])
        answer = solution.rpartition("####")[2].strip()
        if last_number(answer) is None or why_no_gold(answer):
            raise ValueError(f"the answer {answer!r:.60} has no final number")
        text = f"[MATH TASK] Problem:\n{question}\n\nSolution:\n"
        return Prompt(key_of(question), text, answer, demonstration=_CALCULATOR.sub("", solution))


def last_number(text: str, *, alone: bool = False) -> Decimal | None:
    """Return the last number in a text, or None if it has none. Thousands separators and exponents are allowed.

    With `alone` it is None for a text that has more than a number and a sign of dollars or percent.
    """
    for spelling, plain in _SPELLINGS:
        text = spelling.sub(plain, text)
    numbers = _NUMBER.findall(text)
    if not numbers or (alone and text.strip(" $%+") != numbers[-1]):
        return None
    return Decimal(numbers[-1].replace(",", ""))
