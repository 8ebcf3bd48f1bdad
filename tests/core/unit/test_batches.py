from __future__ import annotations

from collections.abc import Sequence

import pytest

from agentrl.base.batches import batches, weighed_batches


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([1, 2, 3, 4, 5], [[1, 2], [3, 4], [5]]),
        ("abcd", ["ab", "cd"]),
        (b"abc", [b"ab", b"c"]),
        ((1,), [(1,)]),
        ([], []),
    ],
)
def test_batches_are_slices_of_the_same_type(items: Sequence[object], expected: list[object]) -> None:
    assert list(batches(items, 2)) == expected


def test_batches_end_before_they_weigh_too_much_or_hold_too_many() -> None:
    assert list(weighed_batches("abcdef", ord, 2 * ord("b"))) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert list(weighed_batches([1, 1, 1, 9, 1, 1], int, 3)) == [[1, 1, 1], [9], [1, 1]]
    assert list(weighed_batches([1, 1, 1, 1, 1], int, 9, 2)) == [[1, 1], [1, 1], [1]]
    assert list(weighed_batches([], int, 9)) == []
