"""Micro-batches whose prefixes are shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forest import training_data

from agentrl.batching.planner import build_micro_batches, plan_shared
from agentrl.errors import ConfigError

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=10)


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(9, 30), st.booleans())
def test_every_trajectory_is_in_one_micro_batch_within_the_budget(
    sequences: list[list[int]], budget: int, share: bool
) -> None:
    data = [
        training_data(ids, [(0, len(ids), -1)], [(1, len(ids))], name=f"q{i}")
        for i, ids in enumerate(sequences)
    ]
    forests = build_micro_batches(data, budget, vocab_size=3, share=share)
    assert all(0 < forest.tokens <= budget for forest in forests)
    assert sum(forest.trajectories for forest in forests) == len(data)
    assert sum(forest.trainable_tokens for forest in forests) == sum(len(ids) - 1 for ids in sequences)
    if share:
        planned = plan_shared(data, budget)
        assert sorted(item.id for batch in planned for item in batch) == sorted(item.id for item in data)


def test_a_group_with_a_common_prompt_fits_where_its_trajectories_alone_would_not() -> None:
    prompt = list(range(50))
    data = [training_data([*prompt, 60 + i, 61], [(0, 52, -1)], [(50, 52)]) for i in range(8)]
    (forest,) = build_micro_batches(data, 50 + 8 * 2, vocab_size=70)
    assert forest.tokens == 50 + 8 * 2
    assert len(build_micro_batches(data, 50 + 8 * 2, vocab_size=70, share=False)) == 8


def test_a_trajectory_above_the_budget_names_the_knob() -> None:
    data = [training_data([1, 2, 3], [(0, 3, -1)], [(1, 2)])]
    with pytest.raises(ConfigError, match="raise --max_tokens to 3"):
        build_micro_batches(data, 2, vocab_size=9)
