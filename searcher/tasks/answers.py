"""The final answer of a mathematical text: the last `\\boxed{...}`, and a normal form of its notation."""

import re
from decimal import Decimal, InvalidOperation

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][+-]?\d{1,3})?", re.ASCII)
# Of a number that is written out in digits; longer ones are compared as they are.
_MAX_DIGITS = 100
# In this order. Spaces and the size of brackets mean nothing, and neither do units of percent, money and degrees.
_SPELLINGS = (
    (re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\displaystyle(?![a-z])|[\s~]"), ""),
    (re.compile("[\N{MINUS SIGN}\N{EN DASH}]"), "-"),
    (re.compile(r"\\[dt]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[%$]|[%$]|\^\{?\\circ\}?|\N{DEGREE SIGN}"), ""),
)


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` with balanced braces, or None.

    A box that contains boxes counts as a whole, without the inner commands: `\\boxed{x = \\boxed{5}}` is `x = 5`.
    """
    last, end = None, 0
    for box in _BOX.finditer(text):
        # Inside the last one.
        if box.start() < end:
            continue
        closing = _closing_brace(text, box.end())
        if closing is not None:
            last, end = text[box.end() : closing], closing
    while last is not None and (inner := _BOX.search(last)):
        closing = _closing_brace(last, inner.end())
        if closing is None:
            break
        last = last[: inner.start()] + last[inner.end() : closing] + last[closing + 1 :]
    return last


def normalised(answer: str) -> str:
    """Return an answer in one notation, so that equal strings are equal answers; the reverse need not hold.

    `\\dfrac{1}{2}` becomes `\\frac{1}{2}`, and `$1{,}000.0$`, `1e3` and `\\text{1000}` become `1000`.
    """
    for spelling, plain in _SPELLINGS:
        answer = spelling.sub(plain, answer)
    answer = answer.removeprefix("\\(").removesuffix("\\)").removesuffix(".")
    return _canonical_number(answer) if _NUMBER.fullmatch(answer) else answer


def _canonical_number(text: str) -> str:
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return text
    if number.adjusted() > _MAX_DIGITS or len(text) > _MAX_DIGITS:
        return text
    digits = f"{number:f}"
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits in ("-0", "") else digits


def _closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes the one before `start`, None if there is none."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return None
