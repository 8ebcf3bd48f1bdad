"""Define tool-call parsers, find them by name and by chat template, and read JSON and Python literals."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.registry import Registry

SHOWN = 120
"""Longest quotation of the model's text in an error message, in characters."""

MOST_FAILURES = 16
"""Number of malformed calls after which a parser stops, so that a repetitive text costs linear time."""

MAX_NESTING = 200
"""Deepest nesting of a tool call's JSON: a validator that walks it recurses several times a level."""

Tools = Sequence[Mapping[str, Any]]
"""The function schemas of the tools offered, as in an OpenAI request."""

ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys under which models write the arguments of a JSON tool call."""


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


ParserFactory = Callable[[], ToolCallParser]

PARSERS: Registry[ParserFactory] = Registry(
    "tool-call parser",
    group="agentrl.tool_call_parsers",
    flag="--tool_call_parser",
    built_in=[f"agentrl.chat.parsers.{name}" for name in ("marked", "pythonic", "structured", "tagged")],
)
"""Tool-call parsers by name: ``--tool_call_parser``."""


def tool_call_parser(*names: str) -> Callable[[ParserFactory], ParserFactory]:
    """Register a class that makes a ``ToolCallParser`` without arguments under ``names``."""
    return PARSERS.register(*names)


def get_parser(name: str) -> ToolCallParser:
    """Return a new parser of the format ``name``. Raises ConfigError for an unknown name."""
    return PARSERS.get(name)()


_MARKS = (
    ("<|channel|>", "gpt_oss"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("｜DSML｜", "deepseek_v32"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call>", "gemma4"),
    ("<|action_start|>", "internlm"),
    ("<TOOLCALL>", "nemotron"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<function_calls>", "olmo3"),
    ("<tool_calls>", "hunyuan"),
    ("functools[", "phi4_mini"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama"),
    ('"parameters": dictionary of argument name and its value', "llama"),
)
"""What a template writes around a call, the most specific first, and the parser that reads it."""


def parser_of_template(source: str) -> str:
    """Return the name of the parser for the tool calls that a chat template writes.

    Hermes is the default: the format that most models have seen.
    """
    return next((parser for mark, parser in _MARKS if mark in source), "hermes")


def tool_names(tools: Tools) -> list[str]:
    """Return the names of tools, in order."""
    return [str(tool.get("function", tool).get("name")) for tool in tools]


class CallSyntaxError(ValueError):
    """A tool call cannot be parsed; the model reads the error's text."""


def shown(text: str) -> str:
    """Return ``text`` on one line, cut to ``SHOWN`` characters."""
    line = " ".join(text[: 4 * SHOWN].split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def skip_space(text: str, at: int, also: str = "") -> int:
    """Return the first position from ``at`` that is neither white space nor a character of ``also``."""
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at


def decode_json(text: str, at: int = 0) -> tuple[Any, int]:
    """Decode the JSON value that starts at ``at``; return it and the position behind it.

    Raw line breaks inside strings are accepted. Raises CallSyntaxError for anything else that is not JSON,
    numbers that overflow and nesting beyond ``MAX_NESTING`` included.
    """
    try:
        value, end = _DECODER.raw_decode(text, skip_space(text, at))
    except (ValueError, RecursionError) as error:
        raise CallSyntaxError(f"the tool call is not JSON ({error}): {shown(text[at:])}") from error
    if isinstance(value, (list, dict)) and _is_deeper(value, MAX_NESTING):
        deep = f"the tool call is nested more than {MAX_NESTING} levels deep"
        raise CallSyntaxError(f"{deep}: {shown(text[at:])}")
    return value, end


def _is_deeper(value: list[Any] | dict[str, Any], levels: int) -> bool:
    """Return whether lists and objects are nested more than ``levels`` deep."""
    row = [value]
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in row)
        row = [item for items in inner for item in items if isinstance(item, (list, dict))]
        if not row:
            return False
    return True


def load_json(text: str) -> Any:
    """Decode ``text`` that is one JSON value. Raises CallSyntaxError with the position of the problem."""
    value, end = decode_json(text)
    if text[end:].strip():
        raise CallSyntaxError(f"the tool call is not JSON (text behind it): {shown(text[end:])}")
    return value


def call_of(value: Any) -> ToolCall:
    """Return the tool call of a decoded ``{"name": …, "arguments": {…}}``. Raises CallSyntaxError."""
    if not isinstance(value, Mapping):
        raise CallSyntaxError(
            f"the tool call is not a JSON object but {type(value).__name__}: {shown(str(value))}"
        )
    if "name" not in value and isinstance(value.get("function"), Mapping):
        value = value["function"]
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise CallSyntaxError(f'the tool call has no "name": {shown(json.dumps(value, ensure_ascii=False))}')
    key = next((key for key in ARGUMENT_KEYS if key in value), ARGUMENT_KEYS[0])
    return ToolCall(name.strip(), arguments_of(value.get(key), name.strip(), key))


def calls_of(value: Any) -> tuple[list[ToolCall], str | None]:
    """Return the calls of one decoded call or of a list of calls, and the problem of the first bad one."""
    calls: list[ToolCall] = []
    error = None
    for item in value if isinstance(value, list) else [value]:
        try:
            calls.append(call_of(item))
        except CallSyntaxError as problem:
            error = error or str(problem)
    return calls, error


def arguments_of(value: Any, name: str, key: str = ARGUMENT_KEYS[0]) -> dict[str, Any]:
    """Return arguments as a dict: an absent value is empty, a JSON string is decoded."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = load_json(value) if value.strip() else {}
    if not isinstance(value, dict):
        raise CallSyntaxError(
            f'"{key}" of {name} is not a JSON object but {type(value).__name__}: {shown(str(value))}'
        )
    return value


def finite_float(text: str) -> float:
    """Return a number. Raises ValueError for one that overflows, which JSON cannot express."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is not finite")
    return value


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_float=finite_float, parse_constant=_refuse_constant)


_CONSTANTS = {"true": True, "false": False, "null": None}
_PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


def read_literal(text: str) -> Any:
    """Return the value of a Python literal. Raises ValueError for text that JSON cannot express."""
    try:
        return literal_of(ast.parse(text.strip(), mode="eval").body)
    except _PARSE_ERRORS as error:
        raise ValueError(f"not a literal: {error}") from error


def literal_of(node: ast.expr) -> Any:
    """Return the value of a parsed literal. Raises ValueError for an expression and for bytes or sets."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise ValueError("a number is not finite")
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [literal_of(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_key_of(key) for key in node.keys]
        return dict(zip(keys, map(literal_of, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = literal_of(node.operand)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    raise ValueError(f"{ast.unparse(node)[:120]} is not a literal")


def _key_of(node: ast.expr | None) -> str:
    if node is None:
        raise ValueError("** is not a literal")
    key = literal_of(node)
    if isinstance(key, (list, dict)):
        raise ValueError(f"a key is {type(key).__name__}")
    return key if isinstance(key, str) else str(key)
