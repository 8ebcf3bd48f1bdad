"""Parse the Hermes format: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``; code in ``<code>``."""

from __future__ import annotations

import re

from agentrl.chat.parsers.base import CallSyntaxError, ToolCall, Tools, shown, skip_space
from agentrl.chat.parsers.marked import Block, MarkedParser, read_json_calls
from agentrl.chat.parsers.registry import tool_call_parser

CODE_TOOLS = frozenset({"PythonInterpreter", "execute_code"})
"""Tools whose ``code`` argument may follow the JSON, unescaped inside ``<code>…</code>``."""

_CODE_OPEN = "<code>"
_CODE = re.compile(r"<code>\n?(.*?)\n?</code>(?=\s*(?:</tool_call>|<tool_call>|$))", re.DOTALL)


@tool_call_parser("hermes")
class HermesParser(MarkedParser):
    """Tool calls between ``<tool_call>`` tags, anywhere: one or several JSON objects in each pair."""

    opens = ("<tool_call>",)
    close = "</tool_call>"

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the calls of one block. Raises CallSyntaxError."""
        block = read_json_calls(text, at)
        start = skip_space(text, block.end)
        if not block.calls or not text.startswith(_CODE_OPEN, start):
            return block
        code = _CODE.match(text, start)
        if code is None:
            raise CallSyntaxError(f"{_CODE_OPEN} is not closed by </code>: {shown(text[start:])}")
        last = block.calls[-1]
        if last.name not in CODE_TOOLS:
            raise CallSyntaxError(f"<code> is only for {', '.join(sorted(CODE_TOOLS))}, not for {last.name}")
        block.calls[-1] = ToolCall(last.name, {**last.arguments, "code": code.group(1)})
        block.end = code.end()
        return block
