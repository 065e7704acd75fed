"""The final answer of a mathematical text: the last `\\boxed{...}`, and a normal form of its notation."""

import re
from decimal import Decimal, InvalidOperation

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][+-]?\d{1,3})?", re.ASCII)
# Of a number that is written out in digits; longer ones are compared as they are.
_MAX_DIGITS = 100
# In this order. Spaces and the size of brackets mean nothing, and neither do units of percent, money and degrees. A
# space between two numbers stays, as in 2 1/2, unless it separates thousands.
_SPELLINGS = (
    (re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\displaystyle(?![a-z])"), ""),
    # `++` tries no shorter run: that would take time proportional to the square of the number of spaces.
    (re.compile(r"(?<![\d\s~])[\s~]+|(?<=\d)[\s~]++(?=\d{3}(?!\d)|(?!\d))"), ""),
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
    # One pass: a model may repeat an unclosed box thousands of times.
    opening = {box.end(): box.start() for box in _BOX.finditer(text)}
    unclosed: list[int] = []
    # (start of the command, start of the content, closing brace), in the order of the closing braces.
    boxes: list[tuple[int, int, int]] = []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            unclosed.append(brace.end())
        elif brace.group() == "}" and unclosed:
            content = unclosed.pop()
            if content in opening:
                boxes.append((opening[content], content, brace.start()))
    if not boxes:
        return None
    _, start, end = boxes.pop()
    inner = [box for box in boxes if box[0] >= start]
    commands = sorted([(begin, content) for begin, content, _ in inner] + [(close, close + 1) for *_, close in inner])
    kept = zip([start, *(after for _, after in commands)], [*(before for before, _ in commands), end], strict=True)
    return "".join(text[begin:stop] for begin, stop in kept)


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
