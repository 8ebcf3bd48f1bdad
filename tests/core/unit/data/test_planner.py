"""Test how data are merged, cut, packed and balanced, and that what packing refuses is found before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forest import ids_to, training_data
from training_data import group

from agentrl.data.forest import TokenForest
from agentrl.data.planner import (
    PrefixMerging,
    SequenceRows,
    balance,
    build_micro_batches,
    pack,
    packing_problem,
    step_trees,
)
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.errors import AgentRLError, ConfigError
from agentrl.model.flops import attention_pairs

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


MERGING = st.sampled_from(["off", "trajectory", "group"])


@st.composite
def steps(draw: st.DrawFn) -> list[DBRecordData]:
    """Groups whose trajectories begin alike, with up to two roots and up to three calls each."""
    data = []
    for task in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        for index in range(draw(st.integers(1, 3))):
            ids, nodes, spans = [], [], []
            for _ in range(draw(st.integers(1, 2))):
                start = len(ids)
                ids += prompt
                for _ in range(draw(st.integers(1, 2))):
                    more = draw(st.lists(st.integers(0, 2), min_size=2, max_size=6))
                    spans.append((len(ids) + draw(st.integers(0, 1)), len(ids) + len(more)))
                    ids += more
                nodes.append((start, len(ids), -1))
            data.append(training_data(ids, nodes, spans, name=f"g{task}/{index}", task=f"g{task}"))
    return data


def labels(forests: list[TokenForest]) -> Counter[tuple[int, tuple[int, ...], float]]:
    """What is trained: trajectory, the ids up to the token, and its logprob."""
    return Counter(
        (int(forest.trajectory[row]), ids_to(forest, int(target)), float(logprob))
        for forest in forests
        for row, target, logprob in zip(forest.row, forest.target, forest.behavior_logprob, strict=True)
    )


def longest(data: list[DBRecordData]) -> int:
    return max(node.end - node.start for item in data for node in item.nodes)


@settings(max_examples=80, deadline=None)
@given(steps(), MERGING, st.integers(0, 30), st.integers(1, 3))
def test_every_label_is_trained_once_within_the_budget(
    data: list[DBRecordData], merging: PrefixMerging, room: int, ranks: int
) -> None:
    expected = labels(build_micro_batches(data, 10**6, vocab_size=3, merging="off"))
    budget = longest(data) + room
    forests = build_micro_batches(data, budget, vocab_size=3, merging=merging, ranks=ranks)
    assert all(0 < forest.tokens <= budget for forest in forests)
    assert len(forests) % ranks == 0
    assert labels(forests) == expected
    per_trajectory = Counter(number for number, _, _ in expected.elements())
    for forest in forests:
        assert np.all(np.diff(forest.trajectory) > 0)
        assert forest.trainable_tokens == 0 or all(
            per_trajectory[int(number)] == count
            for number, count in zip(forest.trajectory, forest.row_tokens, strict=True)
        )


@settings(max_examples=60, deadline=None)
@given(steps(), MERGING, st.integers(1, 20), st.integers(1, 3))
def test_filled_micro_batches_train_the_same_and_cut_nothing(
    data: list[DBRecordData], merging: PrefixMerging, fill: int, ranks: int
) -> None:
    whole = build_micro_batches(data, 10**6, vocab_size=3, merging=merging, ranks=ranks)
    forests = build_micro_batches(data, 10**6, vocab_size=3, merging=merging, ranks=ranks, fill=fill)
    assert labels(forests) == labels(whole)
    assert len(forests) % ranks == 0
    if merging == "group":
        assert [forest.tokens for forest in forests] == [forest.tokens for forest in whole]
    elif ranks == 1:
        trees = [tree.tokens for tree in step_trees(data, vocab_size=3, merging=merging)]
        assert sum(forest.tokens for forest in forests) == sum(trees)
        assert max(forest.tokens for forest in forests) <= max(fill, *trees)


@settings(max_examples=80, deadline=None)
@given(steps(), MERGING, st.integers(0, 30), st.integers(1, 3), st.integers(0, 12), st.booleans())
def test_paths_that_run_alone_are_chains_within_the_budget(
    data: list[DBRecordData], merging: PrefixMerging, room: int, ranks: int, above: int, padded: bool
) -> None:
    expected = labels(build_micro_batches(data, 10**6, vocab_size=3, merging="off"))
    budget = longest(data) + room
    rows = SequenceRows(above, padded)
    forests = build_micro_batches(data, budget, vocab_size=3, merging=merging, ranks=ranks, rows=rows)
    assert labels(forests) == expected
    assert len(forests) % ranks == 0
    for forest in forests:
        if forest.depth > above:
            assert forest.is_chains
            assert (int((forest.parent < 0).sum()) * forest.depth if padded else forest.tokens) <= budget
        else:
            assert forest.tokens <= budget


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(0, 30))
def test_generated_tokens_of_different_trajectories_stay_apart(data: list[DBRecordData], room: int) -> None:
    for forest in build_micro_batches(data, longest(data) + room, vocab_size=3, merging="group"):
        for row, target in zip(forest.row, forest.target, strict=True):
            assert forest.owner[target] == forest.trajectory[row]
        inside = forest.parent >= 0
        above = forest.owner[forest.parent[inside]]
        assert np.all((above < 0) | (above == forest.owner[inside]))


def test_off_is_a_row_per_call_trajectory_a_chain_and_group_a_tree() -> None:
    prompt = list(range(10))
    data = [
        training_data([*prompt, 20 + i, 30, 40 + i], [(0, 13, -1)], [(10, 11), (12, 13)], name=f"q{i}")
        for i in range(3)
    ]
    sizes = {
        merging: [tree.tokens for tree in step_trees(data, vocab_size=50, merging=merging)]
        for merging in ("off", "trajectory", "group")
    }
    assert sizes == {"off": [11, 13] * 3, "trajectory": [13] * 3, "group": [10 + 3 * 3]}


def test_a_context_reset_branches_within_its_trajectory() -> None:
    item = training_data([1, 2, 3, 4, 1, 2, 5, 6], [(0, 4, -1), (4, 8, -1)], [(3, 4), (7, 8)])
    (tree,) = step_trees([item], vocab_size=9, merging="trajectory")
    assert tree.tokens == 6
    assert tree.owner.tolist() == [-1, -1, -1, 0, -1, 0]


def test_a_call_sampled_under_two_versions_is_one_row() -> None:
    item = training_data([1, 2, 3, 4], [(0, 4, -1)], [(1, 2), (2, 4)])
    one_call = replace(item, spans=tuple(replace(span, call=0) for span in item.spans))
    assert [t.tokens for t in step_trees([one_call], vocab_size=9, merging="off")] == [4]


def test_a_group_is_cut_at_branch_points_that_repeat_least() -> None:
    prompt, fork = list(range(30)), [50, 51, 52, 53, 54]
    bodies = [[*prompt, *fork, 60], [*prompt, *fork, 61], [*prompt, 62], [*prompt, 63]]
    data = [
        training_data(ids, [(0, len(ids), -1)], [(len(ids) - 1, len(ids))], name=f"q{i}")
        for i, ids in enumerate(bodies)
    ]
    whole = build_micro_batches(data, 39, vocab_size=70)
    assert [forest.tokens for forest in whole] == [39]
    forests = build_micro_batches(data, 38, vocab_size=70)
    assert sorted(forest.tokens for forest in forests) == [32, 37]
    assert not any(forest.holds_parts for forest in forests)


def test_two_ranks_share_a_single_group() -> None:
    data = [training_data([1, 2, *[10 + i] * 8], [(0, 10, -1)], [(2, 10)], name=f"q{i}") for i in range(4)]
    assert [f.tokens for f in build_micro_batches(data, 100, vocab_size=70, ranks=2)] == [18, 18]
    alone = build_micro_batches(data[:1], 100, vocab_size=70, ranks=2)
    assert [(f.tokens, f.trainable_tokens) for f in alone] == [(10, 8), (1, 0)]


def test_a_sequence_above_the_budget_names_its_trajectory_and_the_knob() -> None:
    data = [
        training_data([1, 2], [(0, 2, -1)], [(1, 2)]),
        training_data([1, 2, 3], [(0, 3, -1)], [(1, 3)], name="long"),
    ]
    for merging in ("off", "trajectory", "group"):
        with pytest.raises(ConfigError, match=r"trajectory long has a sequence of 3(.|\n)*--max_tokens to 3"):
            build_micro_batches(data, 2, vocab_size=9, merging=merging)


VOCABULARY = 256


def datum(**changes: Any) -> DBRecordData:
    return replace(group("a")[0], **changes)


def span(start: int, end: int, advantage: float = 1.0, temperature: float = 1.0) -> TrainableSpan:
    return TrainableSpan(
        start=start, end=end, call=0, version=0, advantage=advantage, temperature=temperature
    )


# Refusals of ``forest_from_data`` are cases of ``test_data_that_are_no_forest_are_refused``.
BAD: dict[str, tuple[DBRecordData, str]] = {
    "too long": (
        datum(tokens=99, nodes=(Node(start=0, end=99),), spans=(span(95, 99),), input_ids=pack_ids([1] * 99)),
        "a sequence of 99 tokens is longer than a micro-batch of --max_tokens 64",
    ),
    "outside the vocabulary": (datum(input_ids=pack_ids([1] * 9 + [256])), "token id 256 is outside"),
    "infinite advantage": (datum(spans=(span(6, 10, float("inf")),)), "an advantage is not finite"),
    "temperature 0": (datum(spans=(span(6, 10, 1.0, 0.0),)), "temperature [0.] is not a number above 0"),
    "NaN temperature": (datum(spans=(span(6, 10, 1.0, float("nan")),)), "temperature [nan] is not a number"),
    "half an id": (datum(input_ids=b"123"), "packed arrays cannot be read"),
    "nothing to train": (datum(spans=(), trainable_tokens=0, behavior_logprobs=b""), "no trainable token"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_datum_that_cannot_be_trained_says_why(name: str) -> None:
    data, why = BAD[name]
    assert why in (packing_problem(data, vocab_size=VOCABULARY, max_tokens=64) or "")


def test_a_sequence_beyond_the_models_positions_is_refused() -> None:
    data = datum(
        tokens=50, nodes=(Node(start=0, end=50),), spans=(span(40, 44),), input_ids=pack_ids([1] * 50)
    )
    why = "a sequence of 44 tokens is longer than the model's context of 43"
    assert packing_problem(data, vocab_size=VOCABULARY, max_tokens=64, context=43) == why
    assert packing_problem(data, vocab_size=VOCABULARY, max_tokens=64, context=44) is None


def test_a_trajectory_of_131072_tokens_is_cut_where_it_branches() -> None:
    """The numbers of its pairs of tokens are above 2**32, and its micro-batches need no mask."""
    tokens, half = 1 << 17, 1 << 16
    nodes = (
        Node(start=0, end=half), Node(start=half, end=tokens, parent=0),
        Node(start=tokens, end=tokens + half, parent=0),
    )  # fmt: skip
    spans = (span(half - 9, half), span(tokens - 9, tokens), span(tokens + half - 9, tokens + half))
    data = datum(
        tokens=tokens + half, trainable_tokens=27, nodes=nodes, spans=spans,
        input_ids=pack_ids([1] * tokens + [2] * half), behavior_logprobs=pack_floats([-1.0] * 27),
    )  # fmt: skip
    (whole,) = build_micro_batches([data], tokens + half, vocab_size=VOCABULARY)
    assert attention_pairs(whole) == tokens * (tokens + 1) // 2 + half * half + half * (half + 1) // 2
    parts = build_micro_batches([data], tokens, vocab_size=VOCABULARY)
    assert sorted(part.tokens for part in parts) == [tokens, tokens]
    assert sum(part.trainable_tokens for part in parts) == 27
    why = f"a sequence of {tokens} tokens is longer than a micro-batch of --max_tokens {tokens - 1}"
    assert packing_problem(data, vocab_size=VOCABULARY, max_tokens=tokens - 1) == why


def branching(seed: int) -> DBRecordData:
    """A tree whose branches end with context that nothing trainable follows."""
    random = np.random.default_rng(seed)
    nodes, spans, start = [Node(start=0, end=4)], [], 4
    for _ in range(int(random.integers(1, 5))):
        length = int(random.integers(3, 12))
        parent = int(random.integers(-1, len(nodes)))
        nodes.append(Node(start=start, end=start + length, parent=parent))
        first = start + int(random.integers(1, length))
        spans.append(span(first, min(start + length, first + 2)))
        start += length
    trained = sum(item.end - item.start for item in spans)
    return datum(
        tokens=start, nodes=tuple(nodes), spans=tuple(spans), trainable_tokens=trained,
        input_ids=pack_ids([1] * start), behavior_logprobs=pack_floats([-1.0] * trained),
    )  # fmt: skip


@pytest.mark.parametrize("merging", ["off", "trajectory", "group"])
@pytest.mark.parametrize("seed", range(8))
def test_a_datum_is_too_long_exactly_where_packing_refuses_it(seed: int, merging: Any) -> None:
    data = branching(seed)
    for max_tokens in range(3, data.tokens + 2):
        refused = False
        try:
            build_micro_batches([data], max_tokens, vocab_size=VOCABULARY, merging=merging)
        except AgentRLError:
            refused = True
        problem = packing_problem(data, vocab_size=VOCABULARY, max_tokens=max_tokens)
        assert (problem is not None) == refused, (max_tokens, problem)
