"""The packed experts of tokens: what goes in comes out, however pieces are joined; damage has a name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from made_documents import made_call
from numpy.typing import NDArray

from agentrl.data.finalize_group import build_tree
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    ExpertShape,
    free_routing,
    pack_routing,
    routed_tokens,
    unpack_routing,
    without_first,
)

SHAPE = ExpertShape(layers=3, top_k=2, experts=8)


def chosen(tokens: int, shape: ExpertShape = SHAPE, seed: int = 0) -> NDArray[np.int64]:
    """Random experts [tokens, layers, top_k], in an engine's order."""
    scores = np.random.default_rng(seed).random((tokens, shape.layers, shape.experts))
    return np.argsort(scores, axis=-1)[..., : shape.top_k]


@pytest.mark.parametrize("experts", [2, 128, 129, 256, 257, 4000])
def test_experts_come_back_in_ascending_order(experts: int) -> None:
    shape = dataclasses.replace(SHAPE, experts=experts)
    routing = chosen(5, shape)
    packed = pack_routing(routing)
    assert routed_tokens(packed) == 5
    assert (unpack_routing(packed, shape) == np.sort(routing, -1)).all()


def test_pieces_join_and_lose_their_first_token_without_unpacking() -> None:
    first, second = chosen(4), chosen(3, seed=1)
    packed = pack_routing(first) + free_routing(2) + without_first(pack_routing(second))
    assert routed_tokens(packed) == 8
    found = unpack_routing(packed, SHAPE)
    assert (found[:4] == np.sort(first, -1)).all()
    assert (found[4:6] == -1).all()
    assert (found[6:] == np.sort(second[1:], -1)).all()


def test_tokens_that_the_engine_did_not_capture_route_freely() -> None:
    routing = chosen(4)
    routing[:, 0] = 0  # a dense layer
    routing[1], routing[2, 2] = 0, 5
    found = unpack_routing(pack_routing(routing), SHAPE)
    assert (found[[1, 2]] == -1).all()
    assert (found[[0, 3]] == np.sort(routing[[0, 3]], -1)).all()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda packed: packed[:-1], "malformed header"),
        (lambda packed: packed + b"\1", "ends in a header"),
        (lambda packed: packed[:20] + bytes(len(packed) - 20), "cannot be decompressed"),
    ],
)
def test_damaged_bytes_are_named(damage: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_routing(damage(pack_routing(chosen(9))), SHAPE)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (dataclasses.replace(SHAPE, layers=2), "3 layers with 2 experts a token, not 2 with 2"),
        (dataclasses.replace(SHAPE, experts=3), "expert 7 of 3"),
    ],
)
def test_another_models_routing_is_named(shape: ExpertShape, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_routing(pack_routing(chosen(9)), shape)


def call(
    index: int, parent: int | None, before: int, context: int, output: int, routing: bytes
) -> DispatchedSamplingTask:
    return made_call(
        "r", index, parent=parent, context=range(context), output=range(output), routing=routing,
        prompt_tokens=before + context,
    )  # fmt: skip


def test_each_token_of_a_tree_has_the_routing_of_the_call_that_computed_it() -> None:
    r = [chosen(4, seed=seed) for seed in range(5)]
    calls = [
        call(0, None, 0, 2, 3, pack_routing(r[0])),  # tokens 0 to 3; 4 is its last
        call(1, 0, 5, 1, 3, pack_routing(r[1])),  # 4 to 7; 8 is its last
        call(2, 0, 5, 2, 2, pack_routing(r[2])),  # 4 again, 9 to 11; 12 is its last
        call(3, 2, 9, 3, 2, pack_routing(r[3])),  # one token is missing: 12 to 16 are free; 17 is its last
        call(4, None, 0, 4, 1, pack_routing(r[4])),  # 18 to 21
    ]
    tree = build_tree(calls, [each.id for each in calls])
    found = unpack_routing(tree.routing, SHAPE)
    assert len(found) == len(tree.input_ids) == 23
    expected = np.full_like(found, -1)
    expected[0:4], expected[4:8], expected[9:12], expected[18:22] = r[0], r[1], r[2][1:], r[4]
    assert (found == np.sort(expected, -1)).all()
    bare = [dataclasses.replace(each, routing=b"") for each in calls]
    assert build_tree(bare, [each.id for each in calls]).routing == b""
