"""Parse tool calls without marks of their own: Llama's JSON, and Python as in ``[f(x=1), g()]``."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Mapping
from typing import Any

from agentrl.chat.parsers.marked import Block, MarkedParser, read_json_calls
from agentrl.chat.parsers.parser import (
    ARGUMENT_KEYS,
    MOST_FAILURES,
    CallSyntaxError,
    ParsedMessage,
    ToolCall,
    Tools,
    call_of,
    decode_json,
    literal_of,
    read_literal,
    shown,
    skip_space,
    tool_call_parser,
    tool_names,
)

PYTHON_TAG = "<|python_tag|>"

_START = re.compile(r"""\{\s*["'](?:name|type|function|parameters|arguments)["']""")
_NAMED = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"')


@tool_call_parser("llama", "llama3", "llama3_json")
class LlamaParser:
    """JSON tool calls behind the python tag, or anywhere in a text without one.

    Without the tag an object is a call if it has a name and arguments; other JSON is content. An object that
    breaks off is a malformed call if it begins the text, stands behind a call or names an offered tool.
    """

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse a message. What is neither tag, call nor separator is content."""
        calls: list[ToolCall] = []
        outside: list[str] = []
        error: str | None = None
        at, failures, tagged = 0, 0, False
        names = tool_names(tools)
        for start in (match.start() for match in _START.finditer(text)):
            if start < at:
                continue
            between = text[at:start]
            tagged = tagged or PYTHON_TAG in between
            try:
                value, end = _decode(text, start)
                if not tagged and not _is_call(value):
                    continue
                error = error or _stray(between, behind_call=at > 0)
                calls.append(call_of(value))
                outside.append(_content(between, behind_call=at > 0))
                at = end
            except CallSyntaxError as problem:
                failures += 1
                named = _NAMED.match(text, start)
                is_call = tagged or calls or text.lstrip().startswith("{")
                if is_call or (named is not None and named.group(1) in names):
                    error = error or str(problem)
                if failures == MOST_FAILURES:
                    break
        error = error or _stray(text[at:], behind_call=at > 0)
        outside.append(_content(text[at:], behind_call=at > 0))
        if PYTHON_TAG in text and not calls:
            error = error or f"no tool call behind {PYTHON_TAG}: {shown(text.partition(PYTHON_TAG)[2])}"
        return ParsedMessage("".join(outside).strip(), tuple(calls), error)


def _stray(text: str, *, behind_call: bool) -> str | None:
    """Return the problem of a text where a call should stand: behind the tag, or the ``;`` of a call."""
    before, _, behind = text.partition(PYTHON_TAG)
    if behind_call and before.lstrip().startswith(";"):
        behind = before + behind
    found = behind.strip("; \n")
    return f"no tool call behind {PYTHON_TAG} or ;: {shown(found)}" if found else None


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Decode JSON, or a Python dict on one line. Raises CallSyntaxError."""
    try:
        return decode_json(text, start)
    except CallSyntaxError:
        line = text[start:].splitlines()[0].strip()
        try:
            return read_literal(line), start + len(line)
        except ValueError:
            pass
        raise


def _is_call(value: Any) -> bool:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    return (
        isinstance(inner, Mapping)
        and isinstance(inner.get("name"), str)
        and any(key in inner for key in ARGUMENT_KEYS)
    )


def _content(text: str, *, behind_call: bool) -> str:
    plain = text.replace(PYTHON_TAG, "")
    return plain[skip_space(plain, 0, ";") :] if behind_call and plain[:1] in ("", ";", " ", "\n") else plain


_CALL = re.compile(r"[^\W\d][\w.-]*\s*\(")
_FENCE = re.compile(r"```(?:python)?\s*+(.*?)\n?```", re.DOTALL)
_LIST = re.compile(r"\[\s*(?=[^\W\d][\w.-]*\s*\()")
_CALL_END = re.compile(r"[)\n]\s*+[,;]?\s*+")
_RESERVED = re.compile(rf"(?<=[(,])(\s*)({'|'.join(keyword.kwlist)})(\s*=)(?!=)")
_MARK = "_reserved_"
_SHOWN_BEFORE = 40
"""Characters before a wrong bracket that its error shows."""
_BRACKETS = {")": "(", "]": "[", "}": "{"}


@tool_call_parser("pythonic", "llama4_pythonic")
class PythonicParser:
    """Lists of calls anywhere in the text, in ``<|python_start|>`` and ``<|python_end|>`` or without."""

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse a message. A list that holds no readable call is content; its first problem is reported."""
        text = text.replace("<|python_start|>", "").replace("<|python_end|>", "")
        outside: list[str] = []
        calls: list[ToolCall] = []
        error: str | None = None
        at = failures = 0
        while failures < MOST_FAILURES and (start := _LIST.search(text, at)) is not None:
            block = read_python_calls(text, start.end(), "]")
            failures += block.error is not None
            error = error or block.error
            end = block.end if block.calls else start.end()
            outside.append(text[at : start.start() if block.calls else end])
            calls += block.calls
            at = end
        return ParsedMessage(("".join(outside) + text[at:]).strip(), tuple(calls), error)


class TaggedPythonParser(MarkedParser):
    """Calls between two tags, as a list or one a line; a fence around them and JSON are accepted."""

    def read(self, text: str, at: int, tools: Tools) -> Block:
        close = text.find(self.close, at)
        end = len(text) if close < 0 else close
        fenced = _FENCE.fullmatch(text[at:end].strip())
        source = (fenced.group(1) if fenced else text[at:end]).strip()
        if not source:
            return Block(end, [], "the tool call is empty")
        if re.match(r"\[?\s*\{", source):
            block = read_json_calls(source, 0)
        else:
            is_list = _LIST.match(source)
            block = read_python_calls(source, is_list.end() if is_list else 0, "]" if is_list else "")
        if close < 0 and not block.calls:
            raise CallSyntaxError(f"{self.opens[0]} is not closed by {self.close}: {shown(text[at:])}")
        return Block(end, block.calls, block.error)


@tool_call_parser("minicpm")
class MiniCPMParser(TaggedPythonParser):
    """MiniCPM 3 and 4: one call a line between ``<|tool_call_start|>`` and ``<|tool_call_end|>``."""

    opens = ("<|tool_call_start|>",)
    close = "<|tool_call_end|>"


@tool_call_parser("lfm2")
class Lfm2Parser(MiniCPMParser):
    """LFM2: a list of calls, or JSON, in the same tags."""


@tool_call_parser("olmo3")
class OlmoParser(TaggedPythonParser):
    """OLMo 3: one call a line between ``<function_calls>`` and ``</function_calls>``."""

    opens = ("<function_calls>",)
    close = "</function_calls>"


def read_python_calls(text: str, at: int, closing: str) -> Block:
    """Read calls that are separated by commas or lines, up to ``closing`` or the end of the text.

    A call that cannot be read is skipped and reported; those around it are kept.
    """
    block = Block(at)
    failures = 0
    while True:
        at = skip_space(text, at, ",;")
        if at >= len(text) or failures == MOST_FAILURES or (closing and text.startswith(closing, at)):
            block.end = min(at + len(closing), len(text))
            return block
        head = _CALL.match(text, at)
        try:
            if head is None:
                raise CallSyntaxError(f"the tool call is not a function call: {shown(text[at:])}")
            end, source = _arguments_end(text, head.end() - 1)
            block.calls.append(_read_call(head.group()[:-1].strip(), source))
            at = end
        except CallSyntaxError as problem:
            block.error = block.error or str(problem)
            failures += 1
            ends = (found.end() for found in _CALL_END.finditer(text, at))
            close = text.rfind(closing, at) if closing else -1
            last = len(text) if close < 0 else close
            at = next((end for end in ends if _CALL.match(text, end)), last)


def _arguments_end(text: str, at: int) -> tuple[int, str]:
    """Return the position behind the bracket at ``at``, and its text with line breaks in strings escaped.

    Raises CallSyntaxError for brackets or quotes that do not match.
    """
    stack: list[str] = []
    source: list[str] = []
    quote = ""
    while at < len(text):
        letter = text[at]
        if quote:
            step = 2 if letter == "\\" else len(quote) if text.startswith(quote, at) else 1
            is_break = letter in "\n\r\t" and len(quote) == 1
            source.append(repr(letter)[1:-1] if is_break else text[at : at + step])
            if letter != "\\" and text.startswith(quote, at):
                quote = ""
            at += step
            continue
        if letter in "\"'":
            quote = letter * 3 if text.startswith(letter * 3, at) else letter
            source.append(quote)
            at += len(quote)
            continue
        if letter in "([{":
            stack.append(letter)
        elif letter in _BRACKETS and (not stack or stack.pop() != _BRACKETS[letter]):
            break
        source.append(letter)
        at += 1
        if not stack:
            return at, "".join(source)
    raise CallSyntaxError(
        f"the tool call's brackets do not match: {shown(text[max(0, at - _SHOWN_BEFORE) :])}"
    )


def _read_call(name: str, source: str) -> ToolCall:
    """Return the call of ``name`` with the arguments of ``source``, brackets included."""
    call = _parse(name, source)
    if call.args or any(item.arg is None for item in call.keywords):
        raise CallSyntaxError(f"{name}: write every argument as key=value: {shown(source)}")
    arguments: dict[str, Any] = {}
    for item in call.keywords:
        try:
            arguments[str(item.arg).removeprefix(_MARK)] = literal_of(item.value)
        except (ValueError, RecursionError) as error:
            raise CallSyntaxError(
                f"{name}: {item.arg} is not a literal: {shown(ast.unparse(item.value))}"
            ) from error
    return ToolCall(name, arguments)


def _parse(name: str, source: str) -> ast.Call:
    problem: Exception | None = None
    for text in (source, _RESERVED.sub(rf"\1{_MARK}\2\3", source)):
        try:
            node = ast.parse(f"f{text}", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            problem = problem or error
            continue
        if isinstance(node, ast.Call):
            return node
    raise CallSyntaxError(f"the tool call is not a Python call ({problem}): {shown(name + source)}")
