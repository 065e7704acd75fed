"""The final answer of a mathematical text: its boxes, and one notation for the many of an answer."""

import re
import unicodedata
from decimal import Decimal, InvalidOperation

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# What stands between two boxes of one answer.
_LISTED = re.compile(r"[\s$.]*+(?:[,;]|\\text\{ ?(?:and|or) ?\}|(?:and|or)\b)\s*+(?:(?:and|or)\b)?[\s$]*+")
_NO_ANSWER = ("proof", "notfound", "not found", "null", "nan", "n/a")
_MAX_BOXES = 20
_NUMBER = re.compile(r"[+-]?(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][+-]?\d{1,3})?", re.ASCII)
# Of a number that is written out in digits; longer ones are compared as they are.
_MAX_DIGITS = 100

# What NFKC would make a letter or a digit of, and what neither it nor math-verify knows.
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}", "-"),
        **dict.fromkeys("\N{DEGREE SIGN}\N{MASCULINE ORDINAL INDICATOR}", r"^\circ "),
        **dict.fromkeys("\N{FRACTION SLASH}\N{DIVISION SLASH}", "/"),
        **{sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)},
        **{
            sign: rf"\{name} "
            for sign, name in zip("∞∪∩∅∈≈·", ["infty", "cup", "cap", "emptyset", "in", "approx", "cdot"], strict=True)
        },
        "\N{SET MINUS}": r"\setminus ",
        "\N{RATIO}": ":",
        "\N{IDEOGRAPHIC FULL STOP}": ".",
    }
)
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))?")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar) ?\{(\d+)\}")
_LARGE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LARGE_NUMBER = re.compile(rf"(?<=\d) ?(\\text\{{)? ?({'|'.join(_LARGE)})\b")

# In this order. The size of brackets and the style of letters mean nothing, and neither do money and degrees. A space
# between two numbers stays, as in 2 1/2, unless it separates thousands, and so does one after the comma of a list.
_SPELLINGS = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|[lL]arge)(?![A-Za-z])|(?<!\\)\\[()\[\]]", ""),
        (r"\\(?:text)?color ?\{[^{}]*\}|\\(?:bm|boldsymbol|underline|checkmark)(?![A-Za-z])", ""),
        (r"(?<=\d)\\,(?=\d{3}(?!\d))|(?<!\\)\\!", ""),
        # The line break of a matrix, `\\`, stays.
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|\\hspace ?\{[^{}]*\}|~", " "),
        (r"\s+", " "),
        (r" ?\{ ?, ?\} ?", ","),
        (r"\\varnothing(?![a-z])|\\\{ ?\\\}", r"\\emptyset "),
        (r"\\(?:Bbb|mathbf) ?(?:\{ ?([RZNQC]) ?\}|([RZNQC]))|\\([RZNQ])(?![A-Za-z])", r"\\mathbb{\1\2\3}"),
        # Constants and vectors are no units.
        (r"\\(?:text|mathrm) ?\{ ?([eidjk]) ?\}|\\math(?:bf|it) ?\{ ?([A-Za-z]) ?\}", r"\1\2 "),
        (r"(?:[,;]|\(|\\text\{ ?(?:for|where)[a-z ]*\})+ ?\(?[a-z] ?\\in ?\\mathbb\{[ZN]\}\)?$", ""),
        (r"\\(?:backslash|smallsetminus)(?![a-z])", r"\\setminus "),
        (r"\\langle ?", "("),
        (r" ?\\rangle(?![a-z])", ")"),
        (r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|emph|math(?:rm|it|bf|sf|tt)|[mh]box) ?\{", r"\\text{"),
        (r"^ ?\\operatorname ?\{([A-Za-z ]+)\} ?$", r"\\text{\1}"),
        (r"\\?\$|[€£¥₹\"“”]|^(?:\\text\{)?(?:USD|Rs\.?) ?\}?", ""),
        (r"^[ *]+|[ *.,;\\]+$", ""),
        (r"^\{ ?([^{}]*)\}$", r"\1"),
        (r"^(\\text\{)? ?(?i:(?:the )?(?:final |correct )?answer(?: is|:)+|option|choice)[: *]*", r"\1"),
        (r"^(\\text\{)? ?(?i:about|approximately|around|roughly|exactly) ?|^\\approx(?![a-z])", r"\1"),
        (r"\\text\{ ?([-+]?\d[\d,.:]*)", r"\1\\text{"),
        (r"(?:\\text\{[ ,]*(?:and|or) ?\}|(?<![A-Za-z\\]),? ?(?:and|or)(?![A-Za-z]))(?! ?\}?$)", ", "),
        (r"(?<=\d) ?(?:\\text\{ ?to ?\}|to) ?(?=\d)", ":"),
        (r" ?(?:\\text\{ ?percent(?:age)? ?\}|percent(?:age)?\b|\\?%)", r"\\%"),
        (r" ?\^ ?\{ ?\\text\{ ?(?:st|nd|rd|th) ?\} ?\}", ""),
        (r" ?(?:\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree) ?(?:\\text\{ ?[CF] ?\}|[CF](?![a-z]))?", ""),
        (r"\\text\{ ?\}", ""),
        (r"\\[dtc](frac|binom)(?![a-z])", r"\\\1"),
        (r"(?<![A-Za-z])([A-Za-z])\(-(\d+)\)(?= ?=)", r"\1_{\2}"),
        (r"\\(frac|binom) ?(\d) ?(\d)", r"\\\1{\2}{\3}"),
        (r"(?<![\d.,/])(\d+) (\d+)/(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
        (r"(?<=\d) (?=\d{3}(?!\d))", ""),
        (r"(?<![\d.])0,(?=\d)", "0, "),
    )
]
# Words that make another value, a condition or a doubt of what precedes them.
_NO_UNIT = (
    r"(?i:and|or|nor|if|for|where|when|unless|except|more|less|fewer|than|not?|never|is|does|wrong|incorrect|[ap]\.?m|"
    r"mod|modulo|plus|minus|over|choose|divided|multiplied|to the|times (?!per\b|an?\b|as\b|each\b)[^ ]+|squared|cubed|"
    r"factorial|dozens?|half|halves|thirds?|(?:four|fif|six|seven|eigh|nin|ten|twelf)ths?|"
    r"(?:hundred|thousand|[mb]illion|trillion)(?:th)?s?)"
)
# A trailing text is a unit, unless it has such a word. So are bare words, and so are common symbols.
_UNIT = re.compile(
    rf"(?:(?: |/|\\cdot|\()*\\text\{{(?!.*\b{_NO_UNIT}\b)[^{{}}]*\}}(?: ?\^ ?\{{?-?\d\}}?)?\)?)+$"
    r"|(?<=[\d}]) ?(?:[kcd]m|mm|kg|mg|ft|yd|lb|oz|m[lL]|mph|km/h|m/s|min|sec|hrs?|USD)(?: ?\^ ?\{?[23]\}?)?$"
    rf"|(?<=[\d}}])(?= .*[A-Za-z]{{4}})(?!.*\b{_NO_UNIT}\b)(?: [A-Za-z]{{2,}})+$"
    r"|(?<=\d) [msghL]$"
    r"|(?<=\d)_ ?\{?\d+\}?$"
)
_SYNONYMS = """mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, in inch inche,
    ft foot feet, yd yard, mi mile, g gram, kg kilogram, s sec second, min minute, h hr hour, day, week, month, year"""
_UNITS = {name: names.split()[0] for names in _SYNONYMS.split(",") for name in names.split()}


def why_no_gold(gold: str) -> str:
    """Return why a text is no gold answer, for an error message, "" if it may be one. Mathematics is not read."""
    gold = gold.strip(" \n\t$")
    if not gold:
        return "it is empty"
    if re.match(r"https?://|www\.", gold):
        return "it is an address"
    # What data sets write for a problem without an answer. `none` is an answer.
    return "it says that there is none" if gold == "None" or gold.lower() in _NO_ANSWER else ""


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` with balanced braces, or None.

    A box that contains boxes counts as a whole, without the inner commands: `\\boxed{x = \\boxed{5}}` is `x = 5`. Boxes
    between which stands nothing but a comma, a semicolon, "and" or "or" are one answer, a list.
    """
    boxes = _boxes(text)
    contents: list[str] = []
    following = len(text)
    for first, start, end in reversed(boxes):
        if contents and first >= following:
            continue
        if len(contents) == _MAX_BOXES or (contents and not _LISTED.fullmatch(text, end + 1, following)):
            break
        inner = [box for box in boxes if first < box[0] < end]
        cuts = sorted([(begin, content) for begin, content, _ in inner] + [(close, close + 1) for *_, close in inner])
        kept = zip([start, *(after for _, after in cuts)], [*(before for before, _ in cuts), end], strict=True)
        contents.append("".join(text[begin:stop] for begin, stop in kept))
        following = first
    return ", ".join(dict.fromkeys(reversed(contents))) if contents else None


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """(start of the command, start of the content, closing brace) of each box, in the order of the closing braces."""
    # One pass: a model may repeat an unclosed box thousands of times.
    opening = {box.end(): box.start() for box in _BOX.finditer(text)}
    unclosed: list[int] = []
    boxes = []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            unclosed.append(brace.end())
        elif brace.group() == "}" and unclosed:
            content = unclosed.pop()
            if content in opening:
                boxes.append((opening[content], content, brace.start()))
    return boxes


def plain(answer: str) -> tuple[str, str]:
    """Return an answer in the notation that math-verify reads, and its unit or base: "" for none, or an unknown one."""
    answer = _SUPERSCRIPT.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found.group())}}}", answer)
    answer = _VULGAR_FRACTION.sub(_vulgar_fraction, answer)
    answer = _ROOT.sub(
        lambda found: rf"\sqrt{{{found.group(1) or found.group(2)}}}" if found.group(1) or found.group(2) else r"\sqrt",
        answer,
    )
    answer = unicodedata.normalize("NFKC", answer.translate(_CHARACTERS))
    answer = "".join(letter for letter in answer if unicodedata.category(letter) != "Cf")
    for spelling, replacement in _SPELLINGS:
        answer = spelling.sub(replacement, answer)
    answer = _REPEATING.sub(_repeating, answer)
    answer = _LARGE_NUMBER.sub(lambda found: rf"\cdot 10^{{{_LARGE[found.group(2)]}}}{found.group(1) or ''}", answer)
    value = _UNIT.sub("", answer)
    if not re.search(r"\d|\\(?!text)", value):
        return answer.strip(), ""
    return value.strip(), _unit(answer[len(value) :])


def normalised(answer: str) -> str:
    """Return an answer in one notation, so that equal strings are equal answers; the reverse need not hold.

    `\\dfrac{1}{2}` becomes `\\frac{1}{2}`, and `$1{,}000.0$`, `1e3` and `\\text{1000}` become `1000`.
    """
    answer = re.sub(r"\\text\{([^{}]*)\}|\\%", r"\1", plain(answer)[0])
    # A space stays between two digits, and before three digits in a list.
    answer = re.sub(r"(?<![\d,]) | (?!\d)|(?<=,) (?!\d{3}(?!\d))", "", answer)
    return _canonical_number(answer) if _NUMBER.fullmatch(answer) else answer


def _unit(text: str) -> str:
    if text.startswith("_"):
        return "".join(filter(str.isdigit, text))
    name = "".join(filter(str.isalpha, text.replace("\\text", ""))).lower()
    return _UNITS.get(name) or _UNITS.get(name.rstrip("s"), "")


def _vulgar_fraction(found: re.Match[str]) -> str:
    numerator, denominator = unicodedata.normalize("NFKC", found.group()).split("\N{FRACTION SLASH}")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _repeating(found: re.Match[str]) -> str:
    """`0.1\\overline{6}` as a fraction, `\\frac{15}{90}`."""
    whole, start, period = found.groups()
    value = int(whole + start + period) - int(whole + start or "0")
    return rf"\frac{{{value}}}{{{'9' * len(period)}{'0' * len(start)}}}"


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
