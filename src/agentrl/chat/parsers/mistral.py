"""Parse the Mistral formats: ``[TOOL_CALLS] [{"name": …, …}, …]`` and ``[TOOL_CALLS]NAME[ARGS]{…}``."""

from __future__ import annotations

import re

from agentrl.chat.parsers.base import (
    CallSyntaxError,
    ToolCall,
    Tools,
    arguments_of,
    decode_json,
    shown,
    skip_space,
)
from agentrl.chat.parsers.marked import Block, MarkedParser, read_json_calls
from agentrl.chat.parsers.registry import tool_call_parser

_NAMED = re.compile(r"\s*+([^\[\]{}\s]++)\s*+(?:\[CALL_ID\]\s*+[^\[\]{}\s]*+\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_ID = re.compile(r"\[CALL_ID\]\s*[^\[\]{}\s]*|\[ARGS\]")


@tool_call_parser("mistral")
class MistralParser(MarkedParser):
    """Tool calls in the old and the new format, recognized behind each marker; text behind is content."""

    opens = ("[TOOL_CALLS]",)

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the calls behind one marker. Raises CallSyntaxError."""
        start = skip_space(text, at)
        if text.startswith(("[{", "[ {", "[\n", "{"), start) or re.match(
            r"\[\s*[\[{\"\d]", text[start : start + 8]
        ):
            return read_json_calls(text, start)
        named = _NAMED.match(text, at)
        if named is None:
            inside = text[at:].partition(self.opens[0])[0]
            raise CallSyntaxError(f"the tool call has no arguments: {shown(inside)}")
        name = named.group(1)
        value, end = decode_json(text, named.end())
        return Block(end, [ToolCall(name, arguments_of(value, name))])
