"""Test the conversion of Records to training data."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from model_calls import TASK, model_call, record

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import to_training_data
from agentrl.documents.model_call import DispatchedSamplingTask, pack_floats, unpack_floats, unpack_ids
from agentrl.documents.status import CallStatus
from agentrl.documents.training import DBRecordData, Node
from agentrl.errors import StoreError

RECORD = record(turns=2)
call = partial(model_call, RECORD.id)
"""A call by its index, its parent's, the ids of its context and of its output."""


def convert(*calls: DispatchedSamplingTask, advantage: float = 0.5, **config: object) -> DBRecordData:
    data = to_training_data(TASK, RECORD, calls, advantage, GroupConfig(**config))  # type: ignore[arg-type]
    assert data is not None
    return data


def trained(data: DBRecordData) -> list[list[int]]:
    ids = unpack_ids(data.input_ids)
    return [ids[span.start : span.end].tolist() for span in data.spans]


def test_turns_that_extend_one_another_are_one_node() -> None:
    data = convert(call(0, None, [1, 2], [10, 11]), call(1, 0, [3], [12]), call(2, 1, [4, 5], [13, 14]))
    assert unpack_ids(data.input_ids).tolist() == [1, 2, 10, 11, 3, 12, 4, 5, 13, 14]
    assert data.nodes == (Node(start=0, end=10),)
    assert trained(data) == [[10, 11], [12], [13, 14]]
    assert [span.call for span in data.spans] == [0, 1, 2]
    assert (data.tokens, data.trainable_tokens, data.turns) == (10, 5, 2)


def test_behavior_logprobs_follow_the_spans() -> None:
    data = convert(call(0, None, [1], [10, 11]), call(1, 0, [3], [12]))
    np.testing.assert_allclose(unpack_floats(data.behavior_logprobs), [-0.10, -0.11, -0.12], rtol=1e-6)


def test_a_context_reset_starts_a_new_root() -> None:
    data = convert(call(0, None, [1], [10]), call(1, None, [7, 8], [11]), call(2, 1, [9], [12]))
    assert data.nodes == (Node(start=0, end=2), Node(start=2, end=7))
    assert trained(data) == [[10], [11], [12]]


def test_several_continuations_of_one_call_share_its_node() -> None:
    data = convert(
        call(0, None, [1], [10]), call(1, 0, [2], [11]), call(2, 0, [3], [12]), call(3, 1, [4], [13])
    )
    assert data.nodes == (
        Node(start=0, end=2),
        Node(start=2, end=6, parent=0),
        Node(start=6, end=8, parent=0),
    )
    assert unpack_ids(data.input_ids).tolist() == [1, 10, 2, 11, 4, 13, 3, 12]
    assert trained(data) == [[10], [11], [13], [12]]
    np.testing.assert_allclose(unpack_floats(data.behavior_logprobs), [-0.10, -0.11, -0.13, -0.12], rtol=1e-6)


def test_a_span_per_policy_version_and_neighboring_spans_of_one_version_merge() -> None:
    data = convert(call(0, None, [1], [10, 11, 12], versions=((3, 0, 1), (3, 1, 1), (4, 1, 3))))
    assert [(s.start, s.end, s.version) for s in data.spans] == [(1, 2, 3), (2, 4, 4)]
    assert (data.min_version, data.max_version) == (3, 4)
    data = convert(call(0, None, [1], [10, 11], versions=((3, 0, 1), (3, 1, 2))))
    assert [(s.start, s.end, s.version) for s in data.spans] == [(1, 3, 3)]


@pytest.mark.parametrize("status", [CallStatus.FORMAT_ERROR, CallStatus.REPEAT_ERROR])
def test_a_faulty_call_earns_nothing_and_loses_what_its_trajectory_loses(status: CallStatus) -> None:
    calls = (call(0, None, [1], [10], status=status), call(1, 0, [2], [11]))
    right = convert(*calls, advantage=0.5)
    assert [span.advantage for span in right.spans] == [0.0, 0.5]
    wrong = convert(*calls, advantage=-0.5)
    assert [span.advantage for span in wrong.spans] == [-0.5, -0.5]
    assert right.faulty_calls == wrong.faulty_calls == (0,)


@pytest.mark.parametrize("drop", [True, False])
def test_a_faulty_call_changes_no_weight_of_its_neighbors(drop: bool) -> None:
    """Ten good tokens and thirty of a call that may be malformed: each weighs 1/40 of the trajectory."""
    good, other = call(0, None, [1], [10] * 10), call(1, 0, [2], [11] * 30)
    counted = [
        convert(good, replace(other, status=status), drop_zero_advantage=drop).trainable_tokens
        for status in (CallStatus.COMPLETED, CallStatus.FORMAT_ERROR)
    ]
    assert counted == [40, 40]


def test_small_advantages_are_dropped_with_faulty_calls_or_without() -> None:
    faulty = call(1, 0, [2], [11], status=CallStatus.FORMAT_ERROR)
    data = convert(call(0, None, [1], [10]), faulty, advantage=0.5, minimal_advantage=0.4)
    assert [span.advantage for span in data.spans] == [0.5, 0.0]


def test_zero_advantages_stay_where_they_are_not_dropped() -> None:
    calls = (call(0, None, [1], [10], status=CallStatus.FORMAT_ERROR), call(1, 0, [2], [11]))
    data = convert(*calls, advantage=0.5, drop_zero_advantage=False)
    assert [span.advantage for span in data.spans] == [0.0, 0.5]


def test_a_failed_call_is_context_at_most() -> None:
    data = convert(call(0, None, [1], [10], status=CallStatus.FAILED), call(1, 0, [2], [11]))
    assert unpack_ids(data.input_ids).tolist() == [1, 10, 2, 11]
    assert trained(data) == [[11]]


def test_calls_behind_the_last_trained_one_are_left_out() -> None:
    data = convert(call(0, None, [1], [10]), call(1, 0, [2], [11], status=CallStatus.FAILED))
    assert unpack_ids(data.input_ids).tolist() == [1, 10]


def test_a_tool_failure_is_trained() -> None:
    assert trained(convert(call(0, None, [1], [10], status=CallStatus.TOOL_FAILED))) == [[10]]


@pytest.mark.parametrize(
    ("advantage", "config"),
    [(0.0, {}), (0.05, {"minimal_advantage": 0.1}), (-0.05, {"minimal_advantage": 0.1})],
)
def test_nothing_trainable_is_none(advantage: float, config: dict[str, float]) -> None:
    group = GroupConfig(**config)  # type: ignore[arg-type]
    assert to_training_data(TASK, RECORD, [call(0, None, [1], [10])], advantage, group) is None


def test_a_trajectory_without_calls_or_output_is_none() -> None:
    assert to_training_data(TASK, RECORD, [], 1.0, GroupConfig()) is None
    assert to_training_data(TASK, RECORD, [call(0, None, [1], [])], 1.0, GroupConfig()) is None


def test_the_first_token_of_a_root_has_nothing_to_be_predicted_from() -> None:
    assert trained(convert(call(0, None, [], [10, 11]))) == [[11]]


def test_logprobs_that_are_not_finite_are_not_trained(caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(call(0, None, [1], [10]), logprobs=pack_floats([float("nan")]))
    assert trained(convert(broken, call(1, 0, [2], [11]))) == [[11]]
    assert "not finite" in caplog.text


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (call(1, 7, [2], [11]), "continues"),
        (replace(call(1, 0, [2], [11]), logprobs=pack_floats([-1.0, -1.0])), "2 logprobs"),
        (call(1, 0, [2], [11, 12], versions=((0, 0, 1),)), "do not cover"),
        (call(1, 0, [2], [11, 12], versions=((0, 1, 2),)), "do not cover"),
    ],
)
def test_calls_that_contradict_one_another_are_refused(broken: DispatchedSamplingTask, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        to_training_data(TASK, RECORD, [call(0, None, [1], [10]), broken], 1.0, GroupConfig())


def test_a_record_without_a_score_is_refused() -> None:
    with pytest.raises(StoreError, match="no score"):
        to_training_data(TASK, replace(RECORD, score=None), [call(0, None, [1], [10])], 1.0, GroupConfig())


def test_a_long_chain_is_no_recursion() -> None:
    calls = [call(0, None, [1], [10]), *(call(i, i - 1, [2], [11]) for i in range(1, 3000))]
    data = convert(*calls)
    assert data.nodes == (Node(start=0, end=6000),)
    assert data.trainable_tokens == 3000
