"""Whether an answer in mathematical notation is the gold answer, by the conventions of docs/tasks.md."""

import re
import threading
from functools import lru_cache
from typing import Any

from tba.common.errors import MissingExtra
from tba.searcher.tasks.answers import normalised, plain
from tba.searcher.tasks.equality import equal

# Of each parse and each comparison. Three of them take less than the default of task.reward_seconds.
LIMIT_SECONDS = 3
# A longer answer is compared as text only.
MAX_CHARACTERS = 1_000
_MAX_PARSED = 20_000

# The letter of a choice, as in `(C)`, and what may follow it, as in `\textbf{(B)}\ 12`.
_CHOICE = re.compile(r"\(? ?([A-J]) ?(?:[).:](?! ?,) ?(.*)|$)")
# A hyphen between single letters is a minus sign.
_WORDS = re.compile(r"[^\W\d_]+(?:(?:[ .'’,;]+|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2}))[^\W\d_]+)*")
_ONE_BRACKET = re.compile(r"[(\[][^(\[]*")
_RATIO = re.compile(r"[^:,=]+(?::[^:,=]+){2,}")
_EXPONENT = re.compile(r"^([+-]?[\d.]+)[eE]([+-]?\d+)$")
_TIME = re.compile(r"(\d{1,2}):([0-5]\d) ?(?:\\text\{)? ?(?:([ap])\.? ?m)?[. }]*", re.IGNORECASE)
# math-verify would drop a relation that nothing precedes.
_RELATION = re.compile(r"\\(?:not|neq?|[lg](?:t|eq?|eqslant))(?![a-z])|[<>≠≤≥]")


class OutsideMainThread(RuntimeError):
    """A task that needs the main thread is scored in another one."""


def is_right(gold: str, answer: str) -> bool:
    """Return whether an answer is the gold answer. Raises what SymPy and math-verify raise, also for a time limit."""
    if len(answer) > MAX_CHARACTERS:
        return gold.strip() == answer.strip()
    (gold, unit), (answer, other_unit) = plain(gold), plain(answer)
    if unit and other_unit and unit != other_unit:
        return False
    if normalised(gold) == normalised(answer):
        return True
    if _RELATION.match(answer) and not _RELATION.match(gold):
        return False
    for compare in (_same_choice, _same_words, _same_time):
        verdict = compare(gold, answer)
        if verdict is not None:
            return verdict
    return _same_value(gold, answer)


def is_text(gold: str) -> bool:
    """Return whether a gold answer is not mathematics: words, a choice or a time."""
    gold, _ = plain(gold)
    return bool(_words(gold) or _CHOICE.fullmatch(_without_text(gold)) or _TIME.fullmatch(gold))


def read(answer: str) -> Any:
    """Return a SymPy object, or None for what math-verify cannot read. Raises for its time limit."""
    from sympy import nan, zoo

    answer = _EXPONENT.sub(r"\1\\cdot 10^{\2}", answer)
    found = next((one for one in parse(f"\\boxed{{{answer}}}") if not isinstance(one, str)), None)
    return None if found in (nan, zoo) else found


def parse(text: str) -> list[Any]:
    """Return what math-verify finds in a text: a SymPy object, and the text that it is made of."""
    if threading.current_thread() is not threading.main_thread():
        raise OutsideMainThread("math-verify limits its time by a signal, so math is scored in the main thread only")
    library = math_verify()
    # A unit is cut off before: math-verify would take the variable of 5t for one.
    normalisation = library.parser.NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
    )
    targets = [library.LatexExtractionConfig(normalization_config=normalisation), library.ExprExtractionConfig()]
    parsed: list[Any] = library.parse(text, targets, parsing_timeout=LIMIT_SECONDS, raise_on_error=True)
    return parsed


def math_verify() -> Any:
    """Return the library. Raises MissingExtra."""
    try:
        import math_verify
        import math_verify.errors
        import math_verify.parser
        import math_verify.utils
    except ImportError:
        raise MissingExtra("math_verify", "math") from None
    return math_verify


def _same_choice(gold: str, answer: str) -> bool | None:
    """The letter decides, and what follows it has to be the same if both have it."""
    chosen, given = (_CHOICE.fullmatch(_without_text(one)) for one in (gold, answer))
    if chosen and given:
        rests = [rest for rest in (chosen[2], given[2]) if rest]
        return chosen[1] == given[1] and (len(rests) < 2 or is_right(*rests))
    if chosen:
        return bool(chosen[2]) and is_right(chosen[2], answer)
    return is_right(gold, given[2]) if given and given[2] else None


def _same_words(gold: str, answer: str) -> bool | None:
    """Words are compared without capitals, and a list of them in any order."""
    words = _words(gold)
    return words == _words(answer, always=True) if words else None


def _words(answer: str, always: bool = False) -> list[str]:
    """The words of an answer that has nothing else. math-verify reads words as products of letters, in any order."""
    text = _without_text(answer).strip("() .")
    if not _WORDS.fullmatch(text):
        return []
    items = ["".join(filter(str.isalpha, item)) for item in re.split("[,;]", text)]
    letters = max(map(len, re.findall(r"[^\W\d_]+", text))) < 2
    if not always and (letters or (text == answer and all(map(_is_product, items)))):
        return []
    return sorted(item.casefold() for item in items)


def _is_product(letters: str) -> bool:
    """Whether letters are a product rather than a word: ab and ba, and three or more in the order of the alphabet."""
    in_order = letters.islower() and list(letters) == sorted(set(letters))
    return letters != "no" and (in_order or (len(letters) < 3 and letters.islower()))


def _without_text(answer: str) -> str:
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", answer)


def _same_time(gold: str, answer: str) -> bool | None:
    """`2:30` is no ratio if it is compared with another time or ratio."""
    times = [_TIME.fullmatch(one) for one in (gold, answer)]
    if times[0] is None or ":" not in answer:
        return None
    fields = [[(field or "").lower().lstrip("0") for field in time.groups()] for time in times if time]
    return len(fields) == 2 and all((one or other) == (other or one) for one, other in zip(*fields, strict=True))


def _same_value(gold: str, answer: str) -> bool:
    """Compare mathematics. 10 % is 10 and 1/10, and 1:2:3 is 2:4:6."""
    pair = (gold, answer)
    if any(one.startswith(r"\{") and _ONE_BRACKET.fullmatch(other) for one, other in (pair, pair[::-1])):
        return False
    if all(_RATIO.fullmatch(one) for one in pair):
        pair = (_quotients(*gold.split(":")), _quotients(*answer.split(":")))
    numbers = [one.replace(r"\%", "") for one in pair]
    if _equal(*numbers):
        return True
    percent = [one != number for one, number in zip(pair, numbers, strict=True)]
    if percent[0] == percent[1]:
        return False
    hundredth = rf"\frac{{{numbers[percent[1]]}}}{{100}}"
    return _equal(numbers[0], hundredth) if percent[1] else _equal(hundredth, numbers[1])


def _quotients(first: str, *others: str) -> str:
    quotients = ", ".join(rf"\frac{{{other}}}{{{first}}}" for other in others)
    return f"({quotients})"


def _equal(gold: str, answer: str) -> bool:
    expected = _read_gold(gold)
    found = None if expected is None else read(answer)
    if found is None:
        return False
    return bool(math_verify().utils.timeout(LIMIT_SECONDS)(equal)(expected, found))


_read_gold = lru_cache(_MAX_PARSED)(read)


def is_readable(gold: str) -> bool:
    """Return whether an answer could equal this gold answer. Raises as `is_right` does."""
    return is_text(gold) or _read_gold(plain(gold)[0].replace(r"\%", "")) is not None
