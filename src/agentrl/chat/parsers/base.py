"""A parsed assistant message, and the checks of one call that every format shares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

SHOWN = 120
"""Characters of the model's own text that an error message repeats."""

END_OF_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it. ``typed`` is False where the format writes every value as text."""

    name: str
    arguments: dict[str, Any]
    typed: bool = True


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """``content`` is the text without its calls; ``error`` names what is wrong with the first bad call."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None


class ToolCallParser(Protocol):
    """Finds the tool calls in an assistant's text; what is malformed is reported, never raised."""

    def parse(self, text: str) -> ParsedMessage:
        """The message and its calls, in the order written."""
        ...


class CallSyntaxError(ValueError):
    """A call cannot be read; its text is what the model is told."""


def split_thought(text: str) -> tuple[str, str]:
    """``(thought, rest)``, divided behind the last ``</think>``; calls inside a thought are no calls."""
    at = text.rfind(END_OF_THOUGHT)
    if at < 0:
        return "", text
    cut = at + len(END_OF_THOUGHT)
    return text[:cut], text[cut:]


def shown(text: str) -> str:
    """``text`` on one line, short enough for an error message."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def load_json(text: str) -> Any:
    """Decode JSON; raises CallSyntaxError that says where it breaks."""
    try:
        return json.loads(text, strict=False)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CallSyntaxError(f"the tool call is not JSON ({error}): {shown(text)}") from error


def call_of(value: Any, arguments_key: str = "arguments") -> ToolCall:
    """A call out of a decoded ``{"name": …, "arguments": {…}}``; raises CallSyntaxError."""
    if not isinstance(value, Mapping):
        raise CallSyntaxError(
            f"the tool call is no JSON object but {type(value).__name__}: {shown(str(value))}"
        )
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise CallSyntaxError(f'the tool call has no "name": {shown(json.dumps(value, ensure_ascii=False))}')
    return ToolCall(name.strip(), arguments_of(value.get(arguments_key), name.strip(), arguments_key))


def arguments_of(value: Any, name: str, key: str = "arguments") -> dict[str, Any]:
    """Arguments as a dict: absent is empty, a JSON string of an object is that object."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = load_json(value) if value.strip() else {}
    if not isinstance(value, dict):
        raise CallSyntaxError(
            f'"{key}" of {name} is no JSON object but {type(value).__name__}: {shown(str(value))}'
        )
    return value
