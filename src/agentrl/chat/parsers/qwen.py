"""Parse the Qwen formats: Hermes, and Qwen3-Coder's ``<function=…><parameter=…>`` in tags or without."""

from __future__ import annotations

import re

from agentrl.chat.parsers.arguments import convert_arguments, property_names
from agentrl.chat.parsers.base import CallSyntaxError, ToolCall, Tools, shown, skip_space
from agentrl.chat.parsers.hermes import HermesParser
from agentrl.chat.parsers.marked import Block, MarkedParser
from agentrl.chat.parsers.registry import tool_call_parser

_FUNCTION = re.compile(r"<function=([^>\n]{0,256})>")
_OPEN = re.compile(r"<parameter=([^>\n]{1,256})>")
_TAG = re.compile(r"<parameter=[^>\n]{1,256}>|</parameter>")
_NAME = re.compile(r"[^\s{}<>()\[\]\"'=,;]+")
_DRIFTED = re.compile(r"</parameter[\w-]*>?$")
"""A closing tag that a model misspelled; it stands only at the end of a value that is not closed."""

_NESTING = 32
"""Deepest nesting of parameter tags in a value: a model that repeats one tag costs linear time."""

FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"


@tool_call_parser("qwen3_coder", "qwen3_xml")
class QwenCoderParser(MarkedParser):
    """``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``.

    The outer tags may be missing. A value may hold any of these tags as text.
    """

    opens = ("<tool_call>",)
    close = "</tool_call>"

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts with which a call may begin."""
        return (*self.opens, "<function=")

    def find(self, text: str, at: int) -> int:
        """Return the next tag, or the next whole function without one; -1 without either."""
        tagged = super().find(text, at)
        bare = _FUNCTION.search(text, at)
        if bare is None or (0 <= tagged < bare.start()):
            return tagged
        return bare.start() if text.find(FUNCTION_END, bare.end()) >= 0 else tagged

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the functions of one block. Values are text, converted by the schema."""
        block = Block(at)
        while True:
            start = skip_space(text, block.end)
            if not text.startswith("<function=", start):
                break
            call, block.end = _read_function(text, start, self.close, tools)
            block.calls.append(call)
        if not block.calls:
            inside = text[at:].partition(self.close)[0]
            raise CallSyntaxError(
                f"the tool call is not of the form <function=NAME>…</function>: {shown(inside)}"
            )
        return block


@tool_call_parser("seed_oss")
class SeedParser(QwenCoderParser):
    """Qwen3-Coder's functions in ``<seed:tool_call>``."""

    opens = ("<seed:tool_call>",)
    close = "</seed:tool_call>"


@tool_call_parser("qwen", "qwen25")
class QwenParser(HermesParser):
    """Qwen2.5 and Qwen3 write JSON; a block that starts with ``<function=`` is in Qwen3-Coder's format."""

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the calls of one block, in either format."""
        if text.startswith("<function=", skip_space(text, at)):
            return QwenCoderParser().read(text, at, tools)
        return super().read(text, at, tools)


def _read_function(text: str, at: int, close: str, tools: Tools) -> tuple[ToolCall, int]:
    """Return the function at ``at`` and the place behind it. Raises CallSyntaxError."""
    head = _FUNCTION.match(text, at)
    if head is None:
        raise CallSyntaxError(f"the tool call has no name: write <function=NAME>: {shown(text[at:])}")
    name = head.group(1).strip()
    if not _NAME.fullmatch(name):
        raise CallSyntaxError(f"the tool call has no name: write <function=NAME>, not {shown(head.group())}")
    known = property_names(name, tools)
    texts: dict[str, str] = {}
    at = skip_space(text, head.end())
    while (parameter := _OPEN.match(text, at)) is not None:
        key = parameter.group(1).strip()
        if key in texts:
            raise CallSyntaxError(f"{name}: the parameter {key} is given twice: {shown(text[at:])}")
        texts[key], at = _read_value(text, parameter.end(), known, close)
        at = skip_space(text, at)
    if text.startswith(FUNCTION_END, at):
        at += len(FUNCTION_END)
    elif at < len(text) and not text.startswith(close, at):
        raise CallSyntaxError(f"{name}: text outside <parameter=KEY>…</parameter>: {shown(text[at:])}")
    return ToolCall(name, convert_arguments(name, texts, tools)), at


def _read_value(text: str, at: int, known: frozenset[str] | None, close: str) -> tuple[str, int]:
    """Return a value and the place behind it.

    It ends at the ``</parameter>`` that closes it, tags inside the value paired. A value without one ends
    at the next parameter, or with the function.
    """
    depth = 1
    for tag in _TAG.finditer(text, at):
        if depth > _NESTING:
            break
        if tag.group() != PARAMETER_END:
            depth += 1
        elif depth > 1:
            depth -= 1
        elif _is_end(text, tag.end(), known, close):
            return _unframed(text[at : tag.start()]), tag.end()
    following = _next_parameter(text, at, known)
    ends = [following] if following >= 0 else []
    for mark in (FUNCTION_END, close):
        if (place := text.find(mark, at, min(ends, default=len(text)))) >= 0:
            ends.append(place)
    if not ends:
        raise CallSyntaxError(f"a parameter is not closed by {PARAMETER_END}: {shown(text[at:])}")
    value = text[at : min(ends)].rstrip()
    if PARAMETER_END in value:
        raise CallSyntaxError(
            f"text outside <parameter=KEY>…</parameter>: {shown(value.partition(PARAMETER_END)[2])}"
        )
    return _unframed(_DRIFTED.sub("", value).rstrip()), min(ends)


def _is_end(text: str, at: int, known: frozenset[str] | None, close: str) -> bool:
    """Return whether a closing tag before ``at`` ends a value: what follows it belongs to the format."""
    at = skip_space(text, at)
    following = _OPEN.match(text, at)
    if following is not None:
        return known is None or following.group(1).strip() in known
    return at == len(text) or text.startswith((FUNCTION_END, close), at)


def _next_parameter(text: str, at: int, known: frozenset[str] | None) -> int:
    for parameter in _OPEN.finditer(text, at):
        if known is None or parameter.group(1).strip() in known:
            return parameter.start()
    return -1


def _unframed(value: str) -> str:
    """Return a value without the one newline that the format adds on each side."""
    return value.removeprefix("\n").removesuffix("\n")
