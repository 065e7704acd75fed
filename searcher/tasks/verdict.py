"""Whether an answer in mathematical notation is the gold answer, by the conventions of docs/tasks.md.

math-verify reads both. It takes two numbers for one if their difference is below 1e-15, as that of any two
probabilities near 2^-60. Here the difference of two numbers must be 0 in more digits than a response holds. Expressions
with variables must agree where these have sample values, and then be equal for math-verify, too.
"""

import re
import threading
from functools import lru_cache
from itertools import accumulate
from string import ascii_letters, ascii_lowercase
from typing import Any

from tba.common.errors import MissingExtra
from tba.searcher.tasks.answers import CONDITION, normalised, plain

# The limit of each parse and each comparison. Three of them take less than the default of task.reward_seconds.
LIMIT_SECONDS = 3
# A longer answer is compared as text only.
MAX_CHARACTERS = 1_000
# Of an element of a list, which doubles with each.
_MOST_SIGNS = 3
# Two different fractions agree in fewer digits than their numerators and denominators have in all.
_DIGITS, _FEW_DIGITS, _MOST_BITS = 5_000, 100, 1_000_000
# The errors of a number in decimals, such as 0.333333: half a unit of the sixth decimal, and six significant digits.
_ABSOLUTE_ERROR, _RELATIVE_ERROR = 5e-7, 5e-6

# The letter of a choice, as in `(C)`, and what may follow it, as in `\textbf{(B)}\ 12`.
_CHOICE = re.compile(r"[(\[]? ?([A-J]) ?(?:[).:\]](?! ?,) ?(.*)|$)")
_SMALL_CHOICE = re.compile(r"^(?:\\text\{)?[(\[]? ?([a-j]) ?[)\]]\}?$")
# A hyphen between single letters is a minus sign.
_WORDS = re.compile(r"[^\W\d_]+(?:(?:[ .'’,;]+|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2}))[^\W\d_]+)*")
# Letters that are a product rather than a word: a few, and more in the order of the alphabet.
_PRODUCT = re.compile(rf"(?!no$)(?:[a-z]{{1,2}}|{'?'.join(ascii_lowercase)}?|[A-Z])")
_SET, _NO_SET = re.compile(r"\\\{(?!.*\\(?:cup|cap|setminus)).*"), re.compile(r"[(\[][^(\[]*")
_SET_OF_SETS = re.compile(r"\\\{ ?\\\{|\\\} ?, ?\\\{")
# `{x in R | x > 2}`, where R may be missing: the variable and the condition.
_SET_BUILDER = re.compile(
    r"\\\{ ?([A-Za-z]) ?(?:\\in ?\\mathbb ?(?:\{R\}|R) ?)?"
    r"(?:\\(?:mid|vert|colon)(?![a-z])|\\?\||:) ?(?!.*\\\{)(.+?) ?\\\}"
)
# One letter, unless it is in a command or a text, or the exponent of a decimal.
_LETTER = re.compile(
    r"\\(?:text|mathbb|operatorname|begin|end) ?\{[^{}]*\}|\\[A-Za-z]+|(?<=\d)[eE](?=[+-]?\d)|([A-Za-z])"
)
_EXPONENT = re.compile(r"^([+-]?[\d.]+)[eE]([+-]?\d+)$")
_RATIO = re.compile(r"[^:,=]+(?::[^:,=]+){2,}")
_PLUS_OR_MINUS = re.compile(r"\\(pm|mp)(?![a-z])")
# Several choices, as ABD or A, B and D.
_CHOICES = re.compile(r"(?:[A-J]|\([A-J]\))(?:(?: ?[,;] ?| (?:and )?)?(?:[A-J]|\([A-J]\)))+")
# With two digits up to 59 after the colon.
_TIME = re.compile(r"0?(\d{1,2}:[0-5]\d)")
# math-verify would drop a relation that nothing precedes.
_RELATION = re.compile(r"\\(?:not|neq?|[lg](?:t|eq?|eqslant))(?![a-z])|[<>≠≤≥]")
# What math-verify drops, or takes for another thing: both answers must have it.
_DROPPED = re.compile(
    r"(?:[a-z)}]|[A-Z](?!'+ ?\())'+|\\(?:operatorname[^}]*|[gl]c[dm] ?\([^()]*[a-z][^()]*\)|ldots|partial ?\w"
    r"|lor(?!.*=)|(?!Pr(?![a-z])|Gamma ?\()[DGOPSTX])"
)
# Compared as text: math-verify reads any as 0.
_CASES = r"\begin{cases}"
# One symbol for each name that math-verify reads as a product: AB, m\angle A, E(X), g(f(2)).
_NAMES = [
    (re.compile(r"(?:(?<![A-Za-z])m ?)?\\(?:angle|triangle) ?(?=[A-Z{])"), ""),
    (re.compile(r"\|([A-Z]{1,2})\|"), r"\1"),
    (re.compile(r"(?<![A-Za-z\\_])(?<!_\{)([A-Z]{2,4})(?![A-Za-z])"), r"s_{\1}"),
    (re.compile(r"\b(?:E\(|[A-Z]\[)(\w+)[)\]]|\b[f-h](?:\(([f-h])\([^()]*\)\)|\^\{-1\} ?\((\w+)\))"), r"P(\1\2\3)"),
    # The inverse of a matrix.
    (re.compile(r"(?<=^[A-Z])\^\{-1\}"), ""),
]
_ANGLE = re.compile(r"(?:(?<![A-Za-z])m ?)?\\angle ?\{? ?([A-Z]{3})(?![A-Za-z])(?: ?\})?")
# A name that math-verify cannot read, such as `P(A|B)`.
_UNREAD_NAME = re.compile(r"(?:(?!\\(?:log|ln|lg|sqrt|exp|frac)(?![a-z]))[^\d+^*/=<>!-]|_ ?\{?\d+)+")


class NotMainThread(RuntimeError):
    """A task that needs the main thread is scored in another one."""


def is_right(gold: str, answer: str) -> bool:
    """Return whether an answer is the gold answer. Raises what SymPy and math-verify raise, also for a time limit."""
    if len(answer) > MAX_CHARACTERS:
        return gold.strip() == answer.strip()
    (gold, unit), (answer, other_unit) = plain(gold), plain(answer)
    same_text = normalised(gold) == normalised(answer)
    relation = _RELATION.match(answer) and not _RELATION.match(gold)
    # A small letter in brackets is a choice if the other answer is one.
    if _choice(gold)[0] or _choice(answer)[0]:
        gold, answer = (_SMALL_CHOICE.sub(lambda found: found[1].upper(), one) for one in (gold, answer))
    (letter, gold), (other_letter, answer) = _choice(gold), _choice(answer)
    # A unit, or a part of it, may be missing, and so may the letter of a choice or what follows it, but none may be
    # another one.
    if not (unit <= other_unit or other_unit <= unit) or (letter and other_letter and letter != other_letter):
        return False
    if same_text or relation or not (gold and answer) or _CASES in gold + answer:
        return same_text or (letter == other_letter != "" and not relation)
    chosen = [_CHOICES.fullmatch(_without_text(one).strip()) for one in (gold, answer)]
    if all(chosen):
        # The order counts where nothing separates them: AC may be a segment.
        is_list = any(not one[0].isalpha() for one in chosen if one)
        letters = [re.findall("[A-J]", one[0]) for one in chosen if one]
        return letters[0] == letters[1] or (is_list and sorted(letters[0]) == sorted(letters[1]))
    words = _words(gold)
    if words and (":" in answer or ":" not in words[0]):
        return words == _words(answer, always=True)
    # One angle in degrees and one in radians.
    if (unit ^ other_unit) == {("degree", 1)} and r"\pi" in (answer if unit else gold) and "," not in gold + answer:
        both = (gold, unit), (answer, other_unit)
        gold, answer = (rf"({one})\cdot\frac{{\pi}}{{180}}" if own else one for one, own in both)
    return _same_value(gold, answer)


def is_text(gold: str) -> bool:
    """Return whether a gold answer is not mathematics: words, a choice or a time."""
    gold, _ = plain(gold)
    return bool(_choice(gold)[0] or _words(gold) or _CASES in gold)


def is_readable(gold: str) -> bool:
    """Return whether an answer could equal this gold answer. Raises as `is_right` does."""
    gold = _each_sign(plain(gold)[0]) if not is_text(gold) else gold
    is_set = CONDITION.search(gold) and _real_set(gold)[1] is not None
    return bool(is_set or is_text(gold) or _read_gold(_views(gold)[0]) is not None)


def read(answer: str) -> Any:
    """Return a SymPy object, or None for what math-verify cannot read. Raises for its time limit."""
    from sympy import Eq, FiniteSet, nan, zoo

    answer = re.sub(r"\\l(?:and|or)(?![a-z])", ",", answer)
    answer = _ANGLE.sub(lambda found: f"s_{{{min(found[1], found[1][::-1])}}}", answer)
    answer = _EXPONENT.sub(r"\1\\cdot 10^{\2}", f"x{answer}" if _RELATION.match(answer) else answer)
    names, equals, value = answer.rpartition("=")
    for pattern, symbol in _NAMES:
        names = pattern.sub(symbol, names)
    answer = names + equals + value
    found = next((one for one in parse(f"\\boxed{{{answer}}}", numbers=False) if not isinstance(one, str)), None)
    name, _, value = answer.partition("=")
    if found is None and value and _UNREAD_NAME.fullmatch(name):
        return read(value)
    if isinstance(found, Eq) and isinstance(found.rhs, FiniteSet):
        return FiniteSet(*(Eq(found.lhs, one, evaluate=False) for one in found.rhs.args))
    return None if found in (nan, zoo) else found


_read_gold = lru_cache(20_000)(read)


def parse(text: str, *, numbers: bool = True) -> list[Any]:
    """Return a SymPy object that math-verify finds, and its text; with `numbers` the last one of an unreadable text."""
    if threading.current_thread() is not threading.main_thread():
        raise NotMainThread("math-verify limits its time by a signal, so math is scored in the main thread only")
    library = math_verify()
    # A unit is cut off before: math-verify would take the variable of 5t for one.
    normalisation = library.parser.NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
    )
    targets = [library.LatexExtractionConfig(normalization_config=normalisation)]
    targets += [library.ExprExtractionConfig()] if numbers else []
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


def _choice(answer: str) -> tuple[str, str]:
    """Split an answer into the letter of a choice, "" for none, and what follows it."""
    found = _CHOICE.fullmatch(_without_text(answer))
    return (found[1], found[2] or "") if found else ("", answer)


def _words(answer: str, always: bool = False) -> list[str]:
    """The words of an answer that has nothing else, sorted and without capitals, or the time that it is.

    Letters that are a product count only with `always`. math-verify reads all words as products.
    """
    text = _without_text(answer).strip("() .")
    if time := _TIME.fullmatch(text):
        return [time[1]]
    items = ["".join(filter(str.isalpha, item)) for item in re.split("[,;]", text)]
    if not _WORDS.fullmatch(text) or (not always and text == answer and all(map(_PRODUCT.fullmatch, items))):
        return []
    return sorted(item.casefold().removesuffix("s") for item in items)


def _without_text(answer: str) -> str:
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", answer)


def _same_value(gold: str, answer: str) -> bool:
    pair = (gold, answer) = _with_case(_each_sign(gold), _each_sign(answer))
    if any(map(CONDITION.search, pair)):
        (name, numbers), (other_name, others) = _real_set(gold), _real_set(answer)
        if None not in (numbers, others):
            return (name == other_name or "" in (name, other_name)) and bool((numbers ^ others).is_empty)
        if any(map(_SET_BUILDER.fullmatch, pair)) or len({"\\lor" in one for one in pair}) > 1:
            return False
    # math-verify reads a pair of numbers as a set, and a set of sets as one of their elements.
    if any(_SET.match(one) and _NO_SET.fullmatch(other) for one, other in (pair, pair[::-1])):
        return False
    # Also of `a:b:c = 1:2:3`.
    values = [one.rpartition("=")[2] for one in pair]
    ratios = [_RATIO.fullmatch(one) for one in values]
    marks = map(_DROPPED.findall, pair if ("=" in gold) == ("=" in answer) else values)
    dropped = {str(sorted(sorted(re.split("[(),]", mark)) for mark in one)) for one in marks}
    if len({bool(_SET_OF_SETS.search(one)) for one in pair}) > 1 or len(dropped) > 1 or any(ratios) != all(ratios):
        return False
    if all(ratios):
        parts = [one.split(":") for one in values]
        gold, answer = ("(" + ", ".join(rf"\frac{{{one}}}{{{first}}}" for one in rest) + ")" for first, *rest in parts)
    return any(_equal(*views) for views in dict.fromkeys(zip(_views(gold), _views(answer), strict=True)))


def _each_sign(answer: str) -> str:
    """Write each element of a list twice that has a sign `\\pm`, which math-verify reads only at its beginning or end.

    Several signs are independent of one another, unless one is `\\mp`.
    """
    if not _PLUS_OR_MINUS.search(answer):
        return answer
    is_set = re.fullmatch(r"(\\\{)((?:(?!\\\}).)*)(\\\})", answer)
    start, inside, end = is_set.groups() if is_set else ("", answer, "")
    depths = accumulate((sign in "([{") - (sign in ")]}") for sign in inside)
    marked = ("\n" if sign in ",;" and not depth else sign for sign, depth in zip(inside, depths, strict=True))
    parts = "".join(marked).split("\n")
    for _ in range(_MOST_SIGNS):
        parts = [one for part in parts for one in _both(part)]
    return start + ",".join(parts) + end


def _both(part: str) -> list[str]:
    """Return an element with each of its first sign `\\pm`, or with all signs turned if one is `\\mp`."""
    correlated = "\\mp" in part
    signs = ("+", "-"), ("-", "+")
    found = [_PLUS_OR_MINUS.sub(lambda sign: two[sign[1] == "mp"], part, 0 if correlated else 1) for two in signs]  # noqa: B023
    return [re.sub(r"(^|[(\[{=,]) ?\+", r"\1", one) for one in dict.fromkeys(found)]


def _with_case(gold: str, answer: str) -> tuple[str, str]:
    """Rename the capitals that are also there as small letters: math-verify takes K for k, and a/A for 1."""
    letters = {found for one in (gold, answer) for found in _LETTER.findall(one)}
    free = (letter for letter in "wvuzqyrsthgpmnlkjxabcfo" if not {letter, letter.upper()} & letters)
    renamed = {letter: next(free, letter) for letter in letters & {*ascii_letters[26:]} if letter.lower() in letters}
    gold, answer = (_LETTER.sub(lambda found: renamed.get(found[1], found[0]), one) for one in (gold, answer))
    return gold, answer


def _real_set(answer: str) -> tuple[str, Any]:
    """Return a set of real numbers and the variable of its condition, "" without one or with braces.

    The set is None for what is none, or none that SymPy makes of its condition.
    """
    from sympy import And, Float, Or, Rational, Set, Symbol
    from sympy.core.relational import Relational

    builder = _SET_BUILDER.fullmatch(answer)
    either = re.split(r"\\(?:vee|lor)(?![a-z])", builder[2] if builder else answer)
    parts = [[one for it in re.split(r"\\(?:wedge|land)\b", of) for one in And.make_args(read(it))] for of in either]
    atoms = [one for part in parts for one in part]
    # Without braces it is solved for its variable.
    shown = builder or re.match(r"\|[a-vxy]\|", answer)
    solved = all(isinstance(one, Relational) and (shown or one.lhs.is_Symbol or one.rhs.is_Symbol) for one in atoms)
    found: Any = Or(*(And(*part) for part in parts)) if solved else atoms[0] if len(atoms) == 1 else None
    is_set, symbols = isinstance(found, Set) and not builder, getattr(found, "free_symbols", ())
    # A condition has one variable, and a list is no condition.
    if not (is_set or solved) or len(symbols) != solved or (builder and str(*symbols) != builder[1].lower()):
        return "", None
    exact = {number: Rational(str(number)) for number in found.atoms(Float)}
    found = found.xreplace(exact | {one: Symbol("x", real=True) for one in symbols}).doit()
    try:
        numbers = found if is_set else math_verify().utils.timeout(LIMIT_SECONDS)(found.as_set)()
    # It cannot be solved.
    except (NotImplementedError, AttributeError):
        numbers = None
    return "" if builder else "".join(map(str, symbols)), numbers


def _views(answer: str) -> tuple[str, str, str]:
    """What an answer may mean: 10 % is 10 and 1/10, C(5,2) a point C or a binomial coefficient."""
    named = re.sub(r"^[A-Z]_? ?\d? ?(?=\([^()=]*,[^()=]*\)$)", "", answer)
    number, binomial = named.replace(r"\%", ""), re.sub(r"\bC ?\((\w+), ?(\w+)\)", r"\\binom{\1}{\2}", answer)
    return number, named.replace(r"\%", r"\cdot\frac{1}{100}"), binomial.replace(r"\%", "")


def _equal(gold: str, answer: str) -> bool:
    expected = _read_gold(gold)
    found = None if expected is None else read(answer)
    return found is not None and bool(math_verify().utils.timeout(LIMIT_SECONDS)(equal)(expected, found))


def equal(gold: Any, answer: Any) -> bool:
    """Return whether two SymPy objects are equal. It has no time limit, and raises whatever SymPy raises."""
    from math_verify.grader import is_equation
    from sympy import FiniteSet, Interval, MatrixBase, Set, Tuple

    pair = (gold, answer)
    if is_equation(gold) != is_equation(answer):
        golds, answers = (_values(one) if is_equation(one) else [one] for one in pair)
        return bool(golds and answers) and all(equal(one, other) for one in golds for other in answers)
    if all(isinstance(one, MatrixBase) for one in pair):
        return gold.shape == answer.shape and all(map(equal, gold.flat(), answer.flat()))
    if all(isinstance(one, Interval) for one in pair):
        open_ends = (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open)
        return open_ends and equal(gold.start, answer.start) and equal(gold.end, answer.end)
    listed = any(isinstance(one, (FiniteSet, Tuple)) for one in pair)
    # A pair of increasing numbers is read as an open interval.
    if listed and not any(isinstance(one, Set) and _members(one) == [one] for one in pair):
        return _equal_lists(gold, answer)
    return _equal_expressions(gold, answer)


def _values(equation: Any) -> list[Any]:
    """What an equation says: 5 for `x = 5`, each side of `2 + 3 = 5`, and nothing for `x + y = 5`."""
    from math_verify.grader import take_first_relation, take_last_relation

    sides = [take_first_relation(equation).lhs, take_last_relation(equation).rhs]
    named = [value for name, value in (sides, sides[::-1]) if _is_name(name)]
    return named[:1] or ([] if equation.free_symbols else sides)


def _is_name(side: Any) -> bool:
    """Whether a side of an equation only names what has the value of the other: x, f(0), AB, a/b, sin A, |z|, (x,y)."""
    from sympy import Abs, Limit, Tuple
    from sympy.core.function import AppliedUndef
    from sympy.functions.elementary.trigonometric import TrigonometricFunction

    if isinstance(side, Tuple):
        return all(map(_is_name, side.args))
    if side.is_Mul:
        over, under = side.as_numer_denom()
        return under != 1 and _is_name(over) and _is_name(under)
    size = isinstance(side, Abs) and str(side.args[0]).startswith(("z", "w", "vec"))
    angle = isinstance(side, TrigonometricFunction) and side.free_symbols
    return bool(side.is_Symbol or side.is_Derivative or size or angle or isinstance(side, (AppliedUndef, Limit)))


def _members(listed: Any) -> list[Any]:
    """The elements of a list in their order, those of `1 \\pm 2` in its place; else the object itself."""
    from sympy import FiniteSet, Interval, Tuple

    if isinstance(listed, Interval) and listed.left_open and listed.right_open:
        return [listed.start, listed.end]
    if isinstance(listed, FiniteSet):
        elements = getattr(listed, "_unsorted_args", listed.args)
        return [inner for one in elements for inner in (_members(one) if isinstance(one, FiniteSet) else [one])]
    return list(listed.args) if isinstance(listed, Tuple) else [listed]


def _equal_lists(gold: Any, answer: Any) -> bool:
    from sympy import Eq, FiniteSet

    golds, answers = _members(gold), _members(answer)
    if golds == [gold] and isinstance(answer, FiniteSet):
        # `1/2, 0.5` is one value twice.
        return all(equal(gold, one) for one in answers)
    named, others = _by_name(golds), _by_name(answers)
    # `x=1, x=2` is neither `x=1, y=2` nor `(1, 2)`.
    names = [one.keys() or any(isinstance(two, Eq) for two in two) for one, two in ((named, golds), (others, answers))]
    is_pair = names[1] is True and not isinstance(gold, FiniteSet)
    if len(golds) != len(answers) or is_pair or (all(names) and names[0] != names[1]):
        return False
    if named or (others and not isinstance(gold, FiniteSet)):
        # The coordinates of a point are in the order of their names, or in that of the gold answer.
        orders = [sorted(named)] if others else [sorted(named), list(named)]
        values = [others[name] for name in sorted(others)] or answers
        return any(all(map(equal, [named[name] for name in order] or golds, values)) for order in orders)
    if not (isinstance(gold, FiniteSet) and isinstance(answer, FiniteSet)):
        return all(map(equal, golds, answers))
    for one in golds:
        found = next((n for n, other in enumerate(answers) if equal(one, other)), None)
        if found is None:
            return False
        del answers[found]
    return True


def _by_name(members: list[Any]) -> dict[str, Any]:
    """Return the values of a list of equations by their names, empty for another list and for two of one name."""
    from sympy import Eq

    found = {str(one.lhs): one.rhs for one in members if isinstance(one, Eq) and _is_name(one.lhs)}
    return found if len(found) == len(members) else {}


def _equal_expressions(gold: Any, answer: Any) -> bool:
    from math_verify.grader import sympy_expr_eq
    from sympy import And, Expr, Float, I, Integral, Limit, Rational, Sum, Symbol, prime

    if isinstance(gold, And) and isinstance(answer, And):
        # 2 < x < 3 is 3 > x > 2.
        return {one.canonical for one in gold.args} == {one.canonical for one in answer.args}
    gold, answer = (one.doit() if one.has(Integral, Limit, Sum) else one for one in (gold, answer))
    agree = None
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        decimals = gold.has(Float) or answer.has(Float)
        # Decimals become fractions, and the only symbol i the imaginary unit. All other symbols are real.
        exact: dict[Any, Any] = {n: Rational(str(n)) for n in gold.atoms(Float) | answer.atoms(Float)}
        symbols_are = {one: Symbol(one.name, real=True) for one in symbols}
        exact |= dict.fromkeys(symbols, I) if {one.name for one in symbols} == {"i"} else symbols_are
        gold, answer = gold.xreplace(exact), answer.xreplace(exact)
        symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
        # Most wrong expressions with variables differ where these have such values, which is quick.
        point = {symbol: Rational(prime(n), 7) for n, symbol in enumerate(symbols, 7)}
        agree = _agree(gold.subs(point), answer.subs(point), decimals, _FEW_DIGITS if symbols else _DIGITS)
    if agree is None or (agree and symbols):
        return bool(sympy_expr_eq(gold, answer, float_rounding=6, numeric_precision=_DIGITS))
    return agree


def _agree(gold: Any, answer: Any, decimals: bool, digits: int) -> bool | None:
    """Whether two numbers are one, None if they have no value, such as `f(2)`."""
    from sympy import Tuple, preorder_traversal
    from sympy.functions.elementary.hyperbolic import HyperbolicFunction

    difference = (gold - answer).evalf(maxn=digits).as_real_imag()
    if not all(part.is_Number and part.is_finite for part in difference):
        return None
    if decimals:
        size = max(sum(map(abs, one.evalf().as_real_imag())) for one in (gold, answer))
        return bool(sum(map(abs, difference)) <= min(_ABSOLUTE_ERROR, _RELATIVE_ERROR * size))
    if gold == answer or not all(part == 0 or getattr(part, "_prec", 0) == 1 for part in difference):
        return bool(gold == answer)
    # SymPy finds no digit of what is 0, nor of what huge or tiny parts differ in: `\\sqrt{1+10^{-6000}}` and 1.
    pair = Tuple(gold, answer)
    values = [abs(part.evalf(2)) for part in preorder_traversal(pair) if part.is_number]
    bits = max((abs(sum(one._mpf_[2:])) for one in values if one.is_Float), default=0)
    exact = bits < _MOST_BITS and bits >= (12 if pair.has(HyperbolicFunction) else _DIGITS)
    return gold.doit() == answer.doit() if exact else bits < _MOST_BITS
