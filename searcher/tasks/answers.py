"""The final answer of a mathematical text: its boxes, and one notation for the many of an answer."""

import re
from collections import Counter
from collections.abc import Callable
from unicodedata import category, normalize

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# What stands between two boxes of one answer.
_SPACE = r"(?:[\s$.]|\\[()\[\],;:! ]|\\q?quad(?![a-z]))*+"
_AND = r"(?:\\text\{ ?(?:and|or) ?\}|(?:and|or)\b)"
_LISTED = re.compile(rf"{_SPACE}(?:[,;]{_SPACE}{_AND}?|{_AND}){_SPACE}")
_NO_ANSWER = ("proof", "proof omitted", "see solution", "tbd", "notfound", "not found", "null", "nan", "n/a")
_MAX_BOXES = 20

# What NFKC would make a letter or a digit of, and what neither it nor math-verify knows.
_SIGNS = {
    **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}", "-"),
    **dict.fromkeys("\N{DEGREE SIGN}\N{MASCULINE ORDINAL INDICATOR}", r"^\circ "),
    **dict.fromkeys("\N{FRACTION SLASH}\N{DIVISION SLASH}", "/"),
    **{"\N{RATIO}": ":", "\N{SET MINUS}": r"\setminus", "\N{IDEOGRAPHIC FULL STOP}": "."},
    **{sign: rf"\mathbb{{{normalize('NFKC', sign)}}}" for sign in "ℝℤℕℚℂ"},
    **{sign: f"^{{{normalize('NFKC', sign)}}}" for sign in "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"},
    **{sign: rf"\frac{normalize('NFKC', sign)}".replace("\N{FRACTION SLASH}", " ") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"},
    **{
        "¢": r"\text{ cents}",
        "∞": r"\infty",
        "∪": r"\cup",
        "∩": r"\cap",
        "∅": r"\emptyset",
        "∈": r"\in",
        "≈": r"\approx",
        "·": r"\cdot",
    },
}
_CHARACTERS = str.maketrans({sign: f"{plain} " if plain[-1].isalpha() else plain for sign, plain in _SIGNS.items()})

_LARGE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Units without `\\text`.
_SYMBOLS = r"[kcd]m|mm|kg|mg|ft|yd|lb|oz|m[lL]|mph|km/h|m/s|min|sec|hrs?|USD|[apAP]\.?[mM]|\\Omega|(?<= )[msghL]"

# In this order. The size of brackets and the style of letters mean nothing, and neither do money and degrees. A space
# between two numbers stays, as in 2 1/2, unless it separates thousands, and so does one after the comma of a list.
_SPELLINGS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"(?<=\^\{[-+n\d])\}\^\{(?=[-+n\d]\})", ""),
        (r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))", r"\\sqrt{\1\2}"),
        (r"√", r"\\sqrt"),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|[lL]arge)(?![A-Za-z])|(?<!\\)\\[()\[\]]", ""),
        (r"\\(?:text)?color ?\{[^{}]*\}|\\(?:bm|boldsymbol|underline|checkmark)(?![A-Za-z])", ""),
        (r"(?<=\d)\\,(?=\d{3}(?!\d))|(?<!\\)\\!", ""),
        # The line break of a matrix, `\\`, stays.
        (r"(?<=\\\\) ?\[[^\[\]]*(?:pt|em|ex|mm)\]", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|\\hspace ?\{[^{}]*\}|~", " "),
        (r"\s+", " "),
        (r" ?\{ ?, ?\} ?", ","),
        (r"\\lbrace(?![a-z])", r"\\{"),
        (r"\\rbrace(?![a-z])", r"\\}"),
        (r"\\varnothing(?![a-z])|\\\{ ?\\\}", r"\\emptyset "),
        (r"\\(?:Bbb|mathbf) ?(?:\{ ?([RZNQC]) ?\}|([RZNQC]))|\\([RZNQ])(?![A-Za-z])", r"\\mathbb{\1\2\3}"),
        # Constants and vectors are no units.
        (r"\\(?:text|mathrm) ?\{ ?([eidjk]) ?\}|\\math(?:bf|it) ?\{ ?([A-Za-z]) ?\}", r"\1\2 "),
        (r"(?:[,;]|\(|\\text\{ ?(?:for|where)[a-z ]*\})+ ?\(?[a-z] ?\\in ?\\mathbb\{[ZN]\}\)?$", ""),
        (r"\\(?:backslash|smallsetminus)(?![a-z])|(?<=\\mathbb\{[A-Z]\}) ?-(?= ?\\\{)", r"\\setminus "),
        (r"\\langle ?", "("),
        (r" ?\\rangle(?![a-z])", ")"),
        (r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|emph|math(?:rm|it|bf|sf|tt)|[mh]box) ?\{", r"\\text{"),
        (r"^ ?\\operatorname ?\{([A-Za-z ]+)\} ?$", r"\\text{\1}"),
        (r"(?:US(?= ?\\?\$) ?)?\\?\$|[€£¥₹\"“”]|^(?:\\text\{)?(?:USD|Rs\.?) ?\}?", ""),
        (r"\\text ?\{([^{}]*)\^\{(\d)\} ?\}", r"\\text{\1}^{\2}"),
        (r"^[ *]+|[ *.,;\\]+$", ""),
        (r"\{ ?(\w+) ?\\choose ?(\w+) ?\}", r"{\\binom{\1}{\2}}"),
        (r"^\{ ?([^{}]*)\}$", r"\1"),
        (r"^(\\text\{)? ?(?i:(?:the )?(?:final |correct )?answer(?: is|:)+|option|choice)[: *]*", r"\1"),
        (r"^(\\text\{)? ?(?i:about|approximately|around|roughly|exactly) ?|^\\approx(?![a-z])", r"\1"),
        (r"^\\text\{ ?(?:[Tt]he|[Aa]n|a) (?=[a-z]{2})", r"\\text{"),
        (r" ?\\text\{ ?(?:is|equals|is equal to) ?\}", "="),
        (r"\\text\{ ?([-+]?\d[\d,.:]*)", r"\1\\text{"),
        (r"(\\\{ ?[a-z] ?(?:\\mid|\\?\||:)[^{}]*(?:\{[^{}]*\}[^{}]*)*)\\text\{ ?or ?\}", r"\1\\lor "),
        (r",? ?(?:\\text\{[ ,]*(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))(?! ?\}?$)", ", "),
        (r"(?<=\d) ?(?:\\text\{ ?to ?\}|to) ?(?=\d)", ":"),
        (r" ?(?:\\text\{ ?percent(?:age)? ?\}|percent(?:age)?\b|\\?%)", r"\\%"),
        (r" ?\^ ?\{ ?\\text\{ ?(?:st|nd|rd|th) ?\} ?\}", ""),
        # An angle has a value: the sine of 30 degrees is not that of 30.
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc) ?(?:\^ ?\{?-?\d+\}?)?) ?([({]?) ?(-?\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\})"
            r" ?(?:\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree) ?[)}]?",
            r"\1{(\3\\cdot\\frac{\\pi}{180})}",
        ),
        (r" ?(?:\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree) ?(?:\\text\{ ?[CF] ?\}|[CF](?![a-z]))?", ""),
        (r"\\text\{ ?\}", ""),
        (r"\\[dtc](frac|binom)(?![a-z])", r"\\\1"),
        (r"(?<![A-Za-z])([A-Za-z])\(-(\d+)\)(?= ?=)", r"\1_{\2}"),
        (r"\\(frac|binom) ?(\d) ?(\d)", r"\\\1{\2}{\3}"),
        (r"\\lg(?![a-z])", r"\\log_{10}"),
        (r"\\log_ ?(?:e(?![a-z])|\{ ?e ?\})", r"\\ln "),
        (r"(?<![\d.,/])(\d+) (\d+)/(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
        (r"(?<=\d) (?=\d{3}(?!\d))", ""),
        (r"^(?:[^,(\[{]*=)? ?[+-]?[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", lambda found: found[0].replace(",", "")),
        (r"(?<![\d.])0,(?=\d)", "0, "),
        # A decimal is compared in as many digits.
        (r"\.(\d*)\\(?:overline|bar) ?\{(\d+)\}", r".\1" + 12 * r"\2"),
        (
            rf"(?<=\d) ?(\\text\{{ ?)?({'|'.join(_LARGE)})\b",
            lambda found: rf"\cdot 10^{{{_LARGE[found[2]]}}}{found[1] or ''}",
        ),
        (r"\\frac ?\{ ?(\\text\{[^{}]*\}) ?\} ?\{ ?(\\text\{[^{}]*\}) ?\}$", r"\1/\2"),
        (r"\\mu ?\\text\{", r"\\text{micro"),
        (
            rf"(?<=[\d}}])(?: ?({_SYMBOLS})| ((?=.*[A-Za-z]{{4}})[A-Za-z]{{2,}}(?: [A-Za-z]{{2,}})*))(?= ?(?:\^.*)?$)",
            r"\\text{\1\2}",
        ),
    )
]
# Words that make another value, a condition or a doubt of what precedes them.
_NO_UNIT = (
    r"(?i:and|or|nor|if|for|where|when|unless|except|more|less|fewer|than|not?|never|is|does|wrong|incorrect|"
    r"mod|modulo|plus|minus|over|choose|divided|multiplied|to the|times (?!per\b|an?\b|as\b|each\b)[^ ]+|squared|cubed|"
    r"factorial|dozens?|half|halves|thirds?|(?:four|fif|six|seven|eigh|nin|ten|twelf)ths?|"
    r"(?:hundred|thousand|[mb]illion|trillion)(?:th)?s?)"
)
# A trailing text is a unit, unless it has such a word or a number, and so is the base of a number.
_UNIT = re.compile(
    rf"(?:(?: |/|\\cdot|\()*\\text\{{(?!.*\b{_NO_UNIT}\b)(?:[^{{}}\d]|(?<=[a-z^])\d|(?<=\^-)\d)*\}}"
    r"(?: ?\^ ?\{?-?\d\}?)?\)?)+$"
    r"|(?<=\d)_ ?\{?\d+\}?$"
)
_SYNONYMS = """mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, in inch inche,
    ft foot feet, yd yard, mi mile, g gram, kg kilogram, lb, oz ounce, ml milliliter millilitre, l liter litre,
    s sec second, min minute, h hr hour, day, week, month, year, am, pm, dollar usd, cent, eur euro,
    gal gallon"""
_UNITS = {name: names.split()[0] for names in _SYNONYMS.split(",") for name in names.split()}
# A sign of money before a number. Two dollar signs are those of a formula.
_MONEY = re.compile(r"(?:\\text\{)?[ -]*(?:US ?)?(\\\$|\$(?!.*\$)|[€£¥₹])")
_CURRENCIES = {"€": "eur", "£": "gbp", "¥": "yen", "₹": "inr"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_UNIT_PART = re.compile(r"(/)|([a-z]+)(?: *\^ *(-?\d)(?!\d))?|(\S)")
Unit = frozenset[tuple[str, int]]


def why_no_gold(gold: str) -> str:
    """Return why a text is no gold answer, for an error message, "" if it may be one. Mathematics is not read."""
    gold = gold.strip(" \n\t$")
    if not gold:
        return "it is empty"
    if re.match(r"https?://|www\.", gold):
        return "it is an address"
    # What data sets write for a problem without an answer. `none` is an answer.
    word = re.sub(r"\\text *\{(.*)\}", r"\1", gold).strip(" .").lower()
    return "it says that there is none" if gold == "None" or word in _NO_ANSWER else ""


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` with balanced braces, or None.

    A box that contains boxes counts as a whole, without the inner commands: `\\boxed{x = \\boxed{5}}` is `x = {5}`.
    Boxes between which stands nothing but a comma, a semicolon, "and" or "or" are one answer, a list.
    """
    # One pass: a model may repeat an unclosed box thousands of times.
    opening = {box.end(): box.start() for box in _BOX.finditer(text)}
    unclosed: list[int] = []
    boxes = []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            unclosed.append(brace.end())
        elif brace.group() == "}" and unclosed and (content := unclosed.pop()) in opening:
            boxes.append((opening[content], content, brace.start()))
    contents: list[str] = []
    following = len(text)
    for start, content, end in reversed(boxes):
        # An inner box begins after the outer one.
        if end >= following:
            continue
        if len(contents) == _MAX_BOXES or (contents and not _LISTED.fullmatch(text, end + 1, following)):
            break
        contents.append(_BOX.sub("{", text[content:end]))
        following = start
    return ", ".join(dict.fromkeys(reversed(contents))) if contents else None


def plain(answer: str) -> tuple[str, Unit]:
    """Return an answer in the notation that math-verify reads, and its unit or base: empty for none, or an unknown one.

    A unit has pairs of a name and a power: m/s^2 is {("m", 1), ("s", -2)}.
    """
    answer = normalize("NFKC", answer.translate(_CHARACTERS))
    answer = "".join(letter for letter in answer if category(letter) != "Cf")
    sign = _MONEY.match(answer)
    money = _CURRENCIES.get(sign[1], "dollar") if sign else ""
    for spelling, replacement in _SPELLINGS:
        answer = spelling.sub(replacement, answer)
    value = _UNIT.sub("", answer)
    if not re.search(r"\d|\\(?!text)", value):
        return answer.strip(), Unit()
    unit = answer[len(value) :]
    if unit.startswith("_"):
        return value.strip(), Unit({("base", int("".join(filter(str.isdigit, unit))))})
    return value.strip(), _unit(re.sub(r"\\text|\\cdot|[{}]", " ", unit).replace(".", "").lower(), money, value)


def _unit(text: str, money: str, value: str) -> Unit:
    sign, power, powers = 1, 1, Counter({money: 1} if money else {})
    for slash, word, exponent, other in _UNIT_PART.findall(text.replace("mph", "mi/h")):
        # No plural of one or two letters: ms is not m.
        name = _UNITS.get(word) or (_UNITS.get(word.removesuffix("s")) if len(word) > 2 else None)
        if slash or word == "per":
            sign = -1
        elif word in _POWERS and power == 1:
            power = _POWERS[word]
        elif name and not other:
            powers[name] += sign * power * int(exponent or 1) * (name != money)
            power = 1
        else:
            return Unit()
    # The unit of a list may be that of its last element.
    return Unit() if power != 1 or "," in value else Unit((name, count) for name, count in powers.items() if count)


def normalised(answer: str) -> str:
    """Return an answer in one notation, so that equal strings are equal answers; the reverse need not hold.

    `\\dfrac{1}{2}` becomes `\\frac{1}{2}`, and `$1{,}000$` and `\\text{1000}` become `1000`.
    """
    answer = re.sub(r"\\text\{([^{}]*)\}|\\%", r"\1", plain(answer)[0])
    # A space stays between two digits, and before three digits in a list.
    return re.sub(r"(?<![\d,]) | (?!\d)|(?<=,) (?!\d{3}(?!\d))", "", answer)
