"""What a tool server offers, whatever protocol it speaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Schema = dict[str, Any]
"""An OpenAI function schema: ``{"type": "function", "function": {name, description, parameters}}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool answered. ``error`` is the tool's own: its text is for the model, and no failure."""

    text: str
    error: bool
    seconds: float
    server: str


class ToolServer(Protocol):
    """One server. ``call`` and ``schemas`` raise ToolServerError when it cannot be reached."""

    name: str

    async def open(self) -> None:
        """Connect."""
        ...

    async def schemas(self) -> list[Schema]:
        """Its tools, sorted by name."""
        ...

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """``(text, is an error)``; a call that takes too long is an error with a text that says so."""
        ...

    async def close(self) -> None:
        """Disconnect; whatever is running is given up."""
        ...


def function_schema(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Schema:
    """A tool as chat templates and the OpenAI API know it."""
    function = {
        "name": name,
        "description": description or "",
        "parameters": dict(parameters or {"type": "object", "properties": {}}),
    }
    return {"type": "function", "function": function}


def schema_name(schema: Mapping[str, Any]) -> str:
    """The name of a function schema's tool."""
    return str(schema["function"]["name"])


def timeout_text(tool: str, seconds: float) -> str:
    """What the model is told of a call that was given up."""
    return f"{tool} was stopped: it did not answer within {seconds:g} s"
