"""Whether two expressions that math-verify has read are equal.

math-verify takes two numbers for one if their difference is below 1e-15, as that of any two probabilities near 2^-60.
Here the difference of two numbers must be 0 in more digits than a response holds. Expressions with variables must agree
where these have sample values, and then be equal for math-verify, too.
"""

from typing import Any

# Two different fractions agree in fewer digits than their numerators and denominators have in all.
_DIGITS, _FEW_DIGITS = 5_000, 100
# Of a number in decimals, such as 0.333333: half a unit of the sixth decimal, and six significant digits.
_ABSOLUTE_ERROR, _RELATIVE_ERROR = 5e-7, 5e-6


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
    """Whether a side of an equation only names what has the value of the other: x, f(0), AB, a/b, (x, y)."""
    from sympy import Tuple
    from sympy.core.function import AppliedUndef

    if side.is_Mul or isinstance(side, Tuple):
        return all(map(_is_name, side.args))
    if side.is_Pow:
        return side.exp == -1 and _is_name(side.base)
    function = isinstance(side, AppliedUndef) or (side.is_Function and side.free_symbols)
    return bool(side.is_Symbol or side.is_Derivative or function)


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
    from math_verify.grader import sympy_expr_eq
    from sympy import And, Expr, Float, I, Rational, Symbol, prime

    if isinstance(gold, And) and isinstance(answer, And):
        # 2 < x < 3 is 3 > x > 2.
        return {one.canonical for one in gold.args} == {one.canonical for one in answer.args}
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
    difference = (gold - answer).evalf(maxn=digits).as_real_imag()
    if not all(part.is_Number and part.is_finite for part in difference):
        return None
    if decimals:
        size = max(sum(map(abs, one.evalf().as_real_imag())) for one in (gold, answer))
        return bool(sum(map(abs, difference)) <= min(_ABSOLUTE_ERROR, _RELATIVE_ERROR * size))
    # Of what is 0, SymPy finds no digit.
    return all(part == 0 or getattr(part, "_prec", 0) == 1 for part in difference)
