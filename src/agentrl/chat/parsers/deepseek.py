"""Parse the formats of DeepSeek V3 (a fenced JSON block behind the name) and V3.1 (JSON behind the name)."""

from __future__ import annotations

import re

from agentrl.chat.parsers.base import CallSyntaxError, ToolCall, Tools, arguments_of, decode_json, shown
from agentrl.chat.parsers.marked import Block, MarkedParser
from agentrl.chat.parsers.registry import tool_call_parser

CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

_NAME = r"\s*+([^\s<`][^\n<`]{0,255})"
_HEAD = re.compile(rf"\s*+{CALL}(?:function{SEPARATOR}{_NAME}\s{{0,32}}+```json|{_NAME}{SEPARATOR})")
_TAIL = re.compile(rf"\s*(?:```)?\s*(?:{CALL_END}|(?=<｜tool▁calls▁end｜>)|$)")


@tool_call_parser("deepseek_v3", "deepseek_v31")
class DeepSeekParser(MarkedParser):
    """Calls between ``<｜tool▁calls▁begin｜>`` and its end, recognized one by one in either format."""

    opens: tuple[str, ...] = ("<｜tool▁calls▁begin｜>",)
    close = "<｜tool▁calls▁end｜>"

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the calls of one section. Raises CallSyntaxError."""
        block = Block(at)
        while (head := _HEAD.match(text, block.end)) is not None:
            name = (head.group(1) or head.group(2)).strip()
            value, end = decode_json(text, head.end())
            tail = _TAIL.match(text, end)
            if tail is None:
                raise CallSyntaxError(f"{name}: text behind the arguments: {shown(text[end:])}")
            block.calls.append(ToolCall(name, arguments_of(value, name)))
            block.end = tail.end()
        if not block.calls:
            raise CallSyntaxError(f"no tool call behind {self.opens[0]}: {shown(text[at:])}")
        return block


@tool_call_parser("deepseek_r1")
class DeepSeekR1Parser(DeepSeekParser):
    """DeepSeek V3's calls with or without the marks around them.

    The chat template of the distilled R1 models writes the opening mark only once in a conversation.
    """

    opens = (*DeepSeekParser.opens, CALL)

    def behind_open(self, text: str, start: int) -> int:
        """Return the place of the first call."""
        return start if text.startswith(CALL, start) else super().behind_open(text, start)
