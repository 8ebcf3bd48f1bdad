"""Test the comparison of stored training data with their model calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from model_calls import TASK, model_call, record

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import explain_difference, to_training_data
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.status import CallStatus
from agentrl.documents.training import DBRecordData
from agentrl.errors import StoreError

CONFIG = GroupConfig()
RECORD = record(turns=2)
CALLS = (
    model_call(RECORD.id, 0, None, [5, 6], [7, 8]),
    model_call(RECORD.id, 1, 0, [5, 6], [7, 9], versions=[(1, 0, 2)], status=CallStatus.FORMAT_ERROR),
)


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
    assert explain_difference(replace(data(), **{name: value}), CALLS, CONFIG).startswith(f"{name}: ")


def test_data_without_a_token_to_train_are_told() -> None:
    why = explain_difference(replace(data(), spans=()), CALLS, None)
    assert why == "its model calls have no token to train"


def test_calls_that_contradict_one_another_are_an_error() -> None:
    with pytest.raises(StoreError, match="continues"):
        explain_difference(data(), CALLS[1:], None)
