"""How models write tool calls: text → calls, one format a file, found by name."""

from agentrl.chat.parsers.base import ParsedMessage, ToolCall, ToolCallParser
from agentrl.chat.parsers.registry import get_parser, parser_names
from agentrl.chat.parsers.validate import typed_call, validate_call

__all__ = [
    "ParsedMessage",
    "ToolCall",
    "ToolCallParser",
    "get_parser",
    "parser_names",
    "typed_call",
    "validate_call",
]
