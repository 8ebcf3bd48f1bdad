"""The parsed assistant message, and the reading of one tool call that all formats use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

SHOWN = 120
"""Longest quotation of the model's text in an error message, in characters."""

Tools = Sequence[Mapping[str, Any]]
"""The function schemas of the tools offered, as in an OpenAI request."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as the model wrote it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """An assistant's turn in its parts.

    ``content`` is the text without reasoning and tool calls; ``error`` says what is wrong with the first
    malformed call. ``reasoning`` holds all thoughts; nothing in it is an answer or a call.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    reasoning: str = ""


class ToolCallParser(Protocol):
    """Parses the tool calls in an assistant's text. Reports malformed calls; never raises for them."""

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Return the message and its tool calls, in order.

        ``text`` holds no reasoning. ``tools`` give the types of arguments that the format writes as text.
        """
        ...


class CallSyntaxError(ValueError):
    """A tool call cannot be parsed; the model reads the error's text."""


def shown(text: str) -> str:
    """Return ``text`` on one line, cut to ``SHOWN`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def load_json(text: str) -> Any:
    """Decode JSON. Raises CallSyntaxError with the position of the problem."""
    try:
        return json.loads(text, strict=False)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CallSyntaxError(f"the tool call is not JSON ({error}): {shown(text)}") from error


def call_of(value: Any, arguments_key: str = "arguments") -> ToolCall:
    """Return the tool call of a decoded ``{"name": …, "arguments": {…}}``. Raises CallSyntaxError."""
    if not isinstance(value, Mapping):
        raise CallSyntaxError(
            f"the tool call is no JSON object but {type(value).__name__}: {shown(str(value))}"
        )
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise CallSyntaxError(f'the tool call has no "name": {shown(json.dumps(value, ensure_ascii=False))}')
    return ToolCall(name.strip(), arguments_of(value.get(arguments_key), name.strip(), arguments_key))


def arguments_of(value: Any, name: str, key: str = "arguments") -> dict[str, Any]:
    """Return arguments as a dict: an absent value is empty, a JSON string is decoded."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = load_json(value) if value.strip() else {}
    if not isinstance(value, dict):
        raise CallSyntaxError(
            f'"{key}" of {name} is no JSON object but {type(value).__name__}: {shown(str(value))}'
        )
    return value
