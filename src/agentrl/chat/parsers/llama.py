"""Parse the Llama 3 format: ``{"name": …, "parameters": {…}}; …``, with or without ``<|python_tag|>``."""

from __future__ import annotations

import json
from typing import Any

from agentrl.chat.parsers.base import (
    CallSyntaxError,
    ParsedMessage,
    ToolCall,
    Tools,
    call_of,
    shown,
)
from agentrl.chat.parsers.registry import tool_call_parser

PYTHON_TAG = "<|python_tag|>"


@tool_call_parser("llama", "llama3")
class LlamaParser:
    """JSON tool calls that are the whole message, or everything after the python tag."""

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse a message. Text without the tag that does not start with ``{"name"`` is plain content."""
        content, tag, body = text.partition(PYTHON_TAG)
        if not tag:
            if not _looks_like_call(text):
                return ParsedMessage(text.strip())
            content, body = "", text
        calls, error = _read_calls(body.strip())
        return ParsedMessage(content.strip(), tuple(calls), error)


def _looks_like_call(text: str) -> bool:
    head = text.lstrip()
    return head.startswith("{") and head[1:].lstrip().startswith(('"name"', '"type"'))


def _read_calls(body: str) -> tuple[list[ToolCall], str | None]:
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder(strict=False)
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except (json.JSONDecodeError, RecursionError) as error:
            return calls, f"the tool call is not JSON ({error}): {shown(body)}"
        try:
            calls.append(_call(value))
        except CallSyntaxError as problem:
            return calls, str(problem)
        body = body[end:].lstrip()
        if body and not body.startswith(";"):
            return calls, f"text behind the tool call: {shown(body)}"
        body = body[1:].lstrip()
    return calls, None if calls else f"no tool call behind {PYTHON_TAG}"


def _call(value: Any) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    inner = function if isinstance(function, dict) else value
    key = "parameters" if not isinstance(inner, dict) or "parameters" in inner else "arguments"
    return call_of(inner, key)
