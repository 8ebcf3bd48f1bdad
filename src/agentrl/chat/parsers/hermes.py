"""Parse the Hermes format: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``; code in ``<code>``."""

from __future__ import annotations

import re

from agentrl.chat.parsers.base import (
    CallSyntaxError,
    ParsedMessage,
    ToolCall,
    Tools,
    call_of,
    load_json,
    shown,
)
from agentrl.chat.parsers.registry import tool_call_parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CODE_TOOLS = frozenset({"PythonInterpreter", "execute_code"})
"""Tools whose ``code`` argument may follow the JSON, unescaped inside ``<code>…</code>``."""

_CODE = re.compile(r"<code>\n?(.*?)\n?</code>", re.DOTALL)


@tool_call_parser("hermes")
class HermesParser:
    """Tool calls between ``<tool_call>`` tags, anywhere."""

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse every tagged block; an unclosed tag is an error."""
        outside, blocks, error = tagged_blocks(text)
        calls: list[ToolCall] = []
        for block in blocks:
            try:
                calls.append(self.read_block(block, tools))
            except CallSyntaxError as problem:
                error = error or str(problem)
        return ParsedMessage(outside.strip(), tuple(calls), error)

    def read_block(self, block: str, tools: Tools) -> ToolCall:
        """Return the tool call inside one pair of tags. Raises CallSyntaxError."""
        code = _CODE.search(block)
        if code is None:
            return call_of(load_json(block.strip()))
        head = block[: code.start()].strip()
        try:
            call = call_of(load_json(head))
        except CallSyntaxError:
            return call_of(load_json(block.strip()))
        if call.name not in CODE_TOOLS:
            raise CallSyntaxError(f"<code> is only for {', '.join(sorted(CODE_TOOLS))}, not for {call.name}")
        return ToolCall(call.name, {**call.arguments, "code": code.group(1)})


def tagged_blocks(text: str) -> tuple[str, list[str], str | None]:
    """Return ``(text outside the tags, text inside each pair, error)``."""
    outside: list[str] = []
    blocks: list[str] = []
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        outside.append(text[at:start])
        inner = start + len(OPEN)
        end = text.find(CLOSE, inner)
        if end < 0:
            return "".join(outside), blocks, f"{OPEN} is not closed by {CLOSE}: {shown(text[inner:])}"
        blocks.append(text[inner:end])
        at = end + len(CLOSE)
    rest = text[at:]
    error = f"{CLOSE} without {OPEN}: {shown(rest)}" if CLOSE in rest else None
    outside.append(rest)
    return "".join(outside), blocks, error
