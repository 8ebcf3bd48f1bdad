"""Render messages, arguments and results for spans, as the GenAI conventions say, redacted and cut."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.observe.redact import redact_and_cut

TEXT_LIMIT = 4096
"""Characters of one text in a span."""
_FIRST, _LAST = 8, 24
"""Messages of one attribute: the first ones and the last ones."""


def render(value: Any) -> str:
    """Return a text, or anything else as JSON, redacted and cut."""
    return _cut(value if isinstance(value, str) else _json(value))


def render_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages as JSON: a role and parts each. Of a long list, the middle is left out."""
    shown = list(messages)
    if len(shown) > _FIRST + _LAST:
        missing = len(shown) - _FIRST - _LAST
        note = {"role": "system", "content": f"[cut: {missing} more messages]"}
        shown = [*shown[:_FIRST], note, *shown[-_LAST:]]
    return _json([_message(message) for message in shown])


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = str(message.get("role", "assistant"))
    texts = _texts(message.get("content"))
    if role == "tool":
        response = "\n".join(text["content"] for text in texts if "content" in text)
        part = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": response}
        return {"role": role, "parts": [part]}
    parts: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": _cut(str(message["reasoning_content"]))})
    parts += texts
    parts += [_tool_call(call) for call in message.get("tool_calls") or ()]
    return {"role": role, "parts": parts}


def _texts(content: object) -> list[dict[str, Any]]:
    """Return the parts of a content. An image or a file is named by its type only."""
    if not isinstance(content, list):
        return [{"type": "text", "content": _cut(str(content))}] if content else []
    return [
        {"type": "text", "content": _cut(str(part["text"]))}
        if isinstance(part, Mapping) and "text" in part
        else {"type": str(part.get("type", "unknown")) if isinstance(part, Mapping) else "unknown"}
        for part in content
    ]


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else _json(arguments)
    return {"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": _cut(text)}


def _cut(text: str) -> str:
    return redact_and_cut(text, TEXT_LIMIT)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
