"""Test packing and balancing of sizes under a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.planner import balance, pack
from agentrl.errors import ConfigError

SIZES = st.lists(st.integers(1, 50), max_size=60)


@given(SIZES, st.integers(50, 120))
def test_every_size_is_packed_once_within_the_budget(sizes: list[int], budget: int) -> None:
    groups = pack(sizes, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in group) for group in groups]
    assert all(0 < load <= budget for load in loads)
    assert groups == pack(sizes, budget)
    # first fit: no two groups could have been one
    assert all(a + b > budget for i, a in enumerate(loads) for b in loads[:i])


def test_a_size_above_the_budget_names_the_knob() -> None:
    with pytest.raises(ConfigError, match=r"--max_tokens 10(.|\n)*raise --max_tokens to 11"):
        pack([3, 11], 10)


def test_sizes_keep_their_order_within_a_micro_batch() -> None:
    assert pack([3, 9, 1, 6], 10) == [[1, 2], [0, 3]]


@given(SIZES, st.integers(50, 120), st.integers(2, 5))
def test_ranks_have_equally_many_groups_within_the_budget(sizes: list[int], budget: int, ranks: int) -> None:
    groups = balance(sizes, budget, ranks)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    assert len(groups) == -(-len(pack(sizes, budget)) // ranks) * ranks
    assert all(sum(sizes[index] for index in group) <= budget for group in groups)
    assert groups == balance(sizes, budget, ranks)


def test_ranks_have_nearly_equal_work() -> None:
    sizes = [90, 10, 50, 50, 30, 70, 40, 60, 20, 80]
    loads = [sum(sizes[index] for index in group) for group in balance(sizes, 160, 2)]
    assert sum(loads[0::2]) == sum(loads[1::2]) == 250
    assert max(loads) - min(loads) <= 10
    assert balance([7], 10, 3) == [[0], [], []]


def padded(sizes: list[int], group: list[int]) -> int:
    return len(group) * max((sizes[index] for index in group), default=0)


@given(SIZES, st.integers(50, 500), st.integers(1, 5))
def test_the_budget_counts_padding(sizes: list[int], budget: int, ranks: int) -> None:
    groups = balance(sizes, budget, ranks, padded=True)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    assert len(groups) % ranks == 0
    assert len(groups) == -(-len(pack(sizes, budget, padded=True)) // ranks) * ranks
    assert all(padded(sizes, group) <= budget for group in groups)


def test_padded_sizes_are_grouped_with_similar_ones() -> None:
    sizes = [100, 10, 100, 10, 10, 10]
    assert pack(sizes, 200, padded=True) == [[0, 2], [1, 3, 4, 5]]
    assert balance(sizes, 1000, 2, padded=True) == [[0, 2], [1, 3, 4, 5]]
