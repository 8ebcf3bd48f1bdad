"""Parse the Qwen formats: Hermes, and Qwen3-Coder's ``<function=…><parameter=…>`` in the same tags."""

from __future__ import annotations

import re

from agentrl.chat.parsers.arguments import convert_arguments
from agentrl.chat.parsers.base import CallSyntaxError, ToolCall, Tools, shown
from agentrl.chat.parsers.hermes import HermesParser
from agentrl.chat.parsers.registry import tool_call_parser

_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)


@tool_call_parser("qwen3_coder")
class QwenCoderParser(HermesParser):
    """``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``."""

    def read_block(self, block: str, tools: Tools) -> ToolCall:
        """Return the tool call of one block. Values are text, converted by the schema."""
        function = _FUNCTION.fullmatch(block)
        if function is None:
            raise CallSyntaxError(
                f"the tool call is not of the form <function=NAME>…</function>: {shown(block)}"
            )
        name, body = function.group(1).strip(), function.group(2)
        if not name:
            raise CallSyntaxError("the tool call has no name: write <function=NAME>")
        left = _PARAMETER.sub("", body).strip()
        if left:
            raise CallSyntaxError(f"{name}: text outside <parameter=KEY>…</parameter>: {shown(left)}")
        texts = {key.strip(): _unframed(value) for key, value in _PARAMETER.findall(body)}
        return ToolCall(name, convert_arguments(name, texts, tools))


@tool_call_parser("qwen", "qwen25")
class QwenParser(HermesParser):
    """Qwen2.5 and Qwen3 write JSON; a block that starts with ``<function=`` is in Qwen3-Coder's format."""

    def read_block(self, block: str, tools: Tools) -> ToolCall:
        """Return the tool call of one block, in either format."""
        if block.lstrip().startswith("<function="):
            return QwenCoderParser.read_block(QwenCoderParser(), block, tools)
        return super().read_block(block, tools)


def _unframed(value: str) -> str:
    """Return a value without the one newline that the format adds on each side."""
    return value.removeprefix("\n").removesuffix("\n")
