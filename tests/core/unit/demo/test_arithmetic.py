"""The calculator returns correct values, clear errors, and limits its work."""

from __future__ import annotations

import pytest
from demo.arithmetic import MAX_CHARS, ArithmeticTextError, evaluate
from demo.units import converted
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37 * 48", "1776"), (" (3 + 4) * -2 ", "-14"), ("7 / 2", "3.5"), ("6 / 3", "2"), ("7 // 2", "3"),
        ("-7 % 3", "2"), ("2 ** 10", "1024"), ("0.1 + 0.2", "0.3"), ("12 × 3 − 4 ÷ 2", "34"),
        ("10 ** 40 + 1", str(10**40 + 1)), ("2 ** -1", "0.5"),
    ],
)  # fmt: skip
def test_values(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "empty"), ("1 +", "not an arithmetic expression"),
        ("two plus two", "not an arithmetic expression"), ("x + 1", "only numbers"),
        ("abs(-1)", "only numbers"), ("__import__('os').system('true')", "only numbers"),
        ("'a' * 9", "only numbers"), ("True + 1", "only numbers"), ("1j * 1j", "only numbers"),
        ("[1][0]", "only numbers"), ("1 if 1 else 2", "only numbers"), ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"), ("0 ** -1", "division by zero"), ("9 ** 9 ** 9", "too large"),
        ("9" * 60, "too large"), ("1e400", "too large"), ("(-8) ** 0.5", "negative number"),
        ("1" * (MAX_CHARS + 1), "characters"), ("(" * 99 + "1" + ")" * 98, "not an arithmetic expression"),
        ("1\x00", "not an arithmetic expression"),
    ],
)  # fmt: skip
def test_refusals(expression: str, reason: str) -> None:
    with pytest.raises(ArithmeticTextError, match=reason):
        evaluate(expression)


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_agrees_with_python(left: int, right: int, operator: str) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[operator]
    assert evaluate(f"{left} {operator} {right}") == str(expected)


@given(st.text(alphabet="0123456789+-*/%(). e", max_size=40))
def test_any_text_gives_a_value_or_a_reason(text: str) -> None:
    try:
        outcome = evaluate(text)
    except ArithmeticTextError as error:
        outcome = str(error)
    assert outcome


def test_units() -> None:
    assert converted(1, "mi", "km") == pytest.approx(1.609344)
    assert converted(0, "K", "F") == pytest.approx(-459.67)
    with pytest.raises(ValueError, match="cannot convert 'm' to 'C'"):
        converted(1, "m", "C")
