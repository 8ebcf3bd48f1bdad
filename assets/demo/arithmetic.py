"""Evaluate arithmetic expressions in text: only numbers and operators, of limited size."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable

MAX_CHARS = 200
MAX_DIGITS = 50
_LIMIT = 10**MAX_DIGITS

Number = int | float

_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


class ArithmeticTextError(ValueError):
    """The text is not arithmetic, or its value is too large; the message is for the author of the text."""


def evaluate(expression: str) -> str:
    """Return the value of ``expression`` as text: integers exactly, others to 12 significant digits.

    Supports ``+ - * / // % **``, parentheses and the typographic signs ``× ÷ −``. Raises ArithmeticTextError.
    """
    text = expression.strip()
    if not text:
        raise ArithmeticTextError("the expression is empty; write one, for example 12 * (3 + 4)")
    if len(text) > MAX_CHARS:
        raise ArithmeticTextError(
            f"the expression has {len(text)} characters; at most {MAX_CHARS} are allowed"
        )
    try:
        tree = ast.parse(text.translate(_SIGNS), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ArithmeticTextError(f"{text!r} is not an arithmetic expression") from error
    return _text_of(_value(tree.body))


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=value) if isinstance(value, int | float) and not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _apply(_OPERATIONS[type(op)], _value(left), _value(right))
    raise ArithmeticTextError("only numbers, parentheses and the operators + - * / // % ** are allowed")


def _apply(operation: Callable[[Number, Number], Number], left: Number, right: Number) -> Number:
    try:
        return _bounded(operation(left, right))
    except ZeroDivisionError as error:
        raise ArithmeticTextError("division by zero") from error
    except OverflowError as error:
        raise _too_large() from error


def _divide(left: Number, right: Number) -> Number:
    """Divide; return an integer if both numbers and their quotient are integers."""
    if isinstance(left, int) and isinstance(right, int) and right != 0 and left % right == 0:
        return left // right
    return left / right


def _power(base: Number, exponent: Number) -> Number:
    """Raise to a power, after checking its size: a large power would block the process."""
    if abs(base) > 1 and exponent > 0 and exponent * math.log10(abs(base)) > MAX_DIGITS:
        raise _too_large()
    if base < 0 and not float(exponent).is_integer():
        raise ArithmeticTextError("a negative number has no real power with a fraction as exponent")
    value: Number = base**exponent
    return value


_OPERATIONS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: _divide,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: lambda left, right: left % right,
    ast.Pow: _power,
}


def _bounded(value: Number) -> Number:
    if not abs(value) < _LIMIT:
        raise _too_large()
    return value


def _too_large() -> ArithmeticTextError:
    return ArithmeticTextError(f"the value is too large; at most {MAX_DIGITS} digits are allowed")


def _text_of(value: Number) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.12g}"
