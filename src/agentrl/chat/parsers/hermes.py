"""Parse the Hermes format: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``; code in ``<code>``."""

from __future__ import annotations

import re

from agentrl.chat.parsers.base import CallSyntaxError, ToolCall, Tools
from agentrl.chat.parsers.marked import Block, MarkedParser, read_json_calls
from agentrl.chat.parsers.registry import tool_call_parser

CODE_TOOLS = frozenset({"PythonInterpreter", "execute_code"})
"""Tools whose ``code`` argument may follow the JSON, unescaped inside ``<code>…</code>``."""

_CODE = re.compile(r"\s*<code>\n?(.*?)\n?</code>(?=\s*(?:</tool_call>|<tool_call>|$))", re.DOTALL)


@tool_call_parser("hermes")
class HermesParser(MarkedParser):
    """Tool calls between ``<tool_call>`` tags, anywhere: one or several JSON objects in each pair."""

    opens = ("<tool_call>",)
    close = "</tool_call>"

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the calls of one block. Raises CallSyntaxError."""
        block = read_json_calls(text, at)
        code = _CODE.match(text, block.end)
        if code is None or not block.calls:
            return block
        last = block.calls[-1]
        if last.name not in CODE_TOOLS:
            raise CallSyntaxError(f"<code> is only for {', '.join(sorted(CODE_TOOLS))}, not for {last.name}")
        block.calls[-1] = ToolCall(last.name, {**last.arguments, "code": code.group(1)})
        block.end = code.end()
        return block
