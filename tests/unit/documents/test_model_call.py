"""What a tool answered is stored once and read as the model read it."""

from __future__ import annotations

import dataclasses

from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    ToolExecution,
    full_messages,
    strip_tool_results,
)  # fmt: skip
from agentrl.documents.status import CallStatus

RESULT = ToolExecution(name="add", arguments={"a": 1}, result="3", error=False, seconds=0.1)
ERROR = ToolExecution(name="add", arguments={}, result="no such thing", error=True, seconds=0.1)
READ = (
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "tool", "name": "sub", "content": "there is no such tool"},
    {"role": "tool", "name": "add", "content": "Error: no such thing"},
    {"role": "user", "content": "3"},
)


def make_call(index: int, **changes: object) -> DispatchedSamplingTask:
    call = DispatchedSamplingTask(
        id=f"r/{index}", record="r", index=index, parent=None, status=CallStatus.COMPLETED, messages=(),
        response={"content": "!"}, finish_reason="stop", versions=(), prompt_tokens=1, generated_tokens=1,
        engine="e", generate_seconds=0.1, context_ids=b"", output_ids=b"", logprobs=b"",
    )  # fmt: skip
    return dataclasses.replace(call, **changes)


def test_results_are_named_and_put_back() -> None:
    stored = strip_tool_results(READ, [RESULT, ERROR])
    assert [message.get("execution") for message in stored] == [0, None, 1, None]
    assert "content" not in stored[0]
    parent = make_call(0, tool_executions=(RESULT, ERROR))
    assert full_messages(make_call(1, messages=stored), parent) == READ


def test_messages_without_executions_stay_as_they_are() -> None:
    assert strip_tool_results(READ, ()) == READ
    assert full_messages(make_call(0, messages=READ), None) == READ
