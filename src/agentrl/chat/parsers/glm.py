"""Parse the format of GLM 4.5 to 5: a name, ``<arg_key>…</arg_key><arg_value>…</arg_value>`` in one tag."""

from __future__ import annotations

import re

from agentrl.chat.parsers.arguments import convert_arguments
from agentrl.chat.parsers.base import CallSyntaxError, ToolCall, Tools, shown
from agentrl.chat.parsers.marked import Block, MarkedParser
from agentrl.chat.parsers.registry import tool_call_parser

_SPACE = r"(?:\s|\\n)*"
"""What may stand between tags: models also write a line break as ``\\n``."""

_HEAD = re.compile(rf"{_SPACE}([^<\s\\]+){_SPACE}(?=<arg_key>|</tool_call>)")
_KEY = re.compile(rf"{_SPACE}<arg_key>(.*?)</arg_key>{_SPACE}<arg_value>", re.DOTALL)
_END = re.compile(rf"</arg_value>(?={_SPACE}(?:<arg_key>|</tool_call>))")


@tool_call_parser("glm45", "glm47", "glm")
class GlmParser(MarkedParser):
    """A name, then keys and values as text, converted by the schema. A value may hold any tag but its own."""

    opens = ("<tool_call>",)
    close = "</tool_call>"

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the call of one block. Raises CallSyntaxError."""
        head = _HEAD.match(text, at)
        if head is None:
            inside = text[at:].partition(self.close)[0]
            raise CallSyntaxError(f"the tool call is not NAME<arg_key>…</arg_key>…: {shown(inside)}")
        name, at = head.group(1), head.end()
        texts: dict[str, str] = {}
        while (key := _KEY.match(text, at)) is not None:
            end = _END.search(text, key.end())
            if end is None:
                raise CallSyntaxError(f"{name}: <arg_value> is not closed: {shown(text[key.end() :])}")
            texts[key.group(1).strip()] = text[key.end() : end.start()]
            at = end.end()
        at = _skip(text, at)
        if not text.startswith(self.close, at):
            raise CallSyntaxError(f"{name}: text outside <arg_key> and <arg_value>: {shown(text[at:])}")
        return Block(at, [ToolCall(name, convert_arguments(name, texts, tools))])


def _skip(text: str, at: int) -> int:
    found = re.compile(_SPACE).match(text, at)
    return found.end() if found else at
