"""Columns of tokens and top logprobs: packed, joined and selected."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agentrl.documents.model_call import pack_floats
from agentrl.documents.record import Column, TokenColumns, TopLogprobs
from agentrl.errors import StoreError

TOP = TopLogprobs.of([{7: -0.5, 3: -1.0}, {}, {300: -2.0}])
COLUMNS = TokenColumns({"teacher": np.array([-0.5, np.nan, -2.0], np.float32)}, {"teacher": TOP})


def rows(top: TopLogprobs) -> list[dict[int, float]]:
    """{id: logprob} of each token."""
    ends = np.cumsum(top.ids.counts)[:-1]
    pairs = zip(np.split(top.ids.ids, ends), np.split(top.logprobs, ends), strict=True)
    return [dict(zip(ids.tolist(), values.tolist(), strict=True)) for ids, values in pairs]


def test_columns_are_unpacked_as_they_were_packed() -> None:
    packed = COLUMNS.pack()
    read = TokenColumns.unpack(packed, 3)
    assert read is not None
    np.testing.assert_array_equal(read.values["teacher"], COLUMNS.values["teacher"])
    assert rows(read.top["teacher"]) == [{3: -1.0, 7: -0.5}, {}, {300: -2.0}]
    assert read.pack() == packed
    assert TokenColumns({}).pack() == b""
    assert TokenColumns.unpack(b"", 3) is None


@pytest.mark.parametrize("nothing", [-math.inf, -1e5, -9999.0, -3.4e38])
def test_an_id_without_probability_is_left_out(nothing: float) -> None:
    top = TopLogprobs.of([{3: nothing, 7: -0.5, 9: -99.0}, {1: nothing}, {}])
    assert rows(TopLogprobs.unpack(top.pack(), 3)) == [{7: -0.5, 9: -99.0}, {}, {}]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({3: math.nan}, "a logprob of nan"),
        ({3: 1e300}, r"a logprob of 1e\+300"),
        ({3: 0.7}, "a logprob of 0.7"),
        ({-3: -1.0}, "a token id of -3"),
        ({2**31: -1.0}, "a token id of 2147483648"),
        ({2**63: -math.inf}, "a token id of 9223372036854775808"),
    ],
)
def test_what_no_distribution_has_is_refused(row: dict[int, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TopLogprobs.of([{}, row])


@pytest.mark.parametrize("data", [b"no json\n", b'{"a": 0}\n\0\0', COLUMNS.pack() + b"\0", b"[]\n"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="columns of"):
        TokenColumns.unpack(data, 3)


def test_selected_and_joined_parts_have_their_tokens_values() -> None:
    last = COLUMNS.select(np.array([2]))
    assert rows(last.top["teacher"]) == [{300: -2.0}]
    joined = TokenColumns.join([(last, 1), (None, 2), (COLUMNS, 3)])
    assert joined is not None
    np.testing.assert_array_equal(
        joined.values["teacher"], np.array([-2.0, np.nan, np.nan, -0.5, np.nan, -2.0], np.float32)
    )
    assert rows(joined.top["teacher"]) == [{300: -2.0}, {}, {}, {3: -1.0, 7: -0.5}, {}, {300: -2.0}]
    assert TokenColumns.join([(None, 2)]) is None


def test_a_column_of_other_tokens_names_both_counts() -> None:
    values = pack_floats([-1.0])
    column = Column(id="r/teacher", record="r", task="t", split="train", name="teacher", values=values)
    assert TokenColumns.of_record([column], 1).values["teacher"].tolist() == [-1.0]
    with pytest.raises(StoreError, match="has 1 values, and its Record has 2 generated tokens"):
        TokenColumns.of_record([column], 2)
