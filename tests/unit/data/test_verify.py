"""Test the comparison of stored training data with their model calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import explain_difference
from agentrl.data.trajectory_tree import to_training_data
from agentrl.documents.model_call import DispatchedSamplingTask, VersionSpan, pack_floats, pack_ids
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData
from agentrl.errors import StoreError

CONFIG = GroupConfig()
TASK = Task(id="train/0/a", task_id="a", split="train", epoch=0, order=0, query="q")
RECORD = Record(
    id="train/0/a/0/1", task=TASK.id, traj_id=0, attempt=1, split="train", epoch=0, query="q",
    score=1.0, turns=2,
)  # fmt: skip


def call(index: int, status: CallStatus = CallStatus.COMPLETED) -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        id=f"{RECORD.id}/{index}", record=RECORD.id, index=index,
        parent=f"{RECORD.id}/{index - 1}" if index else None, status=status, messages=(), response={},
        finish_reason="stop", versions=(VersionSpan(version=index, start=0, end=2),), prompt_tokens=0,
        generated_tokens=2, engine="e", generate_seconds=0.1, context_ids=pack_ids([5, 6]),
        output_ids=pack_ids([7, 8 + index]), logprobs=pack_floats([-0.5, -1.0]),
    )  # fmt: skip


CALLS = (call(0), call(1, CallStatus.FORMAT_ERROR))


def data(config: GroupConfig = CONFIG) -> DBRecordData:
    converted = to_training_data(TASK, RECORD, CALLS, 0.5, config, turn_advantages=(0.0, -0.5))
    assert converted is not None
    return converted


@pytest.mark.parametrize("config", [CONFIG, GroupConfig(drop_zero_advantage=False)])
def test_data_equal_their_calls_with_and_without_the_rules(config: GroupConfig) -> None:
    assert explain_difference(data(config), CALLS, config) is None
    assert explain_difference(data(config), CALLS, None) is None


def test_the_rules_say_which_calls_must_be_there() -> None:
    kept_zero = GroupConfig(drop_zero_advantage=False)
    assert "spans" in str(explain_difference(data(), CALLS, kept_zero))
    assert "spans" in str(explain_difference(data(kept_zero), CALLS, CONFIG))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_ids", pack_ids([1])), ("behavior_logprobs", pack_floats([0.0, 0.0])), ("nodes", ()),
        ("tokens", 3), ("trainable_tokens", 9), ("max_version", 7), ("faulty_calls", (0,)),
    ],
)  # fmt: skip
def test_what_differs_is_named(name: str, value: Any) -> None:
    difference = explain_difference(replace(data(), **{name: value}), CALLS, CONFIG)
    assert difference is not None
    assert difference.startswith(f"{name}: ")


def test_data_without_a_token_to_train_are_told() -> None:
    why = explain_difference(replace(data(), spans=()), CALLS, None)
    assert why == "its model calls have no token to train"


def test_calls_that_contradict_one_another_are_an_error() -> None:
    with pytest.raises(StoreError, match="continues"):
        explain_difference(data(), CALLS[1:], None)
