"""Convert messages between LangChain and AgentRL."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ToolMessage,
    convert_to_messages,
)

from agentrl.chat.chat_format import Message
from agentrl.errors import TrajectoryError
from agentrl.rollout.model_call import Turn

_ROLES = {"system": "system", "human": "user", "ai": "assistant", "tool": "tool"}


def to_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """Return messages of LangChain as AgentRL's. Raises TrajectoryError for other kinds and for images."""
    return [_to_message(message) for message in messages]


def from_messages(messages: Sequence[Message]) -> list[BaseMessage]:
    """Return AgentRL's messages as LangChain's."""
    return convert_to_messages([_as_openai(message) for message in messages])


def to_ai_message(message: Message, turn: Turn) -> AIMessage:
    """Return the answer of a model call.

    A tool call that cannot be read is an ``invalid_tool_call``, which a graph may answer.
    """
    calls = [
        {"name": call["function"]["name"], "args": call["function"]["arguments"], "id": call["id"]}
        for call in message.get("tool_calls") or ()
    ]
    invalid = (
        []
        if turn.error is None
        else [{"name": None, "args": turn.text, "id": None, "error": turn.error, "type": "invalid_tool_call"}]
    )
    reasoning = message.get("reasoning_content")
    return AIMessage(
        content=message["content"],
        tool_calls=calls,
        invalid_tool_calls=invalid,
        additional_kwargs={"reasoning_content": reasoning} if reasoning else {},
        response_metadata={"finish_reason": turn.finish_reason},
        usage_metadata={
            "input_tokens": turn.prompt_tokens,
            "output_tokens": turn.output_tokens,
            "total_tokens": turn.prompt_tokens + turn.output_tokens,
        },
        id=f"run-{uuid.uuid4().hex}",
    )


def text_of(message: BaseMessage) -> str:
    """Return the text of a message. Raises TrajectoryError for an image or another part that is not text."""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        if isinstance(part, str):
            texts.append(part)
        elif part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        elif isinstance(message, ToolMessage):
            texts.append(json.dumps(part, ensure_ascii=False, default=str))
        else:
            raise TrajectoryError(
                f"a message of the graph has a part of type {part.get('type')!r}",
                hint="the policy's chat model takes text only",
            )
    return "".join(texts)


def _to_message(message: BaseMessage) -> Message:
    role = _ROLES.get(message.type)
    if role is None:
        raise TrajectoryError(
            f"a message of the graph is of type {message.type!r}",
            hint=f"the policy's chat model takes: {', '.join(_ROLES)}",
        )
    converted: Message = {"role": role, "content": text_of(message)}
    if isinstance(message, AIMessage):
        if reasoning := message.additional_kwargs.get("reasoning_content"):
            converted["reasoning_content"] = reasoning
        if message.tool_calls:
            converted["tool_calls"] = [
                {"id": call["id"] or "", "type": "function",
                 "function": {"name": call["name"], "arguments": call["args"]}}
                for call in message.tool_calls
            ]  # fmt: skip
    if isinstance(message, ToolMessage):
        converted["tool_call_id"] = message.tool_call_id
        if message.name:
            converted["name"] = message.name
    return converted


def _as_openai(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in calls
    ]
    return {**message, "tool_calls": texts}
