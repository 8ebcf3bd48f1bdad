"""Define tool-call parsers, find them by name and by template; split a text into reasoning and the rest."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from agentrl.base.registry import Registry, refuse_bare

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
    built_in=[f"agentrl.chat.parsers.{name}" for name in ("marked", "pythonic", "tagged")],
)
"""Tool-call parsers by name: ``--tool_call_parser``."""


def tool_call_parser(*names: str) -> Callable[[ParserFactory], ParserFactory]:
    """Register a class that makes a ``ToolCallParser`` without arguments under ``names``."""
    refuse_bare(names, "tool_call_parser")
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
    # Cut before splitting: the text may be megabytes, and is quoted for each malformed call.
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
    # Go level by level: a recursive walk would end by the RecursionError that it is to prevent.
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
# Name MemoryError too: Python's parser raises it for text that nests too deeply.
_PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


def read_literal(text: str) -> Any:
    """Return the value of a Python literal. Raises ValueError for text that JSON cannot express."""
    try:
        # Walk the tree here: literal_eval takes bytes, sets and complex numbers, and no true or null.
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


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The texts around a thought."""

    open: str
    close: str


THINK = ReasoningTags("<think>", "</think>")

REASONING_TAGS = (
    THINK,
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningTags("<|thought_start|>", "<|thought_end|>"),
    ReasoningTags("◁think▷", "◁/think▷"),
    ReasoningTags("<|channel>thought", "<channel|>"),
    ReasoningTags("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningTags("[unused16]", "[unused17]"),
)
"""How model families mark thoughts. ``THINK`` is by far the most common, so it is first."""

_CALLS = {
    "<tool_call>": "</tool_call>",
    "<tool_calls>": "</tool_calls>",
    "<|tool_call>": "<tool_call|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>",
    "<seed:tool_call>": "</seed:tool_call>",
    "<minimax:tool_call>": "</minimax:tool_call>",
    "<｜DSML｜function_calls>": "</｜DSML｜function_calls>",
    "<function=": "</function>",
    "<function_calls>": "</function_calls>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<|action_start|>": "<|action_end|>",
    "<|channel|>": "",
    "<|tool_call|>": "",
    "[TOOL_CALLS]": "",
    "<|python_tag|>": "",
    "functools[": "",
    "function call<|role_sep|>": "",
}
"""Where a tool call begins and ends: an opening tag inside one is an argument, not a thought.

Harmony's channels say themselves what is a thought.
"""


@dataclass(frozen=True, slots=True)
class SplitText:
    """``reasoning`` joins all thoughts; ``is_open`` tells that the last one is not closed."""

    reasoning: str
    rest: str
    is_open: bool = False


def tags_in(template: str) -> ReasoningTags:
    """Return the reasoning tags that a chat template mentions; ``THINK`` if none."""
    mentioned = (tags for tags in REASONING_TAGS if tags.open in template or tags.close in template)
    return next(mentioned, THINK)


def opens_thought(prompt: str, tags: ReasoningTags = THINK) -> bool:
    """Return whether a rendered prompt ends inside a thought, as templates of thinking models write it."""
    return prompt.rstrip().endswith(tags.open)


def split_reasoning(text: str, tags: ReasoningTags = THINK, *, opened: bool = False) -> SplitText:
    """Split ``text`` into its thoughts and the rest. ``opened``: the prompt opened the first thought.

    A thought that is not closed reaches to the end. A closing tag that comes first ends a thought that
    began before the text. A tag inside a tool call is an argument.
    """
    thoughts: list[str] = []
    spoken: list[str] = []
    inside = opened or _began_before(text, tags)
    at = 0
    # Skip a tag that the model repeats: the prompt has opened this thought already.
    if inside and text.startswith(tags.open, skip_space(text, 0)):
        at = skip_space(text, 0) + len(tags.open)
    while True:
        if inside:
            end = text.find(tags.close, at)
            thoughts.append(text[at : end if end >= 0 else len(text)].strip())
            if end < 0:
                return SplitText(_join(thoughts), "".join(spoken), is_open=True)
            at, inside = end + len(tags.close), False
        else:
            start = _opening(text, tags, at)
            spoken.append(text[at : start if start >= 0 else len(text)])
            if start < 0:
                return SplitText(_join(thoughts), "".join(spoken))
            at, inside = start + len(tags.open), True


def parse_text(
    parser: ToolCallParser, text: str, tools: Tools, tags: ReasoningTags = THINK, *, opened: bool = False
) -> ParsedMessage:
    """Return the parts of an assistant's ``text``: reasoning by ``tags``, the rest by ``parser``."""
    return parse_split(parser, split_reasoning(text, tags, opened=opened), tools)


def parse_split(parser: ToolCallParser, split: SplitText, tools: Tools) -> ParsedMessage:
    """Return the parts of a text whose thoughts are split off.

    With a malformed call ``content`` is all text outside of thoughts, so that the call stays readable.
    """
    parsed = parser.parse(split.rest, tools)
    return replace(
        parsed,
        content=split.rest.strip() if parsed.error else parsed.content,
        reasoning=_join([split.reasoning, parsed.reasoning]),
    )


def _began_before(text: str, tags: ReasoningTags) -> bool:
    """Return whether the first closing tag of ``text`` ends a thought that nothing in it opens.

    A tag inside a tool call ends none, unless the mark of the call is a word of the thought: then no closing
    mark, or another opening one, follows the tag.
    """
    close = text.find(tags.close)
    if close < 0 or text.find(tags.open, 0, close) >= 0:
        return False
    at, marks = 0, _marks(tags.open)
    # Bound it: of a text of opening marks alone each would be searched for its end.
    for _ in range(MOST_FAILURES):
        mark = marks.search(text, at, close)
        if mark is None:
            break
        end = _CALLS[mark.group()]
        stop = text.find(end, mark.end()) if end else len(text)
        if stop > close and (not end or text.find(mark.group(), close, stop) < 0):
            return False
        at = mark.end() if not 0 <= stop < close else stop
    return True


def _opening(text: str, tags: ReasoningTags, at: int) -> int:
    """Return where the next thought from ``at`` on opens outside tool calls; -1 without one."""
    marks = _marks(tags.open)
    while (mark := marks.search(text, at)) is not None:
        if mark.group() == tags.open:
            return mark.start()
        end = _CALLS[mark.group()]
        at = text.find(end, mark.end()) if end else -1
        if at < 0:
            return -1
    return -1


@cache
def _marks(opening: str) -> re.Pattern[str]:
    """Return the pattern of what opens a thought or a tool call."""
    return re.compile("|".join(map(re.escape, (opening, *_CALLS))))


def _join(thoughts: list[str]) -> str:
    return "\n\n".join(thought for thought in thoughts if thought)
