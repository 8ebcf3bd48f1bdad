"""Parse the Llama 3 format: ``{"name": …, "parameters": {…}}; …``, with or without ``<|python_tag|>``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentrl.chat.parsers.base import (
    ARGUMENT_KEYS,
    MOST_FAILURES,
    CallSyntaxError,
    ParsedMessage,
    ToolCall,
    Tools,
    call_of,
    decode_json,
    shown,
    skip_space,
)
from agentrl.chat.parsers.literals import read_literal
from agentrl.chat.parsers.registry import tool_call_parser

PYTHON_TAG = "<|python_tag|>"

_START = re.compile(r"""\{\s*["'](?:name|type|function|parameters|arguments)["']""")


@tool_call_parser("llama", "llama3", "llama3_json")
class LlamaParser:
    """JSON tool calls behind the python tag, or anywhere in a text without one.

    Without the tag an object is a call if it has a name and arguments; other JSON is content.
    """

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse a message. What is neither tag, call nor separator is content."""
        calls: list[ToolCall] = []
        outside: list[str] = []
        error: str | None = None
        at, failures, tagged = 0, 0, False
        for start in self._starts(text):
            if start < at:
                continue
            between = text[at:start]
            tagged = tagged or PYTHON_TAG in between
            try:
                value, end = _decode(text, start)
                if not tagged and not _is_call(value):
                    continue
                calls.append(call_of(value))
                outside.append(_content(between, behind_call=at > 0))
                at = end
            except CallSyntaxError as problem:
                failures += 1
                if tagged or text.lstrip().startswith("{"):
                    error = error or str(problem)
                if failures == MOST_FAILURES:
                    break
        outside.append(_content(text[at:], behind_call=at > 0))
        if PYTHON_TAG in text and not calls:
            error = error or f"no tool call behind {PYTHON_TAG}: {shown(text.partition(PYTHON_TAG)[2])}"
        if calls and not tagged:
            error = None
        return ParsedMessage("".join(outside).strip(), tuple(calls), error)

    def _starts(self, text: str) -> list[int]:
        return [match.start() for match in _START.finditer(text)]


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Decode JSON, or a Python dict on one line. Raises CallSyntaxError."""
    try:
        return decode_json(text, start)
    except CallSyntaxError:
        line = text[start:].splitlines()[0].strip()
        try:
            return read_literal(line), start + len(line)
        except ValueError:
            pass
        raise


def _is_call(value: Any) -> bool:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    return (
        isinstance(inner, Mapping)
        and isinstance(inner.get("name"), str)
        and any(key in inner for key in ARGUMENT_KEYS)
    )


def _content(text: str, *, behind_call: bool) -> str:
    plain = text.replace(PYTHON_TAG, "")
    return plain[skip_space(plain, 0, ";") :] if behind_call and plain[:1] in ("", ";", " ", "\n") else plain
