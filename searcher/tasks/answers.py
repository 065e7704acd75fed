"""The final answer of a mathematical text: its boxes, and one notation for the many of an answer."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from unicodedata import category, decomposition, normalize

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# What stands between two boxes of one answer.
_SPACE = r"(?:[\s$.]|\\[()\[\],;:! ]|\\q?quad(?![a-z]))*+"
_AND = r"(?:\\text\{ ?(?:and|or) ?\}|(?:and|or)\b)"
_LISTED = re.compile(rf"{_SPACE}(?:[,;]{_SPACE}{_AND}?|{_AND}){_SPACE}")
# What data sets write for a problem without an answer, alone or anywhere. `none`, `no solution` and `cannot be
# determined` are answers.
_NO_ANSWER = re.compile(
    r"""(?:[?.…_*#–—{}-]|\\(?:black)?square|\\[lc]?dots|\\q?quad)+|(?:https?://|www\.).*|see\ .*|omitted|prove[dn]?|
    (?:the\ |an?\ )?(?:proof|answer|solution|response)s?(?:\ (?:is\ |are\ )?(?:omitted|complete|missing|unknown|above|
    not\ \w+|below|(?:(?:may|will|can)\ )?(?:var(?:y|ies)|differ)))?|q\.?e\.?d|null|nan|n[/.]a|unknown|missing|tbd|
    todo\b.*|\[?(?:image|figure|diagram|picture|table|graph)\]?|(?:证明)?(?:过程)?(?:略|见\w*)|
    unanswerable|(?:(?:may|will)\ )?var(?:y|ies)|no\ (?:final\ )?answer(?:\ \w+)?|
    not\ ?(?:found|given|provided|available|applicable)|
    .*(?:\[/?asy\]|\\includegraphics|\\begin\{(?:asy|tikz)|!\[|<im(?:age|g)\b|\banswers?\ (?:\w+\ )?var(?:y|ies)\b|
    \b(?:see|refer\ to|shown\ in)\ (?:the\ |attached\ )?(?:figure|diagram|graph|solution|image|picture|proof)).*""",
    re.DOTALL | re.VERBOSE,
)
# A sentence about numbers, to which no answer is equal.
_SENTENCE = re.compile(
    r"(?=(?:.*?(?<![\\a-z])[a-z]{2,}\b){4})(?=.*\d).*\b(?:the|we|is|are|by|so|since|because|thus|therefore|depending)\b"
    r"|yes\b.*\d|no, .*\d",
    re.DOTALL,
)
_TEXT = re.compile(r"\\(?:text\w*|math[a-z]{2}|[mh]box) *\{([^{}]*)\}|\\[ ,;]")
_MAX_BOXES = 20

_LATEX = r"""∞ \infty  ∪ \cup  ∩ \cap  ∅ \emptyset  ∈ \in  ≈ \approx  · \cdot  • \cdot  ∘ \circ
    ⌊ \lfloor  ⌋ \rfloor  ⌈ \lceil  ⌉ \rceil  ⟨ \langle  ⟩ \rangle  ⩽ \le  ≦ \le  ⩾ \ge  ≧ \ge  △ \triangle  ∛ √[3]
    ∜ √[4]  ′ '  ″ ''  ∣ |"""
# What NFKC would make a letter or a digit of, and what neither it nor math-verify knows.
_SIGNS = {
    **dict.fromkeys("−–—\N{HYPHEN}\N{NON-BREAKING HYPHEN}", "-"),
    **dict.fromkeys("\N{MASCULINE ORDINAL INDICATOR}\N{RING ABOVE}", "\N{DEGREE SIGN}"),
    **dict.fromkeys("\N{FRACTION SLASH}\N{DIVISION SLASH}", "/"),
    **{"¢": " cents", "\N{RATIO}": ":", "\N{SET MINUS}": r"\setminus", "\N{IDEOGRAPHIC FULL STOP}": "."},
    **{sign: rf"\mathbb{{{normalize('NFKC', sign)}}}" for sign in "ℝℤℕℚℂ"},
    **dict(re.findall(r"(\S) +(\S+)", _LATEX)),
}
_CHARACTERS = str.maketrans({sign: f"{plain} " if plain[-1].isalpha() else plain for sign, plain in _SIGNS.items()})

_LARGE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MONEY_CODES = "USD|EUR|GBP|CAD|AUD|INR|JPY|CNY|CHF"
# An argument of a fraction, which needs no braces if it is one sign.
_ONE = r"(?:\{([^{}]*)\}|(\d|\\pi(?![a-z])|[A-Za-z](?![a-z])))"
_FONT = r"\\(rm|bf|it|sf|tt)(?![a-z]) ?"
# Units without `\\text`. Those that may be a product of variables follow a space.
_SYMBOLS = (
    rf"(?:[kcd]m|mm|kg|mg|ft|yd|lbs?|oz|m[lL]|mph|m/s|min|sec|hrs?|{_MONEY_CODES}|[apAP]\.?[mM]|\\Omega|[kMG]?Hz|[kM]?Wh"
    r"|kPa|k?cal|gal|mol|(?<= )(?:(?:sq|cu)\.? [a-z]+|yen|[msghLNJWVAK]|in|mi|ms|Pa|[kM][WJVN]|eV|[kKMGT]B))"
    r"(?:/(?:s|min|h|sec|hr|day|[ck]?m|k?g|m?L|gal|K|mol|C))?"
)
_BRACKETS = {"lbrace": r"\{", "rbrace": r"\}", "langle": "(", "rangle": ")"}
_LABELS = (
    r"(?:(?:final|minimum|maximum|total) )?(?:answer|result|total|sum|area|volume|perimeter|value|minimum|maximum)"
)
_PARTED = r"hours?|h|hrs?|min(?:ute)?s?|days?|weeks?|years?|feet|foot|ft|pounds?|lbs?|[k ]?m|kg|degrees?|dollars?"
_TEXT_UNIT = r"\\text\{[^{}]*\}(?: ?\^ ?\{?\d\}?)?"
# A condition for numbers: a set-builder or a relation.
CONDITION = re.compile(r"\\\{ ?[A-Za-z] ?(?:\\mid|\\?\||:|\\in)|[<>≠≤≥]|\\(?:[lg](?:t|eq?|eqslant)|neq?)(?![a-z])")

# In this order. The size of brackets and the style of letters mean nothing, and neither do money and degrees. A space
# between two numbers stays, as in 2 1/2, unless it separates thousands, and so does one after the comma of a list.
_SPELLINGS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"(?<![\w)}])\^\{([34])\}√", r"√[\1]"),
        (r"(?<![\\A-Za-z{])(sin|cos|tan|cot|log|ln)(?=[\d(_^\\{]| [\d(\\])", r"\\\1 "),
        (r"√(\[[34]\])?\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))", r"\\sqrt\1{\2\3}"),
        (r"√", r"\\sqrt"),
        (r"\\sqrt ?(\[\d\])? ?(?:\(([^()]*)\)|(?<=\])(\d)|(\\[dt]?frac(?:\{[^{}]*\}|\d){2}))", r"\\sqrt\1{\2\3\4}"),
        # For SymPy, an odd root of a negative number is complex.
        (r"\\sqrt ?\[([3579])\] ?\{ ?-(\d+(?:\.\d+)?|\\[dt]?frac\{\d+\}\{\d+\}) ?\}", r"(-\\sqrt[\1]{\2})"),
        (rf"(?<!frac)(?<!\}})\{{ ?{_FONT}([^{{}}]*)\}}", r"\\math\1{\2}"),
        (rf"{_FONT}(?:\{{([^{{}}]*)\}}|([^{{}}]+))", r"\\math\1{\2\3}"),
        (r"\\(?:(?:left|right)\.?|[bB]igg?[lrm]?|(?:display|text)style|[lL]arge)(?![A-Za-z])|(?<!\\)\\[()\[\]]", ""),
        (r"\\(?:text)?color ?\{[^{}]*\}|\\(?:bm|boldsymbol|underline|checkmark)(?![A-Za-z])", ""),
        # The line break of a matrix, `\\`, stays. Only the first of several spaces may start a match: linear time.
        (r"(?<=\d)\\,(?=\d{3}(?!\d))|(?:(?<!\s)\s++)?(?<!\\)\\!\s*|(?<=\\\\) ?\[[^\[\]]*(?:pt|em|ex|mm)\]", ""),
        (r"(?:(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|\\hspace ?\{[^{}]*\}|~|\s)+", " "),
        (r" ?(?:(?:\^|(?<=\d)) ?\\circ(?![a-z])|\^ ?\{ ?\\circ ?\}|\\degree(?![a-z])) ?", "\N{DEGREE SIGN}"),
        (r"\\colon(?![a-z])|(?<=\S) ?(?:\\mid(?![a-z])|\|) ?(?=[a-z] ?\\in(?![a-z]))", ":"),
        (r" ?(?:\\(?:text|mathrm|mbox) ?\{ ?(:|, ?) ?|\{ ?([,:]) ?)\} ?", r"\1\2"),
        (r" ?\\([lr](?:brace|angle))(?![a-z]) ?", lambda found: _BRACKETS[found[1]]),
        (r"([(\[]|\\\{) ?\{((?:[^{}]|\{[^{}]*\})*)\} ?([)\]]|\\\})", r"\1\2\3"),
        (r"(?<=[(\[])([^()\[\],;]+); ?([^()\[\],;]+)(?=[)\]])", r"\1, \2"),
        (r"\\varnothing(?![a-z])|\\\{ ?\\\}|^(?:\\text\{ ?)?(?i:(?:the )?empty set) ?\}?$", r"\\emptyset "),
        (r"\\(?:Bbb|mathbf) ?(?:\{ ?([RZNQ]) ?\}|([RZNQC]))|\\([RZNQ])(?![A-Za-z])", r"\\mathbb{\1\2\3}"),
        # Constants and vectors are no units.
        (r"\\(?:vec|hat) ?\{ ?\\?([ijk0])(?:math)? ?\}", r"\1 "),
        (r"\\(?:text|mathrm) ?\{ ?([eidjk]) ?\}|\\math(?:bf|it) ?\{ ?([A-Za-z0]) ?\}", r"\1\2 "),
        # Of what the variable of a function, or a parameter, may be.
        (r"(?:[,;]|\(|\\forall|\\text\{ ?(?:for|where)[a-z ]*\})+ ?\(?[a-z] ?\\in ?\\mathbb\{[ZNR]\}\)?$", ""),
        (
            r"^(?=[^=<>]*=|(?:(?![<>≠≤≥]|\\(?:[lg](?:t|eq?)|neq?)(?![a-z])).)*"
            r"(?:\\forall|\{[ ,(]*for (?:all|any|each|every)\b))(.*?)[ ,;(]*(?:\\forall|\\text\{[ ,(]*"
            r"(?:for|where) [a-z ]*\}) ?[a-z](?:\\text\{ ?is an? [a-z ]*\}| ?(?:\\geq?|≥) ?[01])?[ )]*$",
            r"\1",
        ),
        (r"^\\text\{ ?(?:for )?(?:all|only)(?: (?:positive )?integers)? ?\} ?(?=[kmn] ?(?:[<>=≥≤]|\\[lg]e))", ""),
        # `!=` is no relation after a number.
        (r"(?<=\d)!(?==)", "! "),
        (r"\\(?:backslash|smallsetminus)(?![a-z])|(?<=\\mathbb\{[A-Z]\}) ?-(?= ?\\\{)", r"\\setminus "),
        (r"^[a-z] ?\\in(?![a-z]) ?", ""),
        (r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|emph|math(?:rm|it|bf|sf|tt)|[mh]box) ?\{", r"\\text{"),
        (r"\\(?:text|operatorname) ?\{ ?((?:arc)?(?:sin|cos|tan|cot|csc)|cis|[gl]c[dm]) ?\}(?= ?\S)", r"\\\1 "),
        (r"^ ?\\operatorname ?\{([A-Za-z ]+)\} ?$", r"\\text{\1}"),
        (r"(\N{DEGREE SIGN}|%) ?,(?=\d)|,(?=\\?[$€£¥₹] ?\d)", r"\1, "),
        (rf"(?:US(?= ?\\?\$) ?)?\\?\$|[€£¥₹\"“”]|^(?:\\text\{{)?(?:{_MONEY_CODES}|Rs\.?) ?\}}?(?= ?[-\d.])", ""),
        (r"\\text ?\{([^{}]*)\^\{(-?\d)\} ?\}", r"\\text{\1}^{\2}"),
        # A decimal is compared in as many digits.
        (r"\.(\d*?)((\d)\3{2,}|(\d{2,6})\4+) ?(?:\.{3}|\\[lc]?dots)", r".\1\\bar{\3\4}"),
        (r"\\dot ?\{?(\d)\}?(?:(\d*)\\dot ?\{?(\d)\}?)?", r"\\bar{\1\2\3}"),
        (r"\.(\d*)\\(?:overline|bar) ?(?:\{(\d+)\}|(\d))|(?<=\d)\.\((\d+)\)", r".\1" + 12 * r"\2\3\4"),
        (r"(?<=[,+]) ?\.{3}|\\[lc]?dots[bcm]?(?![a-z])", r"\\ldots "),
        (r"^[ *`]+|[ *.,;\\`]+$|(?<=\d)\.(?= ?(?:[-+*/^})]|\\(?:cdot|times|text|pi|sqrt)))", ""),
        (r"\{ ?(\w+) ?\\choose ?(\w+) ?\}", r"{\\binom{\1}{\2}}"),
        (r"^\{ ?((?:[^{}]|\{[^{}]*\})*)\}$|^\\\{ ?([A-J]|\([^()]*\)) ?\\\}$", r"\1\2"),
        (r"^(\\text\{)? ?(?i:(?:the )?(?:final |correct )?(?:answer|option|choice)(?: is|:)*)(?![a-z])[: *]*", r"\1"),
        (r"^(\\text\{)? ?(?i:statement|figure|graph|diagram|equation|plan|point|set) (?=\(?[A-J]\b)", r"\1"),
        (r"(?<=\S) ?\\text\{[ ,(]*(?:or )?(?:about|approximately|approx\.?|roughly) ?\}", r"\\approx "),
        (r"^(\\text\{)? ?(?i:about|approximately|around|roughly|exactly) ?|^\\approx(?![a-z])", r"\1"),
        (r"^\\text\{ ?(?i:the|it)\b[A-Za-z ]*\b(?:is|are|equals)[ :]*\}| ?\\text\{ ?is the (?:final )?answer ?\}$", ""),
        (r"^\\text\{ ?(?:[Tt]he|[Aa]n|a) (?=[a-z]{2})", r"\\text{"),
        (r"^([+-]?)(?:\\text\{ ?)?(?i:infinity) ?\}?$", r"\1\\infty"),
        (r"^(?:\\text\{ ?)?(?i:all real(?: number)?s) ?\}?$", r"\\mathbb{R}"),
        (r"^(?:\\text\{ ?)?DNE ?\}?$", r"\\text{does not exist}"),
        (r"^(?:[a-z] ?\\equiv ?)?(-?\d+) ?\(?(?:\\[pb]|\\text\{ ?)mod ?\}? ?\{?(\d+)\}?\)?$", r"\1 \\pmod{\2}"),
        (r" ?\\text\{ ?(?:is|equals|is equal to) ?\}", "="),
        (r"^\\text\{([^{}]*=[^{}]*)\}$|^\\text\{ ?(?i:(?:the )?" + _LABELS + r") ?: ?\}", r"\1"),
        (r"\\text\{ ?([-+]?\d[\d,.:]*)", r"\1\\text{"),
        (rf"(\\text\{{ ?[a-z.]+),? and ?\}}(?= ?\d)|(?<=\d)( ?\\text\{{ ?(?:{_PARTED}) ?)\}} ?(?=\d)", r"\1\2}, "),
        (
            r",? ?(?:\\text\{[ ,]*(and|or) ?\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z]))(?! ?\}?$)",
            lambda found: rf" \l{found[1] or found[2]} " if CONDITION.search(found.string) else ", ",
        ),
        (r"(?<=\d) ?(?:\\text\{ ?to ?\}|to) ?(?=\d)", ":"),
        (r" ?(?:\\text\{ ?percent(?:age)? ?\}|percent(?:age)?\b|\\?%)", r"\\%"),
        (r"(?<=\d)(?:(?:st|nd|rd|th)(?![a-z])| ?(?:\^ ?)?\{? ?(?:\\text\{ ?)?(?:st|nd|rd|th)(?: ?\})+ ?$)", ""),
        # The base of a number.
        (r"^\((\w+)\)(?=_)", r"\1"),
        # An angle has a value: the sine of 30 degrees is not that of 30.
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc|cis) ?(?:\^ ?\{?-?\d+\}?)?) ?([({])? ?(-?[\d.]+|\\frac\{\d+\}\{\d+\})"
            r"°(?(2) ?[)}])",
            r"\1{(\3\\cdot\\frac{\\pi}{180})}",
        ),
        (r"(?<=\d)° ?(?:\\text\{ ?([CF]) ?\}|([CF])(?![a-z]))? ?$", r"\\text{degree \1\2}"),
        (r"° ?(?:\\text\{ ?[CF] ?\}|[CF](?![a-z]))?", ""),
        (r"^\\text\{ ?\} ?=|\\text\{ ?\}", ""),
        (r"\\(?:[dtcs]|nice|big)(frac|binom|c[au]p)(?![a-z])", r"\\\1"),
        (r"(?<![A-Za-z])([A-Za-z])\(-(\d+)\)(?= ?=)", r"\1_{\2}"),
        (rf"\\(frac|binom) ?{_ONE} ?{_ONE}", r"\\\1{\2\3}{\4\5}"),
        (r"\\cis ?(?:\{?\(((?:[^(){}]|\{[^{}]*\})*)\)\}?|((?:\\[a-z]+|\{[^{}]*\}|[\d/])+))", r"e^{i(\1\2)}"),
        (r"\^ ?(\\frac\{[^{}]*\}\{[^{}]*\}|-\d+)", r"^{\1}"),
        (r"\\lg(?![a-z])", r"\\log_{10}"),
        (r"\\log_ ?(?:e(?![a-z])|\{ ?e ?\})", r"\\ln "),
        (r"(?<![\d.,/])(\d+) (\d+)/(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
        (r"(?<=\d) (?=\d{3}(?!\d))", ""),
        (r"^(?:[^,(\[{]*=)? ?[+-]?[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", lambda found: found[0].replace(",", "")),
        (r"(?<=[ct}]\{)([1-9]\d{0,2}),(\d{3})(?=\})", r"\1\2"),
        (r"(?<![\d.])0,(?=\d)", "0, "),
        (
            rf"(?<=\d) ?(\\text\{{ ?)?({'|'.join(_LARGE)})\b",
            lambda found: rf"\cdot 10^{{{_LARGE[found[2]]}}}{found[1] or ''}",
        ),
        (rf"\\frac ?\{{ ?({_TEXT_UNIT}) ?\}} ?\{{ ?({_TEXT_UNIT}) ?\}}$", r"\1/\2"),
        (r"\\mu ?\\text\{", r"\\text{micro"),
        (
            rf"(?<=[\d}}])(?: ?({_SYMBOLS})| ((?=.*[A-Za-z]{{4}})[A-Za-z]{{2,}}(?: (?:an?|[A-Za-z]{{2,}}))*))"
            r"(?= ?(?:\^.*)?$|(?: ?\^ ?\d)?,)",
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
    r"(?: ?\^ ?\{?-?\d\}?)?\)?)+$|(?<=\d)_ ?\{?\d+\}?$"
)
_SYNONYMS = """nm nanometer nanometre, mm millimeter millimetre, cm centimeter centimetre, dm, m meter metre, km
    kilometer kilometre, in inch inche, ft foot feet, yd yard, mi mile, acre, ha hectare, mg milligram, g gram, kg
    kilogram, t ton tonne, lb pound gbp, oz ounce, ml milliliter millilitre, l liter litre, gal gallon, cup, pint
    pt, quart qt, tbsp tablespoon, tsp teaspoon, ms millisecond, s sec second, min minute, h hr hour, day, week,
    month, year yr, decade, century centurie, am, pm, dollar usd, cent, eur euro, yen jpy, inr rupee, hz hertz, khz
    kilohertz, mhz megahertz, ghz gigahertz, w watt, kw kilowatt, mw megawatt, wh, kwh, mwh, n newton, kn, j joule,
    kj kilojoule, mj, v volt, a amp ampere, ohm, pa pascal, kpa kilopascal, k kelvin, celsius c, fahrenheit f, degree
    deg, radian rad, mol mole, cal calorie, kcal, ev, kb kilobyte, mb megabyte, gb gigabyte, tb terabyte"""
_UNITS = {name: names.split()[0] for names in _SYNONYMS.split(",") for name in names.split()}
# A sign of money before a number. Two dollar signs are those of a formula.
_MONEY = re.compile(
    rf"^(?:\\text\{{)?[ -]*(?:US ?)?(\\\$|\$(?!.*\$)|[€£¥₹]|(?:{_MONEY_CODES})(?=[ }}]*[-\d.]))|([€£¥₹])[ .}}$]*$"
)
_CURRENCIES = {"€": "eur", "£": "lb", "¥": "yen", "₹": "inr"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_UNIT_PART = re.compile(r"(/)|([a-z]+)(?: *\^ *(-?\d)(?!\d))?|(\S)")
Unit = frozenset[tuple[str, int]]


def why_no_gold(gold: str, *, math: bool = False) -> str:
    """Return why a text, with `math` also a sentence about numbers, is no gold answer; "" if it may be one."""
    words = _TEXT.sub(r"\1", gold).lower().strip("() .$\n\t")
    if gold.strip() == "None" or _NO_ANSWER.fullmatch(words or "?"):
        return "it is no answer"
    is_sentence = math and _SENTENCE.match(_TEXT.sub("", gold).lower())
    return "it is a sentence, to which no answer is equal" if is_sentence else ""


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
    runs = groupby(answer.translate(_CHARACTERS), lambda letter: decomposition(letter)[:4])
    answer = "".join(_spelled(form, "".join(run)) for form, run in runs)
    answer = "".join(letter for letter in answer if category(letter) != "Cf")
    answer = re.sub(r"\\pounds(?![a-z])", "£", re.sub(r"\\euro(?![a-z])", "€", answer))
    sign = _MONEY.search(answer)
    money = sign and (sign[1] or sign[2])
    money = _CURRENCIES.get(money) or _UNITS.get(money.lower(), "" if money.isalpha() else "dollar") if money else ""
    for spelling, replacement in _SPELLINGS:
        answer = spelling.sub(replacement, answer)
    value = _UNIT.sub("", answer)
    if not re.search(r"\d|\\(?!text)", value):
        return answer.strip(), Unit()
    unit = answer[len(value) :]
    # Each element of a list may have it.
    value = value.replace(f"{unit},", ", " if unit else ",").strip()
    if unit.startswith("_"):
        return value, Unit({("base", int("".join(filter(str.isdigit, unit))))})
    return value, _unit(re.sub(r"\\text|\\cdot|[{}]", " ", unit).replace(".", "").lower(), money)


def _spelled(form: str, text: str) -> str:
    """Write characters that Unicode makes in one way of others as LaTeX does: `x²³` is x^{23}, ½ a fraction."""
    letters = [normalize("NFKC", letter).replace("\N{MINUS SIGN}", "-") for letter in text]
    if form == "<fra":
        return "".join(r"\frac{{{}}}{{{}}}".format(*letter.split("\N{FRACTION SLASH}")) for letter in letters)
    mark = {"<sup": "^", "<sub": "_"}.get(form)
    return mark + "{" + "".join(letters) + "}" if mark else normalize("NFKC", text)


def _unit(text: str, money: str) -> Unit:
    sign, power, powers = 1, 1, Counter({money: 1} if money else {})
    # `ms^{-1}` is m/s, and `in` before a word no inch.
    text = re.sub(r"\bms(?= *\^ *-)", "m s", re.sub(r"\bin(?= +[a-z])", "", text.replace("mph", "mi/h")))
    for slash, word, exponent, other in _UNIT_PART.findall(text):
        # No plural of one or two letters: ms is not m.
        name = _UNITS.get(word) or (_UNITS.get(word.removesuffix("s")) if len(word) > 2 else None)
        if other:
            return Unit()
        if slash or word == "per" or (word in ("a", "an", "each", "every") and powers):
            sign = -1
        elif word in _POWERS and power == 1:
            power = _POWERS[word]
        # Other words say what is counted, and are not compared.
        elif name:
            powers[name] += sign * power * int(exponent or 1) * (name != money)
            power = 1
    return Unit() if power != 1 else Unit((name, count) for name, count in powers.items() if count)


def normalised(answer: str) -> str:
    """Return an answer in one notation, so that equal strings are equal answers; the reverse need not hold.

    `\\dfrac{1}{2}` becomes `\\frac{1}{2}`, and `$1{,}000$` and `\\text{1000}` become `1000`.
    """
    answer = re.sub(r"\\text\{([^{}]*)\}|\\%", r"\1", plain(answer)[0])
    # A space stays between two digits, and before three digits in a list.
    return re.sub(r"(?<![\d,]) | (?!\d)|(?<=,) (?!\d{3}(?!\d))", "", answer)
