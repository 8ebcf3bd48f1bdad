"""Context parallelism: the tokens of each rank, and their attention; layouts.py runs several ranks."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_shares import all_shares, forests, ranks
from tiny_models import chains, packed, tiny_model, tree
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

from agentrl.data.forest import TokenForest, forest_from_sequences
from agentrl.distributed.context_parallel import (
    ContextParallel,
    RankTokens,
    TokenExchange,
    check_context,
    split_attention,
)
from agentrl.errors import ConfigError, ModelError
from agentrl.model import path_attention
from agentrl.model.attention import BLOCK, forest_block_mask, forest_mask
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


@given(forests, ranks)
def test_segments_cover_a_share_and_see_what_the_mask_lets_them(forest: TokenForest, ranks: int) -> None:
    for share in all_shares(forest, ranks):
        segments = share.segments()
        tokens = np.concatenate([np.arange(each.start, each.end) for each in segments])
        np.testing.assert_array_equal(tokens, share.tokens)
        mask = forest_mask(torch.from_numpy(share.forest.subtree_end))[0, 0].numpy()
        for segment in segments:
            path = np.concatenate([np.arange(*both) for both in segment.path])
            np.testing.assert_array_equal(np.flatnonzero(mask[segment.end - 1]), path)


class Whole:
    """Stands for the other processes: it knows all keys and values, and takes the gradients of all."""

    def __init__(self, *states: Tensor) -> None:
        self.states, self.grads, self.asked = states, [torch.zeros_like(each) for each in states], 0
        self.own = 0

    def gather(self, local: Tensor) -> Tensor:
        self.asked, self.own = self.asked + 1, local.shape[2]
        return self.states[(self.asked - 1) % len(self.states)].detach()

    def scatter_sum(self, grad: Tensor) -> Tensor:
        self.asked += 1
        self.grads[(self.asked - 1) % len(self.grads)] += grad
        return torch.zeros_like(grad[:, :, : self.own])

    def gather_with_gradient(self, *local: Tensor) -> tuple[Tensor, ...]:
        return self.states


def attend(query: Tensor, exchange: Whole, share: RankTokens, **seen: Any) -> Tensor:
    """[1, heads, n, d] of a share's queries; ``query`` [1, heads, N, d]."""
    tokens = torch.from_numpy(share.tokens)
    own = query[:, :, tokens]
    key, value = (each[:, :, tokens] for each in exchange.states)
    module = nn.Identity()
    others = cast(TokenExchange, exchange)
    output, _ = split_attention(module, own, key, value, None, exchange=others, **seen)
    return output.transpose(1, 2)


def random_states(tokens: int, width: int, value_width: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, size, requires_grad=True)
        for heads, size in ((4, width), (2, width), (2, value_width or width))
    )
    return query, key, value


def dense(query: Tensor, key: Tensor, value: Tensor, forest: TokenForest) -> Tensor:
    mask = forest_mask(torch.from_numpy(forest.subtree_end))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


@settings(max_examples=15, deadline=None)
@given(forests, ranks, st.sampled_from([None, 1, 9]))
def test_attention_and_its_gradients_are_those_of_the_dense_mask(
    forest: TokenForest, ranks: int, tile: int | None
) -> None:
    """With tiles, values have a width of their own, for which the CPU has no kernel without masks."""
    shares = all_shares(forest, ranks)
    padded = shares[0].forest
    query, key, value = random_states(padded.tokens, 8, None if tile is None else 5)
    expected = dense(query, key, value, padded)
    weights = torch.randn_like(expected)
    grads = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    exchange, grad_query = Whole(key, value), torch.zeros_like(query)
    with mock.patch.object(path_attention, "TILE", tile):
        for share in shares:
            tokens = torch.from_numpy(share.tokens)
            output = attend(query, exchange, share, segments=share.segments())
            torch.testing.assert_close(output, expected[:, :, tokens], rtol=1e-4, atol=1e-5)
            grad_query += torch.autograd.grad((output * weights[:, :, tokens]).sum(), query)[0]
    for ours, theirs in zip((grad_query, *exchange.grads), grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("ranks", [2, 3])
def test_under_a_block_mask_it_is_the_same_attention(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's uncompiled form has a backward that no device check keeps from a CPU's tensors."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    forest = packed([tree(seed) for seed in range(20)] + chains(0, 20))
    shares = all_shares(forest, ranks, BLOCK)
    padded = shares[0].forest
    states = random_states(padded.tokens, 16)
    expected = dense(*states, padded)
    weights = torch.randn_like(expected)
    grads = torch.autograd.grad((expected * weights).sum(), states)
    found = [torch.zeros_like(each) for each in states]
    for share in shares:
        tokens = torch.from_numpy(share.tokens)
        mask = forest_block_mask(padded.subtree_end, "cpu", share.tokens)
        output = attend(states[0], Whole(*states[1:]), share, block_mask=mask)
        torch.testing.assert_close(output, expected[:, :, tokens], rtol=1e-4, atol=1e-5)
        parts = torch.autograd.grad((output * weights[:, :, tokens]).sum(), states)
        found = [total + part for total, part in zip(found, parts, strict=True)]
    for ours, theirs in zip(found, grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_window_that_a_sequence_may_outgrow_is_refused() -> None:
    model = tiny_model("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    check_context(model, 8)
    with pytest.raises(ConfigError, match=r"--cp_size: Qwen3.* 8 tokens back.*--max_tokens 9"):
        check_context(model, 9)


def test_a_state_along_the_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    check_context(model, 100)
    monkeypatch.setattr(model, "_is_stateful", True)
    with pytest.raises(ConfigError, match="a recurrent state, which carries over from one sequence"):
        check_context(model, 100)


def test_an_executor_that_cannot_split_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="'per_sequence' cannot split tokens"):
        ContextParallel(tiny_model("llama"), cast(Any, None), "per_sequence")


def test_a_layer_without_a_token_exchange_is_refused() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("agentrl_context_parallel")
    with pytest.raises(ModelError, match="without a token exchange"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
