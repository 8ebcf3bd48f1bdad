"""What a tool answered is stored once and read as the model read it."""

from __future__ import annotations

import bson
import pytest
from made_documents import made_call

from agentrl.documents.model_call import (
    ToolExecution,
    full_messages,
    read_message,
    storable_message,
    strip_tool_results,
)

RESULT = ToolExecution(name="add", arguments={"a": 1}, result="3", error=False, seconds=0.1)
ERROR = ToolExecution(name="add", arguments={}, result="no such thing", error=True, seconds=0.1)
READ = (
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "tool", "name": "sub", "content": "there is no such tool"},
    {"role": "tool", "name": "add", "content": "Error: no such thing"},
    {"role": "user", "content": "3"},
)


def test_results_are_named_and_put_back() -> None:
    stored = strip_tool_results(READ, [RESULT, ERROR])
    assert [message.get("execution") for message in stored] == [0, None, 1, None]
    assert "content" not in stored[0]
    parent = made_call("r", 0, tool_executions=(RESULT, ERROR))
    assert full_messages(made_call("r", 1, messages=stored), parent) == READ


def test_messages_without_executions_stay_as_they_are() -> None:
    assert strip_tool_results(READ, ()) == READ
    assert full_messages(made_call("r", 0, messages=READ), None) == READ


def nested(levels: int) -> list[object]:
    value: list[object] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "arguments", [{"n": 2**63}, {"n": -(2**70)}, {"deep": nested(150)}, {"a\0b": 1}, {"x": {"y": [10**30]}}]
)
def test_arguments_that_bson_cannot_hold_come_back_as_they_were(arguments: dict[str, object]) -> None:
    response = {"content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}
    stored = storable_message(response)
    assert isinstance(stored["tool_calls"][0]["function"]["arguments"], str)
    bson.encode(stored)
    call = made_call("r", 0, response=stored, messages=(storable_message({"role": "assistant", **response}),))
    assert call.message == {"role": "assistant", **response}
    assert full_messages(call, None) == (call.message,)


def test_arguments_that_bson_holds_are_stored_as_they_are() -> None:
    calls = [{"function": {"name": "f", "arguments": {"n": 1.5}}}]
    own = {"role": "assistant", "content": "", "tool_calls": calls}
    assert storable_message(own) == own
    odd = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{not JSON"}}, 5]}
    assert read_message(storable_message(odd)) == odd
