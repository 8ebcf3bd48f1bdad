"""Parse tool calls in tags and syntaxes of their own: Qwen3-Coder, GLM, MiniMax, DSML, gpt-oss, Gemma 4."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from agentrl.chat.parsers.arguments import convert_arguments, convert_text, property_names
from agentrl.chat.parsers.marked import Block, HermesParser, MarkedParser
from agentrl.chat.parsers.parser import (
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
                    calls.append(_channel_call(recipient.group(1), body))
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


def _channel_call(name: str, body: str) -> ToolCall:
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
        arguments, end = _read_term(text, head.end(), 0)
        return Block(end, [ToolCall(head.group(1), arguments)])


def _read_term(text: str, at: int, depth: int) -> tuple[Any, int]:
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
        values[key], at = _read_term(text, at, depth + 1)


def _read_list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while True:
        at = skip_space(text, at, ",")
        if text.startswith("]", at):
            return items, at + 1
        if at >= len(text) or text[at] == "}":
            raise CallSyntaxError(f"a list of the tool call is not closed: {shown(text[at:])}")
        value, at = _read_term(text, at, depth + 1)
        items.append(value)


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
        return (*self.opens, "<function=")

    def find(self, text: str, at: int) -> int:
        """Return where the next tag or the next function without one starts; -1 without either.

        A function without a tag has a parameter or an end: other text may name one.
        """
        tagged = super().find(text, at)
        bare = _FUNCTION.search(text, at)
        if bare is None or (0 <= tagged < bare.start()):
            return tagged
        is_call = _OPEN.match(text, skip_space(text, bare.end())) or text.find(FUNCTION_END, bare.end()) >= 0
        return bare.start() if is_call else tagged

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
        if text.startswith("<function=", skip_space(text, at)):
            return QwenCoderParser().read(text, at, tools)
        return super().read(text, at, tools)


def _read_function(text: str, at: int, close: str, tools: Tools) -> tuple[ToolCall, int]:
    """Return the function at ``at`` and the position behind it. Raises CallSyntaxError."""
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
    """Return a value and the position behind it.

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
    following = (
        found for found in _OPEN.finditer(text, at) if known is None or found.group(1).strip() in known
    )
    ends = [found.start() for found in islice(following, 1)]
    for mark in (FUNCTION_END, close):
        if (index := text.find(mark, at, min(ends, default=len(text)))) >= 0:
            ends.append(index)
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


def _unframed(value: str) -> str:
    """Return a value without the one newline that the format adds on each side."""
    return value.removeprefix("\n").removesuffix("\n")


_GLM_SPACE = r"(?:\s|\\n)*"
"""What may stand between tags: models also write a line break as ``\\n``."""

_GLM_HEAD = re.compile(rf"{_GLM_SPACE}([^<\s\\]+){_GLM_SPACE}(?=<arg_key>|</tool_call>)")
_GLM_KEY = re.compile(rf"{_GLM_SPACE}<arg_key>(.*?)</arg_key>{_GLM_SPACE}<arg_value>", re.DOTALL)
_GLM_CLOSE = re.compile(rf"{_GLM_SPACE}(?=</tool_call>)")
_GLM_END = re.compile(rf"</arg_value>(?={_GLM_SPACE}(?:<arg_key>|</tool_call>))")


@tool_call_parser("glm45", "glm47", "glm")
class GlmParser(MarkedParser):
    """A name, then keys and values as text, converted by the schema. A value may hold any tag but its own."""

    opens = ("<tool_call>",)
    close = "</tool_call>"

    def read(self, text: str, at: int, tools: Tools) -> Block:
        head = _GLM_HEAD.match(text, at)
        if head is None:
            inside = text[at:].partition(self.close)[0]
            raise CallSyntaxError(f"the tool call is not NAME<arg_key>…</arg_key>…: {shown(inside)}")
        name, at = head.group(1), head.end()
        texts: dict[str, str] = {}
        while (key := _GLM_KEY.match(text, at)) is not None:
            end = _GLM_END.search(text, key.end())
            if end is None:
                raise CallSyntaxError(f"{name}: <arg_value> is not closed: {shown(text[key.end() :])}")
            texts[key.group(1).strip()] = text[key.end() : end.start()]
            at = end.end()
        close = _GLM_CLOSE.match(text, at)
        if close is None:
            raise CallSyntaxError(f"{name}: text outside <arg_key> and <arg_value>: {shown(text[at:])}")
        return Block(close.end(), [ToolCall(name, convert_arguments(name, texts, tools))])


WRAPPERS = frozenset({"arguments", "input"})
"""Names of a single parameter in which models wrap all arguments as one JSON object."""


@tool_call_parser("minimax_m2")
class MiniMaxParser(MarkedParser):
    """``<invoke name="f"><parameter name="x">1</parameter></invoke>`` in ``<minimax:tool_call>``."""

    opens: tuple[str, ...] = ("<minimax:tool_call>",)
    close = "</minimax:tool_call>"
    prefix = ""
    """What stands before the names of the inner tags."""

    def read(self, text: str, at: int, tools: Tools) -> Block:
        block = Block(at)
        head = re.compile(rf'\s*<{self.prefix}invoke name="([^"<>\n]+)"\s*>')
        end = f"</{self.prefix}invoke>"
        while (found := head.match(text, block.end)) is not None:
            name = found.group(1).strip()
            texts, kinds, at = self._parameters(text, found.end(), end)
            close = text.find(end, at)
            if close < 0:
                raise CallSyntaxError(f"{name}: <invoke> is not closed by {end}: {shown(text[at:])}")
            block.calls.append(_call(name, texts, kinds, text[at:close], tools))
            block.end = close + len(end)
        if not block.calls:
            raise CallSyntaxError(f'the tool call is not of the form <invoke name="…">: {shown(text[at:])}')
        return block

    def _parameters(self, text: str, at: int, end: str) -> tuple[dict[str, str], dict[str, str], int]:
        """Return the texts of all parameters at ``at``, their ``string`` attributes and their end."""
        head = re.compile(rf'\s*<{self.prefix}parameter name="([^"<>\n]+)"(?: string="(true|false)")?\s*>')
        close = f"</{self.prefix}parameter>"
        closing = re.compile(rf"{re.escape(close)}(?=\s*(?:<{self.prefix}parameter name=|{re.escape(end)}))")
        texts: dict[str, str] = {}
        kinds: dict[str, str] = {}
        while (found := head.match(text, at)) is not None:
            last = closing.search(text, found.end())
            if last is None:
                raise CallSyntaxError(f"a parameter is not closed by {close}: {shown(text[found.end() :])}")
            key, value = found.group(1).strip(), text[found.end() : last.start()]
            if self.prefix and self.prefix in value:
                raise CallSyntaxError(f"the parameter {key} holds a tag of the format: {shown(value)}")
            texts[key], at = value, last.end()
            if found.group(2):
                kinds[key] = found.group(2)
        return texts, kinds, at


@tool_call_parser("deepseek_v32")
class DeepSeekDsmlParser(MiniMaxParser):
    """DSML: MiniMax's tags with the prefix ``｜DSML｜``; the body of an invocation may be JSON.

    As in DeepSeek's own parser, the prefix stands in tags only, ``string="true"`` gives text, and
    ``string="false"`` JSON. A parameter without the attribute is converted by the schema.
    """

    opens = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    close = "</｜DSML｜function_calls>"
    prefix = "｜DSML｜"

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse every section. A tag outside of sections is an error."""
        parsed = super().parse(text, tools)
        if parsed.error is None and self.prefix in parsed.content:
            return replace(parsed, error=f"a tag outside of {self.opens[0]}: {shown(parsed.content)}")
        return parsed

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the calls of one block, whichever of the two outer tags closes it."""
        block = super().read(text, at, tools)
        end = skip_space(text, block.end)
        other = self.close.replace("function_calls", "tool_calls")
        block.end = end + len(other) if text.startswith(other, end) else block.end
        return block


def _call(name: str, texts: dict[str, str], kinds: dict[str, str], rest: str, tools: Tools) -> ToolCall:
    body = rest.strip()
    if body and not texts:
        return ToolCall(name, arguments_of(load_json(body), name))
    if body:
        raise CallSyntaxError(f"{name}: text outside of its parameters: {shown(body)}")
    known = property_names(name, tools)
    if len(texts) == 1 and known is not None and (key := next(iter(texts))) in WRAPPERS - known:
        inner = convert_text(texts[key], {"type": "object"})
        if isinstance(inner, dict) and inner.keys() <= known:
            return ToolCall(name, inner)
    untyped = {key: text for key, text in texts.items() if key not in kinds}
    typed = {key: texts[key] if kind == "true" else load_json(texts[key]) for key, kind in kinds.items()}
    converted = convert_arguments(name, untyped, tools)
    return ToolCall(name, {key: typed[key] if key in typed else converted[key] for key in texts})
