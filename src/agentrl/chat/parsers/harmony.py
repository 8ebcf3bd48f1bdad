"""Parse the harmony text of gpt-oss: channels of reasoning, calls and answers in one turn."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agentrl.chat.parsers.base import CallSyntaxError, ParsedMessage, ToolCall, Tools, arguments_of, load_json
from agentrl.chat.parsers.registry import tool_call_parser

_MARKS = re.compile(r"<\|(start|channel|constrain|message|end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


@tool_call_parser("gpt_oss", "harmony", "openai")
class HarmonyParser:
    """Channel ``analysis`` is reasoning, a message with a recipient is a call, all other text is content."""

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse the messages of one turn; the first may lack its start."""
        calls: list[ToolCall] = []
        content: list[str] = []
        thoughts: list[str] = []
        error: str | None = None
        for header, body in _messages(text):
            recipient = _RECIPIENT.search(header)
            if recipient is not None:
                try:
                    calls.append(_call(recipient.group(1), body))
                except CallSyntaxError as problem:
                    error = error or str(problem)
            elif "<channel>analysis" in header:
                thoughts.append(body.strip())
            else:
                content.append(body)
        reasoning = "\n\n".join(thought for thought in thoughts if thought)
        return ParsedMessage("".join(content).strip(), tuple(calls), error, reasoning)


def _messages(text: str) -> Iterator[tuple[str, str]]:
    """Yield the header and the body of every message; text outside of messages has an empty header."""
    header, body, mark = "", "", "end"
    pieces = _MARKS.split(text)
    for piece, following in zip(pieces[::2], [*pieces[1::2], "end"], strict=True):
        if mark == "message":
            body = piece
        elif mark in ("end", "call", "return"):
            yield "", piece
        else:
            header += f"<{mark}>{piece}"
        if mark == "message" or following in ("start", "end", "call", "return"):
            yield header, body
            header, body = "", ""
        mark = following


def _call(name: str, body: str) -> ToolCall:
    return ToolCall(name, arguments_of(load_json(body), name) if body.strip() else {})
