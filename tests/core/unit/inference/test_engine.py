"""Check that growing prompts encode to the JSON of all their ids, also where trajectories share a prompt."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.inference.engine import EncodedIds, EngineRefusedError, FirstPrompts

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.booleans(), IDS), min_size=1, max_size=8))
def test_the_json_is_that_of_the_ids_whatever_was_encoded_before(
    prompts: list[tuple[bool, list[int]]],
) -> None:
    first = FirstPrompts()
    trajectories = [EncodedIds(first), EncodedIds(first)]
    last: list[int] = []
    for grows, new in prompts:
        last = [*last, *new] if grows else new
        for encoded in trajectories:
            assert orjson.loads(encoded.update(last, 10)) == last
            assert orjson.loads(encoded.update(tuple(last), 10)) == last


def test_a_known_prompt_is_checked_again_for_a_smaller_vocabulary() -> None:
    first = FirstPrompts()
    assert EncodedIds(first).update([1, 9], 10) == b"[1,9]"
    with pytest.raises(EngineRefusedError, match="token id 9 is outside the vocabulary of 9 ids"):
        EncodedIds(first).update([1, 9], 9)


def test_a_prompt_that_its_caller_changes_is_encoded_again() -> None:
    first = FirstPrompts()
    ids = [1, 2]
    assert EncodedIds(first).update(ids, 10) == b"[1,2]"
    ids[0] = 3
    assert EncodedIds(first).update(ids, 10) == b"[3,2]"
    assert EncodedIds(first).update([1, 2], 10) == b"[1,2]"


def test_a_conversation_that_moves_to_an_engine_with_fewer_ids_is_checked_again() -> None:
    encoded = EncodedIds(FirstPrompts())
    assert encoded.update([1, 9], 10) == b"[1,9]"
    assert encoded.update([1, 9, 2], 12) == b"[1,9,2]"
    with pytest.raises(EngineRefusedError, match="token id 9 is outside the vocabulary of 9 ids"):
        encoded.update([1, 9, 2, 3], 9)
    assert encoded.update([1, 9, 2, 3], 10) == b"[1,9,2,3]"


def test_a_prompt_that_has_grown_from_another_one_than_the_last_is_encoded_as_a_whole() -> None:
    encoded, first = EncodedIds(FirstPrompts()), [1, 2]
    assert encoded.update(first, 10) == b"[1,2]"
    branches = [encoded.grow(first, [3]), encoded.grow(first, [4])]
    assert [encoded.update(each, 10) for each in branches] == [b"[1,2,3]", b"[1,2,4]"]
    assert encoded.update(encoded.grow(branches[0], [5]), 10) == b"[1,2,3,5]"
    assert encoded.update(encoded.grow([1, 2, 3, 5], [6]), 10) == b"[1,2,3,5,6]"
