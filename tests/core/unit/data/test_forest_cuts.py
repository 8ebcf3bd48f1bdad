"""Test the merging of equal prefixes of a forest."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import path_to

from agentrl.data.forest import TokenForest, forest_from_sequences, join, merge_prefixes, restrict

SEQUENCE = st.lists(st.integers(0, 2), min_size=2, max_size=8).flatmap(
    lambda ids: st.tuples(st.just(ids), st.integers(1, len(ids)))
)
SEQUENCES = st.lists(SEQUENCE, min_size=1, max_size=8)


def ids_to(forest: TokenForest, index: int) -> tuple[int, ...]:
    """The ids from the root to a token."""
    return tuple(forest.input_ids[path_to(forest, index)].tolist())


@given(SEQUENCES)
def test_context_is_kept_once_generated_tokens_per_trajectory(sequences: list[tuple[list[int], int]]) -> None:
    forest = forest_from_sequences(
        [ids for ids, _ in sequences], [[i >= first for i in range(len(ids))] for ids, first in sequences]
    )
    shared = merge_prefixes(forest)
    prefixes = {
        (tuple(ids[:end]), number if end > first and len(sequences) > 1 else -1)
        for number, (ids, first) in enumerate(sequences)
        for end in range(1, len(ids) + 1)
    }
    assert sorted(ids_to(shared, i) for i in range(shared.tokens)) == sorted(ids for ids, _ in prefixes)
    assert shared.row.tolist() == forest.row.tolist()
    assert shared.trajectories == len(sequences)
    for old, new in zip(forest.target, shared.target, strict=True):
        assert ids_to(shared, int(new)) == ids_to(forest, int(old))
    index = np.arange(shared.tokens)
    for query in index:
        seen = index[(index <= query) & (query < shared.subtree_end)]
        assert tuple(shared.input_ids[seen].tolist()) == ids_to(shared, int(query))
        assert shared.position_ids[query] == len(seen) - 1
    again = merge_prefixes(shared)
    assert again.input_ids.tolist() == shared.input_ids.tolist()


def test_one_trajectory_shares_what_it_generated_too() -> None:
    whole = forest_from_sequences([[1, 2, 3, 4]], [[False, False, True, True]])
    assert merge_prefixes(whole).owner.tolist() == [-1, -1, 0, 0]
    twice = forest_from_sequences([[1, 2, 3]] * 2, [[False, True, True]] * 2)
    assert merge_prefixes(twice).tokens == 5


def test_a_token_of_two_calls_keeps_the_temperature_of_each() -> None:
    """A trajectory said the same after the same prompt at two temperatures: one token, two labels."""
    calls = [
        forest_from_sequences([[1, 2, 3]], [[False, True, True]], temperature=temperature)
        for temperature in (0.5, 1.0)
    ]
    shared = merge_prefixes(join(calls))
    assert (shared.tokens, shared.trajectories) == (3, 1)
    assert shared.target.tolist() == [1, 2, 1, 2]
    assert shared.temperature.tolist() == [0.5, 0.5, 1.0, 1.0]
    second = restrict(shared, np.array([False, False, False, True]))
    assert (second.temperature.tolist(), second.input_ids.tolist()) == ([1.0], [1, 2, 3])
