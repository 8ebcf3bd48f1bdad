"""Packing trajectories into micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batching.planner import pack, plan_micro_batches
from agentrl.documents.training import DBRecordData, Node
from agentrl.errors import ConfigError


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
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


def test_trajectories_keep_their_order_within_a_micro_batch() -> None:
    data = [
        DBRecordData(
            id=str(tokens), record="r", task="t", split="train", score=0.0, advantage=0.0, min_version=0,
            max_version=0, tokens=tokens, trainable_tokens=0, turns=0, nodes=(Node(start=0, end=tokens),),
            spans=(), input_ids=b"", behavior_logprobs=b"",
        )
        for tokens in (3, 9, 1, 6)
    ]  # fmt: skip
    plan = plan_micro_batches(data, 10)
    assert [[item.tokens for item in batch] for batch in plan] == [[9, 1], [3, 6]]
