"""Which requests of a trajectory's owners are equal, and which calls its last one has dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from model_calls import model_call

from agentrl.documents.conversation import prefix_digests
from agentrl.gateway.replay import dropped_calls, request_key, without_volatile
from agentrl.gateway.request import GatewayRequest

REQUEST = GatewayRequest(
    model="policy", messages=[{"role": "user", "content": "It is 12:30. 1+2?"}], tools=[], max_tokens=9
)


def key_of(request: GatewayRequest) -> str:
    messages, tools = without_volatile([request.messages, request.tools], request.volatile)
    return request_key(request, prefix_digests(messages, tools, request.role)[-1])


@pytest.mark.parametrize(
    "change",
    [{"stream": True}, {"logprobs": True}, {"include_usage": True}, {"model": "claude-1"}, {"size": 99}],
)
def test_how_an_answer_is_sent_does_not_count(change: dict[str, Any]) -> None:
    assert key_of(replace(REQUEST, **change)) == key_of(REQUEST)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "It is 12:31. 1+2?"}]},
        {"messages": [{"role": "system", "content": "Add."}, *REQUEST.messages]},
        {"tools": [{"type": "function", "function": {"name": "add"}}]},
        {"max_tokens": 10}, {"changes": {"temperature": 0.5}}, {"stop": ("x",)}, {"one_call": True},
        {"must_call": ("add",)}, {"no_calls": True}, {"schema": {"type": "object"}}, {"role": "judge"},
    ],
)  # fmt: skip
def test_what_changes_the_answer_counts(change: dict[str, Any]) -> None:
    assert key_of(replace(REQUEST, **change)) != key_of(REQUEST)


def test_volatile_text_is_left_out_wherever_it_stands() -> None:
    call = {"id": "c", "function": {"name": "sh", "arguments": {"command": ["ls /tmp/run-17", 3]}}}
    message = {"role": "assistant", "content": [{"type": "text", "text": "at 12:30"}], "tool_calls": [call]}
    volatile = (r"\d\d:\d\d", r"/tmp/run-\d+")
    found = without_volatile(message, volatile)
    assert found["content"] == [{"type": "text", "text": "at …"}]
    assert found["tool_calls"][0]["function"]["arguments"] == {"command": ["ls …", 3]}
    assert without_volatile(message, ()) is message
    later = replace(REQUEST, messages=[{"role": "user", "content": "It is 23:59. 1+2?"}])
    assert key_of(replace(later, volatile=volatile)) == key_of(replace(REQUEST, volatile=volatile))


def test_an_answer_keeps_what_it_continues_and_the_rest_is_dropped() -> None:
    calls = [model_call("r", index, parent) for index, parent in enumerate((None, 0, 1, 1, None))]
    calls.append(model_call("r", 5, follows="r/4"))
    ids = [call.id for call in calls]
    assert dropped_calls(calls, ids) == []
    assert dropped_calls(calls, [ids[3], ids[5]]) == [2]
    assert dropped_calls(calls, [ids[0]]) == [1, 2, 3, 4, 5]
    assert dropped_calls(calls, []) == [0, 1, 2, 3, 4, 5]
