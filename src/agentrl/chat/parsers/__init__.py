"""Parse reasoning and tool calls in a model's text: by formats, chosen by ``--tool_call_parser``."""

from agentrl.chat.parsers.base import (
    PARSERS,
    ParsedMessage,
    ToolCall,
    ToolCallParser,
    Tools,
    get_parser,
    parser_of_template,
    tool_call_parser,
)
from agentrl.chat.parsers.reasoning import ReasoningTags, opens_thought, parse_text, split_reasoning, tags_in
from agentrl.chat.parsers.validate import load_validator, validate_call

__all__ = [
    "PARSERS",
    "ParsedMessage",
    "ReasoningTags",
    "ToolCall",
    "ToolCallParser",
    "Tools",
    "get_parser",
    "load_validator",
    "opens_thought",
    "parse_text",
    "parser_of_template",
    "split_reasoning",
    "tags_in",
    "tool_call_parser",
    "validate_call",
]
