"""A tool-call parser of your own: a call is a line ``CALL name key=value key="some text"``.

Name it on every sampler by --tool_call_parser custom_parser:LineParser; the folder must be on PYTHONPATH.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl import ParsedMessage, ToolCall, convert_arguments, tool_call_parser


@tool_call_parser("line")
class LineParser:
    """Lines that start with ``CALL`` are calls, all others are content."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedMessage:
        """Return content, calls, and what is wrong with the first malformed one; the text has no thoughts."""
        content, calls, error = list[str](), list[ToolCall](), None
        for line in text.splitlines():
            if not line.startswith("CALL "):
                content.append(line)
                continue
            try:
                name, *pairs = shlex.split(line.removeprefix("CALL "))
                texts = dict(pair.split("=", 1) for pair in pairs)
                calls.append(ToolCall(name, convert_arguments(name, texts, tools)))
            except ValueError as problem:
                error = error or f"the line is not CALL name key=value ({problem}): {line[:80]}"
        return ParsedMessage("\n".join(content).strip(), tuple(calls), error)
