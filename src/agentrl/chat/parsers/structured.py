"""Parse tool calls in a syntax of their own: the channels of gpt-oss, and the objects of Gemma 4."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agentrl.chat.parsers.base import (
    CallSyntaxError,
    ParsedMessage,
    ToolCall,
    Tools,
    arguments_of,
    load_json,
    read_literal,
    shown,
    skip_space,
    tool_call_parser,
    tool_names,
)
from agentrl.chat.parsers.marked import Block, MarkedParser

_MARKS = re.compile(r"<\|(start|channel|constrain|message|end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CALL_HEADER = re.compile(r"<constrain>|functions\.")
"""A mark that only the header of a call has, even if its recipient or channel cannot be read."""


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
            elif _CALL_HEADER.search(header) or (not header and "to=functions." in body):
                error = (
                    error
                    or f"the tool call has no recipient: write to=functions.NAME: {shown(header + body)}"
                )
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
            body += piece
        elif mark in ("end", "call", "return"):
            yield "", piece
        else:
            header += f"<{mark}>{piece}"
        if (mark == "message" and following != "message") or following in ("start", "end", "call", "return"):
            yield header, body
            header, body = "", ""
        mark = following


def _call(name: str, body: str) -> ToolCall:
    return ToolCall(name, arguments_of(load_json(body), name) if body.strip() else {})


QUOTE = '<|"|>'

_UNTAGGED = re.compile(r"(?:^|\n|<channel\|>)[ \t]*+call:([^\s{}]{1,256})[ \t]*+\{")
_HEAD = re.compile(r"\s*call:([^\s{}]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:,{}\[\]<]+)\s*:")
_BARE = re.compile(r"[^,{}\[\]]*")
_DEPTH = 64
"""Deepest nesting of values."""


@tool_call_parser("gemma4")
class GemmaParser(MarkedParser):
    """Objects with bare keys; strings stand between marks of their own, so no bracket in them counts.

    The template writes every call behind ``<|tool_call>``: one without it is reported and not run.
    """

    opens = ("<|tool_call>",)
    close = "<tool_call|>"

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse every block. A call or a string's mark outside of blocks is an error."""
        parsed = super().parse(text, tools)
        names = tool_names(tools)
        untagged = any(found.group(1) in names for found in _UNTAGGED.finditer(parsed.content))
        if parsed.error is None and (untagged or QUOTE in parsed.content):
            problem = f"a tool call without {self.opens[0]} before it: {shown(parsed.content)}"
            return replace(parsed, error=problem)
        return parsed

    def read(self, text: str, at: int, tools: Tools) -> Block:
        head = _HEAD.match(text, at)
        if head is None:
            raise CallSyntaxError(f"the tool call is not of the form call:NAME{{…}}: {shown(text[at:])}")
        arguments, end = _read_value(text, head.end(), 0)
        return Block(end, [ToolCall(head.group(1), arguments)])


def _read_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value at ``at`` and the position behind it. Raises CallSyntaxError."""
    at = skip_space(text, at)
    if depth > _DEPTH:
        raise CallSyntaxError(f"the tool call is nested too deeply: {shown(text[at:])}")
    if text.startswith(QUOTE, at):
        return _read_string(text, at)
    if text.startswith("{", at):
        return _read_object(text, at + 1, depth)
    if text.startswith("[", at):
        return _read_list(text, at + 1, depth)
    bare = _BARE.match(text, at)
    word = bare.group() if bare else ""
    if "<|" in word or "|>" in word:
        raise CallSyntaxError(f"a string of the tool call does not open with {QUOTE}: {shown(text[at:])}")
    try:
        return read_literal(word), at + len(word)
    except ValueError:
        return word.strip(), at + len(word)


def _read_string(text: str, at: int) -> tuple[str, int]:
    end = text.find(QUOTE, at + len(QUOTE))
    if end < 0:
        raise CallSyntaxError(f"a string of the tool call is not closed by {QUOTE}: {shown(text[at:])}")
    return text[at + len(QUOTE) : end], end + len(QUOTE)


def _read_object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while True:
        at = skip_space(text, at, ",")
        if text.startswith("}", at):
            return values, at + 1
        if text.startswith(QUOTE, at):
            key, at = _read_string(text, at)
            at = skip_space(text, at)
            if not text.startswith(":", at):
                raise CallSyntaxError(f"the key {key} of the tool call has no value: {shown(text[at:])}")
            at += 1
        else:
            bare = _KEY.match(text, at)
            if bare is None:
                raise CallSyntaxError(f"the tool call is not key:value,…: {shown(text[at:])}")
            key, at = bare.group(1), bare.end()
        values[key], at = _read_value(text, at, depth + 1)


def _read_list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while True:
        at = skip_space(text, at, ",")
        if text.startswith("]", at):
            return items, at + 1
        if at >= len(text) or text[at] == "}":
            raise CallSyntaxError(f"a list of the tool call is not closed: {shown(text[at:])}")
        value, at = _read_value(text, at, depth + 1)
        items.append(value)
