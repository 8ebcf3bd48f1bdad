"""Run the tool calls of one turn and return their results as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentrl.chat.parsers import ToolCall, validate_call
from agentrl.chat.renderer import Message
from agentrl.documents.model_call import ToolExecution
from agentrl.documents.sanitize_bson import replace_surrogates, sanitize_bson
from agentrl.errors import ToolServerError
from agentrl.rollout.model_call import PendingCall, Turn
from agentrl.tools.base import Schema, ToolResult
from agentrl.user_code import contain


class Tools(Protocol):
    """The tools of one trajectory: ``TrajectoryTools``."""

    async def schemas(self, servers: Sequence[str] | None = None) -> list[Schema]:
        """Return OpenAI function schemas."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one tool."""
        ...


async def run_tool_calls(
    turn: Turn, pending: PendingCall, tools: Tools, schemas: Sequence[Schema]
) -> list[Message]:
    """Run the tool calls of ``turn`` in order; record them in ``pending``; return one message per call.

    A malformed tool call is not run: its message says what is wrong. An error that a tool reports is a
    result. Raises ToolServerError if a server is lost.
    """
    ids = [call["id"] for call in pending.response.get("tool_calls", ())]
    messages = []
    for call, call_id in zip(turn.tool_calls, ids, strict=True):
        problem = validate_call(call, schemas)
        if problem is None:
            pending.executions.append(await _execute(call, tools))
            text = pending.executions[-1].text
        else:
            text = pending.refuse(problem)
        messages.append(_tool_message(text, call.name, call_id))
    if turn.error is not None:
        messages.append(_tool_message(pending.refuse(turn.error), None, None))
    return messages


async def _execute(call: ToolCall, tools: Tools) -> ToolExecution:
    result = await contain(
        lambda: tools.call(call.name, call.arguments), f"tool {call.name}", ToolServerError
    )
    return ToolExecution(
        name=call.name,
        arguments=sanitize_bson(call.arguments),
        result=str(replace_surrogates(result.text)),
        error=result.error,
        seconds=result.seconds,
        server=result.server,
    )


def _tool_message(text: str, name: str | None, call_id: str | None) -> Message:
    message: Message = {"role": "tool", "content": text}
    if name is not None:
        message["name"] = name
    if call_id is not None:
        message["tool_call_id"] = call_id
    return message
