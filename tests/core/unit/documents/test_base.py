"""Documents that are damaged, and numbers that a float can hold."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest

from agentrl.documents.document import is_finite
from agentrl.documents.run import RunSettings
from agentrl.errors import StoreError


@pytest.mark.parametrize("values", [5, "x", [1], float("nan")])
def test_an_object_of_another_type_is_named_as_damage(values: object) -> None:
    stored = {"_id": "flags/train", "values": values, "by": "train", "at": None}
    with pytest.raises(StoreError, match=r"a RunSettings document is damaged .* is not an object"):
        RunSettings.from_document(stored)


def test_a_number_beyond_a_float_is_not_finite() -> None:
    assert all(map(is_finite, (0, 1.5, True, Fraction(1, 3), 10**308)))
    assert not any(map(is_finite, (10**311, -(10**5000), float("inf"), float("nan"), "1", None, Decimal(1))))
