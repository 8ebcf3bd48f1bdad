"""Parse the format of Kimi K2: ``functions.NAME:NUMBER`` and JSON between its marks."""

from __future__ import annotations

import re
from typing import Any

from agentrl.chat.parsers.arguments import property_names
from agentrl.chat.parsers.base import CallSyntaxError, ToolCall, Tools, arguments_of, decode_json, shown
from agentrl.chat.parsers.marked import Block, MarkedParser
from agentrl.chat.parsers.registry import tool_call_parser

ARGUMENTS, CALL_END = "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_HEAD = re.compile(r"\s*<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>", re.DOTALL)
_ID = re.compile(r"(?:functions\.)?(.+):\d+")


@tool_call_parser("kimi_k2")
class KimiParser(MarkedParser):
    """Calls between ``<|tool_calls_section_begin|>`` and its end."""

    opens = ("<|tool_calls_section_begin|>",)
    close = "<|tool_calls_section_end|>"

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the calls of one section; a malformed one does not hide those behind it."""
        block = Block(at)
        while (head := _HEAD.match(text, block.end)) is not None:
            try:
                value, end = decode_json(text, head.end())
                call = ToolCall(_name(head.group(1).strip(), value, tools), arguments_of(value, "the call"))
                block.calls.append(call)
            except CallSyntaxError as problem:
                block.error = block.error or str(problem)
                end = head.end()
            close = text.find(CALL_END, end)
            block.end = len(text) if close < 0 else close + len(CALL_END)
        if block.end == at:
            raise CallSyntaxError(f"no tool call behind {self.opens[0]}: {shown(text[at:])}")
        return block


def _name(call_id: str, arguments: Any, tools: Tools) -> str:
    """Return the name in an id; a bare number is the only tool, or the only one with these arguments."""
    if (found := _ID.fullmatch(call_id)) is not None:
        return found.group(1).strip()
    if call_id.isdigit():
        names = [str(tool.get("function", tool).get("name")) for tool in tools]
        if len(names) > 1 and isinstance(arguments, dict):
            names = [name for name in names if arguments.keys() <= (property_names(name, tools) or set())]
        if len(names) == 1:
            return names[0]
    raise CallSyntaxError(f"the tool call's id is not functions.NAME:NUMBER: {shown(call_id)}")
