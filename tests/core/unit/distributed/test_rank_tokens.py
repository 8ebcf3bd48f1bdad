"""The tokens of each rank of context parallelism: complete, equally many, and equally dear."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_shares import all_shares, forests, ranks

from agentrl.data.forest import TokenForest, forest_from_sequences
from agentrl.model.attention import BLOCK, forest_mask
from agentrl.model.flops import attention_pairs


@given(forests, ranks, st.sampled_from([1, 4, BLOCK]))
def test_every_token_is_in_one_share_and_all_are_equally_long(
    forest: TokenForest, ranks: int, block: int
) -> None:
    shares = all_shares(forest, ranks, block)
    tokens = np.concatenate([share.tokens for share in shares])
    padded = shares[0].forest
    assert sorted(tokens.tolist()) == list(range(padded.tokens))
    assert {len(share.tokens) for share in shares} == {padded.tokens // ranks}
    assert {(end - start) % block for share in shares for start, end in share.chunks} == {0}
    assert 0 <= padded.tokens - forest.tokens < 2 * ranks * block
    before = padded.subtree_end[: forest.tokens], padded.parent[: forest.tokens]
    np.testing.assert_array_equal(before[0], forest.subtree_end)
    np.testing.assert_array_equal(before[1], forest.parent)


@given(forests, ranks)
def test_every_target_is_where_its_parent_is(forest: TokenForest, ranks: int) -> None:
    found = np.zeros(forest.trainable_tokens, np.int64)
    for share in all_shares(forest, ranks):
        mine, parent = share.targets()
        found[mine] += 1
        np.testing.assert_array_equal(share.tokens[parent], forest.parent[forest.target[mine]])
    assert (found == 1).all()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_long_chain_costs_every_process_the_same_attention(ranks: int) -> None:
    chain = forest_from_sequences([[1] * 4096], [[False] * 4095 + [True]])
    even = attention_pairs(chain) / ranks
    for share in all_shares(chain, ranks):
        pairs = int((share.forest.position_ids[share.tokens] + 1).sum())
        assert pairs == pytest.approx(even, rel=1e-3)


@given(forests, ranks, st.integers(1, 9))
def test_segments_tile_a_share_and_see_what_the_mask_lets_them(
    forest: TokenForest, ranks: int, tile: int
) -> None:
    for share in all_shares(forest, ranks):
        segments = share.segments(tile)
        tokens = np.concatenate([np.arange(each.start, each.end) for each in segments])
        np.testing.assert_array_equal(tokens, share.tokens)
        mask = forest_mask(torch.from_numpy(share.forest.subtree_end))[0, 0].numpy()
        for segment in segments:
            assert segment.end - segment.start <= tile or not segment.ancestors
            path = np.concatenate([np.arange(*both) for both in segment.path])
            np.testing.assert_array_equal(np.flatnonzero(mask[segment.end - 1]), path)
