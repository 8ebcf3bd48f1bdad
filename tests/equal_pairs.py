"""Generate pairs of answers that differ in one respect, or in none that counts, with the right verdict."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import sympy

X, Y = sympy.symbols("x y")


class Pair(NamedTuple):
    """An answer, a reference, and whether they mean the same. ``kind`` says what may differ."""

    kind: str
    given: str
    gold: str
    is_equal: bool


def _value(draw: random.Random) -> sympy.Expr:
    """Return a number or a formula that is not 0."""
    n, m = draw.randint(2, 99), draw.randint(2, 99)
    return draw.choice(
        [
            sympy.Integer(n),
            sympy.Rational(n, m),
            sympy.sqrt(n),
            n + m * sympy.I,
            n * X,
            X**2 + n,
            n * sympy.pi / m,
        ]
    )


def _sign(draw: random.Random) -> tuple[str, str, bool]:
    value = _value(draw)
    flipped = -value if draw.random() < 0.5 else sympy.conjugate(value.subs(X, -X))
    other = draw.choice([value, value, flipped])
    return sympy.latex(other), sympy.latex(value), sympy.expand(other - value) == 0


def _operator(draw: random.Random) -> tuple[str, str, bool]:
    n, m = draw.sample(range(2, 60), 2)
    left, right = draw.choice([("x", "y"), ("x", str(n)), (str(n), str(m))])
    signs = ["+", "-", r"\cdot ", "/"]
    one, other = draw.choice(signs), draw.choice(signs)
    given, gold = left + one + right, draw.choice([left + other + right, f"{left} {other} {right}"])
    if one == other in ("+", r"\cdot ") and draw.random() < 0.5:
        given = right + one + left
    comparison = draw.choice(["<", ">", r"\le ", r"\ge ", "="])
    if draw.random() < 0.3:
        other = draw.choice(["<", ">", r"\le ", r"\ge ", "="])
        return f"x{comparison}{n}", f"x {other}{n}", comparison == other
    return given, gold, one == other


def _bracket(draw: random.Random) -> tuple[str, str, bool]:
    low, high = sorted(draw.sample(range(-20, 20), 2))
    given, gold = (f"{draw.choice('([')}{low},{high}{draw.choice(')]')}" for _ in range(2))
    truth = given == gold
    if draw.random() < 0.3:
        given = rf"\left{given[0]}{low}, {high}\right{given[-1]}"
    elif draw.random() < 0.2:
        return rf"\{{{low},{high}\}}", gold, False
    return given, gold, truth


def _order(draw: random.Random) -> tuple[str, str, bool]:
    values = draw.sample(range(-30, 30), draw.choice([2, 3]))
    other = list(values)
    draw.shuffle(other)
    opening, closing, is_set = draw.choice([("(", ")", False), ("(", ")", False), (r"\{", r"\}", True)])
    given, gold = (f"{opening}{', '.join(map(str, row))}{closing}" for row in (other, values))
    return given.replace(" ", draw.choice(["", " "])), gold, is_set or other == values


def _exponent(draw: random.Random) -> tuple[str, str, bool]:
    base, power = draw.choice(["x", str(draw.randint(2, 12))]), draw.randint(2, 9)
    raised = str(power).translate(str.maketrans("23456789", "²³⁴⁵⁶⁷⁸⁹"))
    gold = f"{base}^{{{power}}}"
    wrong = [f"{base}{power}", f"{base}^{{{power + 1}}}", f"{base}^{{-{power}}}", f"{power}^{{{base}1}}"]
    right = [f"{base}{raised}", f"{base}^{power}", f"{base} ^ {{{power}}}"]
    is_equal = draw.random() < 0.5
    return draw.choice(right if is_equal else wrong), gold, is_equal


def _percent(draw: random.Random) -> tuple[str, str, bool]:
    n = draw.randint(2, 95)
    right = [rf"{n}\%", f"{n}%", f"{n} %", rf"\frac{{{n}}}{{100}}", f"{n} percent"]
    wrong = [f"-{n}%", f"{n + 1}%", f"{n}0%", rf"\frac{{100}}{{{n + 101}}}", f"0.{n}%"]
    is_equal = draw.random() < 0.5
    return draw.choice(right if is_equal else wrong), f"{n}%", is_equal


def _unit(draw: random.Random) -> tuple[str, str, bool]:
    n = draw.randint(2, 99_999)
    one, other = draw.sample(
        ["m", "km", "cm^2", "cm^3", "kg", "g", "dollars", "cents", "m/s", "eggs", "degrees"], 2
    )
    right = [f"{n} {one}", rf"{n}\text{{ {one}}}", f"{n:,} {one}", str(n)]
    wrong = [
        f"{n} {other}",
        rf"{n}\text{{ {other}}}",
        f"-{n} {one}",
        f"{n + 1} {one}",
        f"{n}0 {one}",
        f"{n} dozen",
    ]
    is_equal = draw.random() < 0.5
    return draw.choice(right if is_equal else wrong), f"{n} {one}", is_equal


def _case(draw: random.Random) -> tuple[str, str, bool]:
    n, (small, capital) = draw.randint(2, 99), draw.choice([("n", "N"), ("x", "X"), (r"\delta", r"\Delta")])
    word = draw.choice(["Monday", "No solution", "Even", "Paris"])
    option = draw.choice("ABCD")
    return draw.choice([
        (f"{n}{capital}", f"{n}{small}", False),
        (f"{small}^2-{capital}", f"{capital}^2-{small}", False),
        (f"{small}^2-{capital}", rf"-{capital} + {small}^{{2}}", True),
        (word.lower(), rf"\text{{{word}}}", True),
        (draw.choice(["({})", "{}.", "**{}**", "{}"]).format(option), option.lower(), True),
        (option, draw.choice("efgh"), False),
    ])  # fmt: skip


KINDS: dict[str, Callable[[random.Random], tuple[str, str, bool]]] = {
    "sign": _sign, "operator": _operator, "bracket": _bracket, "order": _order, "exponent": _exponent,
    "percent": _percent, "unit": _unit, "case": _case,
}  # fmt: skip


def pairs(count: int, seed: int = 0) -> Iterator[Pair]:
    """Yield ``count`` pairs, in turn of each kind."""
    draw = random.Random(seed)
    names = list(KINDS)
    for index in range(count):
        kind = names[index % len(names)]
        yield Pair(kind, *KINDS[kind](draw))
