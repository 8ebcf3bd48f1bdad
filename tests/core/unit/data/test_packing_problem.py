"""Test that packing_problem finds exactly the data that packing refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from training_data import group

from agentrl.data.planner import build_micro_batches, packing_problem
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.errors import AgentRLError

VOCABULARY = 256
NAN = pack_floats([-1.0, float("nan"), -1.0, -1.0])


def datum(**changes: Any) -> DBRecordData:
    return replace(group("a")[0], **changes)


def span(start: int, end: int, advantage: float = 1.0, temperature: float = 1.0) -> TrainableSpan:
    return TrainableSpan(
        start=start, end=end, call=0, version=0, advantage=advantage, temperature=temperature
    )


BAD: dict[str, tuple[DBRecordData, str]] = {
    "too long": (
        datum(tokens=99, nodes=(Node(start=0, end=99),), spans=(span(95, 99),), input_ids=pack_ids([1] * 99)),
        "a sequence of 99 tokens is longer than a micro-batch of --max_tokens 64",
    ),
    "outside the vocabulary": (datum(input_ids=pack_ids([1] * 9 + [256])), "token id 256 is outside"),
    "negative": (datum(input_ids=pack_ids([-1] * 10)), "token id -1 is outside"),
    "NaN logprob": (datum(behavior_logprobs=NAN), "a behavior logprob is not finite"),
    "infinite advantage": (datum(spans=(span(6, 10, float("inf")),)), "an advantage is not finite"),
    "temperature 0": (datum(spans=(span(6, 10, 1.0, 0.0),)), "temperature [0.] is not a number above 0"),
    "NaN temperature": (datum(spans=(span(6, 10, 1.0, float("nan")),)), "temperature [nan] is not a number"),
    "half an id": (datum(input_ids=b"123"), "packed arrays cannot be read"),
    "ids cut off": (datum(input_ids=pack_ids([1, 2])), "says 10 tokens and holds 2"),
    "logprobs cut off": (datum(behavior_logprobs=pack_floats([-1.0])), "logprobs 1"),
    "nodes that do not tile": (datum(nodes=(Node(start=1, end=10),)), "does not follow token 0"),
    "nothing to train": (datum(spans=(), trainable_tokens=0, behavior_logprobs=b""), "no trainable token"),
    "a trainable root": (datum(spans=(span(0, 4),)), "no token predicts it"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_datum_that_cannot_be_trained_says_why(name: str) -> None:
    data, why = BAD[name]
    assert why in (packing_problem(data, vocab_size=VOCABULARY, max_tokens=64) or "")


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
