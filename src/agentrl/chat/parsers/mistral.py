"""Parse the Mistral formats: ``[TOOL_CALLS] [{"name": …, …}, …]`` and ``[TOOL_CALLS]NAME[ARGS]{…}``."""

from __future__ import annotations

from agentrl.chat.parsers.base import (
    CallSyntaxError,
    ParsedMessage,
    ToolCall,
    Tools,
    arguments_of,
    call_of,
    load_json,
    shown,
)
from agentrl.chat.parsers.registry import tool_call_parser

MARK, ARGS = "[TOOL_CALLS]", "[ARGS]"


@tool_call_parser("mistral")
class MistralParser:
    """Tool calls in the old and the new format, recognized in each part after the marker."""

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse a message. Text before the first marker is content."""
        content, *parts = text.split(MARK)
        calls: list[ToolCall] = []
        error = None
        for part in parts:
            try:
                calls.extend(_read_part(part.strip()))
            except CallSyntaxError as problem:
                error = error or str(problem)
        return ParsedMessage(content.strip(), tuple(calls), error)


def _read_part(part: str) -> list[ToolCall]:
    if part.startswith(("[", "{")):
        value = load_json(part)
        return [call_of(item) for item in (value if isinstance(value, list) else [value])]
    name, separator, arguments = part.partition(ARGS)
    if not separator:
        brace = part.find("{")
        if brace < 0:
            raise CallSyntaxError(f"the tool call has no arguments: {shown(part)}")
        name, arguments = part[:brace], part[brace:]
    if not name.strip():
        raise CallSyntaxError(f"the tool call has no name: {shown(part)}")
    return [ToolCall(name.strip(), arguments_of(load_json(arguments.strip()), name.strip()))]
