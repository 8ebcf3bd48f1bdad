"""Prefix trees over the ids of a forest."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batching.forest import TokenForest, forest_from_sequences
from agentrl.batching.sharing import share_prefixes

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), min_size=1, max_size=8)


def ids_to(forest: TokenForest, index: int) -> tuple[int, ...]:
    """The ids from the root to a token."""
    way = [index]
    while (parent := int(forest.parent[way[-1]])) >= 0:
        way.append(parent)
    return tuple(forest.input_ids[way[::-1]].tolist())


@given(SEQUENCES)
def test_every_prefix_is_kept_once_and_labels_keep_their_paths(sequences: list[list[int]]) -> None:
    forest = forest_from_sequences(sequences, [[False] + [True] * (len(ids) - 1) for ids in sequences])
    shared = share_prefixes(forest)
    prefixes = {tuple(ids[:end]) for ids in sequences for end in range(1, len(ids) + 1)}
    assert sorted(ids_to(shared, i) for i in range(shared.tokens)) == sorted(prefixes)
    assert shared.row.tolist() == forest.row.tolist()
    assert shared.trajectories == len(sequences)
    for old, new in zip(forest.target, shared.target, strict=True):
        assert ids_to(shared, int(new)) == ids_to(forest, int(old))
    index = np.arange(shared.tokens)
    for query in index:
        seen = index[(index <= query) & (query < shared.subtree_end)]
        assert tuple(shared.input_ids[seen].tolist()) == ids_to(shared, int(query))
        assert shared.position_ids[query] == len(seen) - 1
    again = share_prefixes(shared)
    assert again.input_ids.tolist() == shared.input_ids.tolist()
