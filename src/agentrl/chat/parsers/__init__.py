"""Parse the tool calls in a model's text: one file per format, chosen by ``--tool_call_parser``."""

from agentrl.chat.parsers.base import ParsedMessage, ToolCall, ToolCallParser
from agentrl.chat.parsers.registry import PARSERS, get_parser, tool_call_parser
from agentrl.chat.parsers.validate import typed_call, validate_call

__all__ = [
    "PARSERS",
    "ParsedMessage",
    "ToolCall",
    "ToolCallParser",
    "get_parser",
    "tool_call_parser",
    "typed_call",
    "validate_call",
]
