"""Numbers that a float can hold."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

from agentrl.documents.base import is_finite


def test_a_number_beyond_a_float_is_not_finite() -> None:
    assert all(map(is_finite, (0, 1.5, True, Fraction(1, 3), 10**308)))
    assert not any(map(is_finite, (10**311, -(10**5000), float("inf"), float("nan"), "1", None, Decimal(1))))
