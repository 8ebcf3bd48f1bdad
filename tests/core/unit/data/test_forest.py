"""Test TokenForests from training data: layout, invariants, refusals, cuts and routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import chains, path_to, tree

from agentrl.data.forest import (
    TokenForest,
    concatenate,
    forest_from_data,
    forest_from_sequences,
    join,
    merge_prefixes,
    restrict,
)
from agentrl.data.planner import build_micro_batches
from agentrl.documents.model_call import (
    ExpertShape,
    SamplingMask,
    pack_floats,
    pack_ids,
    pack_routing,
    unpack_ids,
)
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.errors import ForestError
from agentrl.train.step import routing_metrics


def training_data(
    ids: list[int], nodes: list[tuple[int, int, int]], spans: list[tuple[int, int]], name: str = "q/0/1",
    task: str = "q",
) -> DBRecordData:  # fmt: skip
    """One trajectory; token i has logprob −i/100, span j version j and advantage j + 1."""
    logprobs = [-i / 100 for start, end in spans for i in range(start, end)]
    return DBRecordData(
        id=name, record=name, task=task, split="train", score=1.0, advantage=1.0, min_version=0,
        max_version=0, tokens=len(ids), trainable_tokens=len(logprobs), turns=len(spans),
        nodes=tuple(Node(start=start, end=end, parent=parent) for start, end, parent in nodes),
        spans=tuple(
            TrainableSpan(start=start, end=end, call=j, version=j, advantage=j + 1.0, temperature=1.0 + j / 4)
            for j, (start, end) in enumerate(spans)
        ),
        input_ids=pack_ids(ids), behavior_logprobs=pack_floats(logprobs),
    )  # fmt: skip


def assert_well_formed(forest: TokenForest) -> None:
    """What a token sees by ``subtree_end`` is its ancestors; positions count them."""
    index = np.arange(forest.tokens)
    for query in index:
        seen = index[(index <= query) & (query < forest.subtree_end)]
        assert seen.tolist() == path_to(forest, int(query))
        assert forest.position_ids[query] == len(seen) - 1
    assert len(forest.row) == len(forest.target) == len(forest.advantage) == forest.trainable_tokens
    assert len(forest.behavior_logprob) == len(forest.version) == forest.trainable_tokens
    assert (forest.parent[forest.target] >= 0).all()


def test_a_chain_with_a_context_reset() -> None:
    forest = forest_from_data([
        training_data([1, 2, 3, 4, 5], [(0, 5, -1)], [(1, 2), (3, 5)], "a"),
        training_data([6, 7, 8, 9], [(0, 2, -1), (2, 4, -1)], [(1, 2), (3, 4)], "b"),
    ])  # fmt: skip
    assert_well_formed(forest)
    assert forest.is_chains
    assert forest.input_ids.tolist() == list(range(1, 10))
    assert forest.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1]
    assert forest.parent.tolist() == [-1, 0, 1, 2, 3, -1, 5, -1, 7]
    assert forest.subtree_end.tolist() == [5] * 5 + [7] * 2 + [9] * 2
    assert forest.target.tolist() == [1, 3, 4, 6, 8]
    assert forest.row.tolist() == [0, 0, 0, 1, 1]
    assert forest.advantage.tolist() == [1.0, 2.0, 2.0, 1.0, 2.0]
    assert forest.version.tolist() == [0, 1, 1, 0, 1]
    assert forest.temperature.tolist() == [1.0, 1.25, 1.25, 1.0, 1.25]
    np.testing.assert_allclose(forest.behavior_logprob, [-0.01, -0.03, -0.04, -0.01, -0.03])
    assert (forest.trajectories, forest.tokens, forest.depth) == (2, 9, 5)


def test_nodes_stored_breadth_first_are_laid_out_depth_first() -> None:
    data = training_data(
        [10, 11, 20, 30, 31, 40], [(0, 2, -1), (2, 3, 0), (3, 5, 0), (5, 6, 1)], [(3, 5), (5, 6)]
    )
    forest = forest_from_data([data])
    assert_well_formed(forest)
    assert not forest.is_chains
    assert forest.input_ids.tolist() == [10, 11, 20, 40, 30, 31]
    assert forest.subtree_end.tolist() == [6, 6, 4, 4, 6, 6]
    assert forest.input_ids[forest.target].tolist() == [30, 31, 40]
    np.testing.assert_allclose(forest.behavior_logprob, [-0.03, -0.04, -0.05])


@st.composite
def token_trees(draw: st.DrawFn) -> DBRecordData:
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    ends = np.cumsum(lengths).tolist()
    nodes = [
        (end - length, end, draw(st.integers(-1, i - 1)))
        for i, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]
    spans = [
        (start + (parent < 0), end)
        for start, end, parent in nodes
        if end - start > (parent < 0) and draw(st.booleans())
    ]
    return training_data(list(range(100, 100 + ends[-1])), nodes, spans)


@settings(max_examples=60, deadline=None)
@given(st.lists(token_trees(), min_size=1, max_size=3))
def test_any_tree_keeps_its_paths_and_its_labels(data: list[DBRecordData]) -> None:
    forest = forest_from_data(data)
    assert_well_formed(forest)
    assert forest.trajectories == len(data)
    for row, item in enumerate(data):
        targets = forest.target[forest.row == row]
        stored = [i for span in item.spans for i in range(span.start, span.end)]
        assert forest.input_ids[targets].tolist() == [100 + i for i in stored]
        np.testing.assert_allclose(forest.behavior_logprob[forest.row == row], [-i / 100 for i in stored])
        for target, index in zip(targets, stored, strict=True):
            path = [index]
            while (before := stored_parent(item, path[-1])) >= 0:
                path.append(before)
            ids = forest.input_ids[path_to(forest, int(target))]
            assert ids.tolist() == [100 + i for i in reversed(path)]


def stored_parent(data: DBRecordData, index: int) -> int:
    """Index of the token before a stored token, by the document's own rule."""
    node = next(node for node in data.nodes if node.start <= index < node.end)
    if index > node.start:
        return index - 1
    return -1 if node.parent < 0 else data.nodes[node.parent].end - 1


GOOD = training_data([1, 2, 3, 4], [(0, 4, -1)], [(1, 2), (3, 4)])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(GOOD, tokens=5), "says 5 tokens and holds 4"),
        (replace(GOOD, nodes=(Node(start=0, end=3),)), "nodes cover 3 of 4"),
        (replace(GOOD, nodes=(Node(start=1, end=4),)), "does not follow token 0"),
        (replace(GOOD, nodes=(Node(start=0, end=4, parent=0),)), "has parent 0, not an earlier node"),
        (training_data([1, 2], [(0, 2, -1)], [(1, 3)]), r"span \[1, 3\) is outside 2 tokens"),
        (training_data([1, 2, 3], [(0, 3, -1)], [(1, 3), (2, 3)]), "spans overlap"),
        (training_data([1, 2], [(0, 2, -1)], [(0, 2)]), "trainable and a root"),
        (replace(GOOD, behavior_logprobs=pack_floats([-0.1])), "logprobs 1"),
        (replace(GOOD, behavior_logprobs=pack_floats([-0.1, float("nan")])), "logprob is not finite"),
        (replace(GOOD, sampling_mask=SamplingMask.of([[2], [3]]).pack()), "not among the ids"),
        (replace(GOOD, sampling_mask=SamplingMask.of([[2]]).pack()), "not one of 2 tokens"),
        (replace(GOOD, sampling_mask=SamplingMask.of([[2, 9], [4]]).pack()), "token id 9 is outside"),
        (replace(GOOD, input_ids=pack_ids([1, 2, 3, 9])), "token id 9 is outside the vocabulary of 9 ids"),
        (replace(GOOD, input_ids=pack_ids([1, -2, 3, 4])), "token id -2 is outside"),
    ],
)
def test_data_that_are_no_forest_are_refused(bad: DBRecordData, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        forest_from_data([bad], vocab_size=9)


def test_supervised_sequences() -> None:
    forest = forest_from_sequences([[5, 6, 7], [8, 9]], [[False, True, True], [False, True]])
    assert_well_formed(forest)
    assert forest.target.tolist() == [1, 2, 4]
    assert forest.row.tolist() == [0, 0, 1]
    assert forest.advantage.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[]], [[]], "no tokens"),
        ([[1, 2]], [[True, True]], "first token is trainable"),
        ([[1, 2]], [[False]], "a mask of 1"),
        ([], [], "at least one trajectory"),
    ],
)
def test_sequences_that_are_none_are_refused(
    ids: list[list[int]], mask: list[list[bool]], message: str
) -> None:
    with pytest.raises(ForestError, match=message):
        forest_from_sequences(ids, mask)


def test_concatenation_is_packing() -> None:
    items = [training_data([1, 2, 3], [(0, 3, -1)], [(1, 3)]), GOOD]
    packed, joined = forest_from_data(items), concatenate([forest_from_data([item]) for item in items])
    for name in ("input_ids", "parent", "subtree_end", "row", "target", "version", "temperature"):
        assert getattr(packed, name).tolist() == getattr(joined, name).tolist()


def test_ages_belong_to_tokens_and_stay_with_them() -> None:
    item = training_data([1, 2, 3, 4, 5], [(0, 5, -1)], [(1, 3), (4, 5)])
    first, second = item.spans
    item = replace(item, spans=(replace(first, version=21), replace(second, version=20)))
    forest = forest_from_data([item], ages={20: 0, 21: 4})
    assert (forest.version.tolist(), forest.age.tolist()) == ([21, 21, 20], [4, 4, 0])
    assert concatenate([forest, forest]).age.tolist() == [4, 4, 0] * 2
    assert restrict(forest, np.array([False, True, True])).age.tolist() == [4, 0]
    assert forest_from_data([item]).age.tolist() == [0, 0, 0]
    with pytest.raises(ForestError, match="policy version 21 has no age"):
        forest_from_data([item], ages={20: 0})


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


SHAPE = ExpertShape(layers=2, top_k=2, experts=90)


def by_id(ids: np.ndarray, offset: int = 0) -> np.ndarray:
    """Experts that say which id they belong to."""
    first = ids[:, None, None] + offset + np.arange(SHAPE.layers)[None, :, None]
    return np.concatenate([first, first + 1], -1)


def routed(data: DBRecordData, offset: int = 0) -> DBRecordData:
    return replace(data, routing=pack_routing(by_id(unpack_ids(data.input_ids), offset)))


def assert_own(forest: TokenForest) -> None:
    assert (forest.routing.experts == by_id(forest.input_ids)).all()


@pytest.mark.parametrize("merging", ["off", "trajectory", "group"])
def test_tokens_keep_their_experts(merging: Any) -> None:
    data = [routed(item) for item in [tree(), *chains()]]
    forests = build_micro_batches(data, 30, vocab_size=61, merging=merging, experts=SHAPE, ages={0: 0, 1: 0})
    assert len(forests) > 1
    for forest in forests:
        assert_own(forest)
    assert routing_metrics(forests, 0.25) == {
        "router_replayed": 1.0, "router_differs": 0.25, "router_merge_differs": 0.0
    }  # fmt: skip


def group(*routings: int | None) -> list[TokenForest]:
    """One micro-batch of trajectories with equal prompts, each with its own experts, or with none."""
    made = []
    for number, offset in enumerate(routings):
        item = replace(chains(count=1)[0], id=f"t{number}", record=f"t{number}", task="group")
        ids = unpack_ids(item.input_ids).copy()
        ids[-1] = number
        item = replace(item, input_ids=pack_ids(ids))
        made.append(item if offset is None else routed(item, offset))
    return build_micro_batches(made, 200, vocab_size=61, experts=SHAPE, ages={0: 0, 1: 0})


def test_a_merged_token_has_the_experts_of_the_first_that_has_some() -> None:
    (forest,) = group(None, 0, 7)
    prompt = int(np.flatnonzero(forest.owner >= 0)[0])
    assert prompt > 0
    assert (forest.routing.experts[:prompt] == by_id(forest.input_ids)[:prompt]).all()
    assert (forest.routing.merged, forest.routing.differing) == (prompt, prompt)
    assert routing_metrics([forest], 0.0)["router_merge_differs"] == 1.0
    first = forest.owner == 0
    assert (forest.routing.experts[first] == -1).all()
    assert routing_metrics([forest], 0.0)["router_replayed"] == 1 - first.sum() / forest.tokens


def test_a_routing_of_another_model_is_logged_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    data = routed(tree())
    assert forest_from_data([data], experts=replace(SHAPE, layers=3)).routing is None
    assert "2 layers with 2 experts a token, not 3 with 2" in caplog.text
    short = replace(data, routing=pack_routing(by_id(np.arange(3))))
    assert forest_from_data([short], experts=SHAPE).routing is None
    assert "a routing of 3 tokens for 26" in caplog.text
    assert forest_from_data([data]).routing is None
