"""Tool-call parsers by name: ``--tool_call_parser``."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.chat.parsers.base import ToolCallParser
from agentrl.registry import Registry

ParserFactory = Callable[[], ToolCallParser]

_FILES = (
    "deepseek", "gemma", "glm", "harmony", "hermes", "invoke", "kimi", "llama", "marked", "mistral",
    "pythonic", "qwen",
)  # fmt: skip

PARSERS: Registry[ParserFactory] = Registry(
    "tool-call parser",
    group="agentrl.tool_call_parsers",
    flag="--tool_call_parser",
    built_in=[f"agentrl.chat.parsers.{name}" for name in _FILES],
)


def tool_call_parser(*names: str) -> Callable[[ParserFactory], ParserFactory]:
    """Register a class that makes a ``ToolCallParser`` without arguments under ``names``."""
    return PARSERS.register(*names)


def get_parser(name: str) -> ToolCallParser:
    """Return a new parser of the format ``name``. Raises ConfigError for an unknown name."""
    return PARSERS.get(name)()
