"""Test that a sampling mask survives packing, selection and joining, and that other bytes are refused."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.documents.model_call import SamplingMask
from agentrl.errors import StoreError

ROWS: list[list[int]] = [[300, 7, 151_935], [], [0], [5, 4], list(range(100, 400))]


def rows_of(mask: SamplingMask) -> list[list[int]]:
    return [part.tolist() for part in np.split(mask.ids, np.cumsum(mask.counts)[:-1])]


def test_packing_is_exact_and_small() -> None:
    mask = SamplingMask.of(ROWS)
    assert rows_of(mask) == [sorted(row) for row in ROWS]
    packed = mask.pack()
    assert rows_of(SamplingMask.unpack(packed, len(ROWS))) == rows_of(mask)
    assert len(packed) < 1.1 * mask.ids.size
    rng = np.random.default_rng(0)
    spread = SamplingMask.of([rng.choice(152_000, 30, replace=False).tolist() for _ in range(50)])
    assert len(spread.pack()) < 2.1 * spread.ids.size
    assert SamplingMask.of([[], []]).pack() == b""
    assert SamplingMask.unpack(b"", 2).counts.tolist() == [0, 0]


def test_a_selection_has_the_ids_of_its_tokens() -> None:
    mask = SamplingMask.of(ROWS)
    for chosen in ([4, 0, 1, 2], [3], []):
        indexes = np.array(chosen, np.int64)
        assert rows_of(mask.select(indexes))[: len(chosen)] == [sorted(ROWS[index]) for index in chosen]
    assert rows_of(mask.select(slice(1, 4))) == [[], [0], [4, 5]]
    is_chosen = np.array([True, False, False, True, False])
    assert rows_of(mask.select(is_chosen)) == [[7, 300, 151_935], [4, 5]]
    joined = SamplingMask.join([mask.select(slice(0, 2)), mask.select(slice(2, 5))])
    assert rows_of(joined) == rows_of(mask)


def test_a_sampled_id_is_among_the_kept_ones() -> None:
    mask = SamplingMask.of(ROWS)
    assert mask.keeps(np.array([7, 9, 0, 5, 399]))
    assert not mask.keeps(np.array([8, 9, 0, 5, 399]))
    assert not mask.keeps(np.array([7, 9, 0, 5]))


@pytest.mark.parametrize(
    ("data", "tokens", "problem"),
    [
        (SamplingMask.of(ROWS).pack()[:-1], 5, "not one of 5 tokens"),
        (SamplingMask.of(ROWS).pack(), 4, "not one of 4 tokens"),
        (b"\x01\x80", 1, "ends within a number"),
        (b"\xff" * 6 + b"\x01", 1, "more than 32 bits"),
    ],
)
def test_other_bytes_are_refused(data: bytes, tokens: int, problem: str) -> None:
    with pytest.raises(StoreError, match=problem):
        SamplingMask.unpack(data, tokens)
