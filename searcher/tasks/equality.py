"""Whether two expressions that math-verify has read are equal.

math-verify takes two numbers for one if their difference is below 1e-15, as that of any two probabilities near 2^-60.
Here numbers must agree relatively, in more digits than a response holds. Expressions with variables must agree where
these have sample values, and then be equal for math-verify, too.
"""

from typing import Any

# Two different fractions agree in fewer digits than their numerators and denominators have in all.
_DIGITS = 5_000
_FEW_DIGITS = 50
# Of a number in decimals, such as 0.333333: half a unit of the sixth decimal, and six significant digits.
_ABSOLUTE_ERROR = 5e-7
_RELATIVE_ERROR = 5e-6


def equal(gold: Any, answer: Any) -> bool:
    """Return whether two SymPy objects are equal. It has no time limit, and raises whatever SymPy raises."""
    from math_verify.grader import is_equation
    from sympy import FiniteSet, Interval, MatrixBase, Set, Tuple

    if is_equation(gold) != is_equation(answer):
        golds, answers = (_values(one) if is_equation(one) else [one] for one in (gold, answer))
        return bool(golds and answers) and all(equal(one, other) for one in golds for other in answers)
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase):
        return gold.shape == answer.shape and all(map(equal, gold.flat(), answer.flat()))
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        open_ends = (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open)
        return open_ends and equal(gold.start, answer.start) and equal(gold.end, answer.end)
    listed = any(isinstance(one, (FiniteSet, Tuple)) for one in (gold, answer))
    # A pair of increasing numbers is read as an open interval.
    if listed and not any(isinstance(one, Set) and _members(one) == [one] for one in (gold, answer)):
        return _equal_lists(gold, answer)
    return _equal_expressions(gold, answer)


def _values(equation: Any) -> list[Any]:
    """What an equation says: 5 for `x = 5`, each side of `2 + 3 = 5`, and nothing for `x + y = 5`."""
    from math_verify.grader import take_first_relation, take_last_relation

    sides = [take_first_relation(equation).lhs, take_last_relation(equation).rhs]
    named = [value for name, value in (sides, sides[::-1]) if _is_name(name)]
    return named[:1] or ([] if equation.free_symbols else sides)


def _is_name(side: Any) -> bool:
    """Whether a side of an equation only names what has the value of the other: x, f(0), AB, a/b, (x, y)."""
    from sympy import Function, Mul, Pow, Tuple
    from sympy.core.function import AppliedUndef

    if isinstance(side, Pow):
        return side.exp == -1 and _is_name(side.base)
    if isinstance(side, (Mul, Tuple)):
        return all(map(_is_name, side.args))
    function = isinstance(side, AppliedUndef) or (isinstance(side, Function) and side.free_symbols)
    return bool(side.is_Symbol or function or side.is_Derivative)


def _members(listed: Any) -> list[Any]:
    """The elements of a list in their order, those of `1 \\pm 2` in its place; else the object itself."""
    from sympy import FiniteSet, Interval, Tuple

    if isinstance(listed, Interval) and listed.left_open and listed.right_open:
        return [listed.start, listed.end]
    if isinstance(listed, FiniteSet):
        return [inner for one in getattr(listed, "_unsorted_args", listed.args) for inner in _members(one)]
    return list(listed.args) if isinstance(listed, Tuple) else [listed]


def _equal_lists(gold: Any, answer: Any) -> bool:
    from sympy import FiniteSet

    golds, answers = _members(gold), _members(answer)
    if golds == [gold] and isinstance(answer, FiniteSet):
        # `1/2, 0.5` is one value twice.
        return all(equal(gold, one) for one in answers)
    if len(golds) != len(answers):
        return False
    if not isinstance(gold, FiniteSet):
        return all(map(equal, golds, answers))
    for one in golds:
        found = next((n for n, other in enumerate(answers) if equal(one, other)), None)
        if found is None:
            return False
        del answers[found]
    return True


def _equal_expressions(gold: Any, answer: Any) -> bool:
    from sympy import Expr, Float, Rational, prime

    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return _verified(gold, answer)
    decimals = gold.has(Float) or answer.has(Float)
    gold, answer = _exact(gold, answer)
    # Expressions with variables must agree where these have such values. Most wrong ones differ there, which is quick.
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {symbol: Rational(prime(n), 7) for n, symbol in enumerate(symbols, 7)}
    agree = _agree(gold.subs(point), answer.subs(point), decimals)
    return _verified(gold, answer) if agree is None or (agree and symbols) else agree


def _exact(*expressions: Any) -> list[Any]:
    """Decimals become fractions, and the only symbol i the imaginary unit. All other symbols are real."""
    from sympy import Float, I, Rational, Symbol

    symbols = set().union(*(one.free_symbols for one in expressions))
    complex_number = {symbol.name for symbol in symbols} == {"i"}
    plain = {symbol: I if complex_number else Symbol(symbol.name, real=True) for symbol in symbols}
    return [one.xreplace({**plain, **{n: Rational(str(n)) for n in one.atoms(Float)}}) for one in expressions]


def _agree(gold: Any, answer: Any, decimals: bool) -> bool | None:
    """Whether two numbers are one, None if they have no value, such as `f(2)`."""
    from sympy import simplify

    for digits in (_FEW_DIGITS, _DIGITS):
        expected, found = _value(gold, digits), _value(answer, digits)
        if expected is None or found is None:
            return None
        (x, u), (y, v) = expected, found
        error, size = abs(x - y) + abs(u - v), max(abs(x) + abs(u), abs(y) + abs(v))
        if decimals:
            return bool(error <= min(_ABSOLUTE_ERROR, _RELATIVE_ERROR * size))
        if error > size / 10 ** (digits - 5):
            # What is 0 has a value of rounding errors only.
            return bool(size * 10 ** (digits - 5) < 1 and simplify(gold - answer) == 0)
    return True


def _value(number: Any, digits: int) -> tuple[Any, Any] | None:
    """The real and the imaginary part of a finite number."""
    parts: tuple[Any, Any] = number.evalf(digits, maxn=2 * digits).as_real_imag()
    return parts if all(part.is_Number and part.is_finite for part in parts) else None


def _verified(gold: Any, answer: Any) -> bool:
    from math_verify.grader import sympy_expr_eq
    from sympy import And

    if isinstance(gold, And) and isinstance(answer, And):
        # 2 < x < 3 is 3 > x > 2.
        return {one.canonical for one in gold.args} == {one.canonical for one in answer.args}
    return bool(sympy_expr_eq(gold, answer, float_rounding=6, numeric_precision=_DIGITS))
