"""Run the tool calls of one turn and return their results as messages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.base.user_code import contain_errors
from agentrl.calls.trace import end_tool, tool_span
from agentrl.calls.trajectory_calls import PendingCall, Turn
from agentrl.chat.chat_format import Message
from agentrl.chat.parsers.arguments import validate_call
from agentrl.chat.parsers.parser import ToolCall
from agentrl.documents.document import replace_surrogates
from agentrl.documents.images import Part
from agentrl.documents.model_call import ToolExecution, storable_arguments
from agentrl.errors import ToolServerError
from agentrl.tools.tool import Schema, ToolResult, schema_name

if TYPE_CHECKING:
    from agentrl.store.model_calls import Images

_NOT_SHOWN = re.compile(r"(\[image, [^\]\n]{1,200}); not shown\]")
"""The description of an image that the model sees behind the text."""


class Tools(Protocol):
    """The tools of one trajectory: ``ToolSession``."""

    async def list(self) -> Sequence[Schema]:
        """Return the function schemas of the tools offered now."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one tool."""
        ...

    async def rewards(self) -> dict[str, dict[str, Any]]:
        """Return the rewards that tools give, by tool."""
        ...


async def run_tool_calls(
    turn: Turn,
    pending: PendingCall,
    tools: Tools,
    schemas: Sequence[Schema],
    images: Images | None = None,
) -> list[Message]:
    """Run the tool calls of ``turn`` in parallel; record them in ``pending``, and return one message per
    call, both in the order of the calls.

    A malformed tool call is not run: its message says what is wrong. An error that a tool reports is a
    result. Raises ToolServerError if a server is lost; the other calls of the turn are recorded. Images of
    results are stored in ``images``; without it the model reads text only, and the text says what is missing.
    """
    ids = [call["id"] for call in pending.response.get("tool_calls", ())]
    if {call.name for call in turn.tool_calls} - set(map(schema_name, schemas)):
        schemas = [*schemas, *await tools.list()]  # a server may have added tools since the prompt
    problems = [validate_call(call, schemas) for call in turn.tool_calls]
    valid = [call for call, problem in zip(turn.tool_calls, problems, strict=True) if problem is None]
    results: Sequence[ToolExecution | BaseException]
    if len(valid) == 1:  # a task would cost more than many a tool
        results = [await execute(valid[0], tools, images)]
    else:
        # Let all calls end: a task group would cancel the others, which may have taken effect unrecorded.
        runs = (execute(call, tools, images) for call in valid)
        results = await asyncio.gather(*runs, return_exceptions=True)
    pending.executions += [result for result in results if isinstance(result, ToolExecution)]
    for result in results:
        if isinstance(result, BaseException):
            raise result
    texts = iter(pending.executions[len(pending.executions) - len(valid) :])
    messages = []
    for call, call_id, problem in zip(turn.tool_calls, ids, problems, strict=True):
        content = next(texts).content if problem is None else pending.refuse(problem)
        messages.append(_tool_message(content, call.name, call_id))
    if turn.error is not None:
        messages.append(_tool_message(pending.refuse(turn.error), None, None))
    return messages


async def execute(call: ToolCall, tools: Tools, images: Images | None = None) -> ToolExecution:
    """Run one valid tool call; store the images of its result. Raises ToolServerError for a lost server."""
    with tool_span(call) as span:
        result = await contain_errors(
            lambda: tools.call(call.name, call.arguments), f"tool {call.name}", ToolServerError
        )
        shown = () if images is None else result.images
        if shown and images is not None:
            await images.put(*shown)
        text = _NOT_SHOWN.sub(r"\1]", result.text, count=len(shown)) if shown else result.text
        execution = ToolExecution(
            name=call.name,
            arguments=storable_arguments(call.arguments),
            result=str(replace_surrogates(text)),
            error=result.error,
            seconds=result.seconds,
            server=result.server,
            reward=result.reward,
            condensed=result.condensed,
            images=tuple(image.ref for image in shown),
        )
        end_tool(span, execution)
    return execution


def _tool_message(text: str | list[Part], name: str | None, call_id: str | None) -> Message:
    message: Message = {"role": "tool", "content": text}
    if name is not None:
        message["name"] = name
    if call_id is not None:
        message["tool_call_id"] = call_id
    return message
