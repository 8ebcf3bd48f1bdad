"""Each token of a micro-batch has the experts of its own call, however trees are merged, cut and packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_models import chains, tree

from agentrl.data.forest import TokenForest, forest_from_data
from agentrl.data.planner import build_micro_batches
from agentrl.documents.model_call import ExpertShape, pack_ids, pack_routing, unpack_ids
from agentrl.documents.training import DBRecordData
from agentrl.train.step import routing_metrics

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
