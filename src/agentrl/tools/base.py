"""The interface of a tool server, independent of its protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Schema = dict[str, Any]
"""An OpenAI function schema: ``{"type": "function", "function": {name, description, parameters}}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a tool call. ``error``: the tool reported an error; the model reads it, nothing fails."""

    text: str
    error: bool
    seconds: float
    server: str


class ToolServer(Protocol):
    """One tool server. ``call`` and ``schemas`` raise ToolServerError if it cannot be reached."""

    name: str

    async def open(self) -> None:
        """Connect."""
        ...

    async def schemas(self) -> list[Schema]:
        """Return the schemas of its tools, sorted by name."""
        ...

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Return ``(text, is an error)``. A call that takes too long is an error whose text says so."""
        ...

    async def close(self) -> None:
        """Disconnect; abandon running calls."""
        ...


def function_schema(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Schema:
    """Return the schema of a tool, as chat templates and the OpenAI API expect it."""
    function = {
        "name": name,
        "description": description or "",
        "parameters": dict(parameters or {"type": "object", "properties": {}}),
    }
    return {"type": "function", "function": function}


def schema_name(schema: Mapping[str, Any]) -> str:
    """Return the tool's name in a function schema."""
    return str(schema["function"]["name"])


def timeout_text(tool: str, seconds: float) -> str:
    """Return the text that the model reads after a timeout."""
    return f"{tool} was stopped: it did not answer within {seconds:g} s"
