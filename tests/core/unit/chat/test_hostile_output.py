"""Parse hostile model output: megabytes, deep nesting, control characters; every parser takes linear time.

Nothing is timed: a text of 40,000 characters takes milliseconds in linear time, and minutes in quadratic.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.chat.parsers import arguments
from agentrl.chat.parsers.arguments import read_literal, validate_call
from agentrl.chat.parsers.marked import MarkedParser
from agentrl.chat.parsers.parser import PARSERS, ToolCall, get_parser, parse_text, split_reasoning
from agentrl.tools.tool import function_schema

PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "object"}, "note": {"type": "string"}}
TOOL = function_schema("add", "Adds.", {"type": "object", "properties": PROPERTIES})
LENGTH = 40_000

HEADS = {
    "deepseek_v3": ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n", "<｜tool▁call▁begin｜>"],
    "deepseek_v32": [
        '<｜DSML｜invoke name="add">',
        '<｜DSML｜invoke name="add"><｜DSML｜parameter name="a">',
    ],
    "minimax_m2": ['<invoke name="add">', '<invoke name="add"><parameter name="a">', '<invoke name="'],
    "kimi_k2": ["<|tool_call_begin|>", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"],
    "gemma4": ["call:", "call:add{", "call:add{a:", 'call:add{a:<|"|>'],
    "glm45": ["add", "add<arg_key>", "add<arg_key>a</arg_key><arg_value>"],
    "qwen3_coder": ["<function=", "<function=add>", "<function=add><parameter=a>"],
    "mistral": ["add", "add[ARGS]"],
    "minicpm": ["add(", "add(a="],
    "hermes": ['{"name": "add", "arguments": ', '{"name": "PythonInterpreter"}<code>'],
}
"""What leads into a call, behind the opening mark."""

LOOSE = {
    "pythonic": ["[add(", "[add(a=", "["],
    "llama": ["<|python_tag|>", '{"name": "add", "parameters": '],
    "gpt_oss": ["<|channel|>commentary to=functions.add<|message|>", "<|channel|>", "<|start|>"],
}
"""The openings of formats without one."""

FILLERS = (
    "[", "{", "(", '"', "\\", " ", "\n", "\\n", '{"a":', "[1,", "x", "<", "=", ",", "a:", "x=", "\0", "'",
)  # fmt: skip
"""What a model that degenerates repeats."""

KINDS = {type(get_parser(name)): name for name in PARSERS.names()}


def openings(name: str) -> list[str]:
    parser = get_parser(name)
    marks = list(parser.opens) if isinstance(parser, MarkedParser) else [""]
    heads = next((HEADS[kind] for kind in HEADS if isinstance(parser, type(get_parser(kind)))), [])
    loose = next((LOOSE[kind] for kind in LOOSE if isinstance(parser, type(get_parser(kind)))), [])
    return [marks[0], *(marks[0] + head for head in heads), *loose]


@pytest.mark.parametrize("name", sorted(KINDS.values()))
def test_a_text_that_repeats_anything_takes_linear_time(name: str) -> None:
    parser = get_parser(name)
    for opening in openings(name):
        units = [opening] if opening else []
        for filler in (*FILLERS, *units):
            for text in (opening + filler * (LENGTH // len(filler)), (opening + filler) * 300):
                parse_text(parser, text, [TOOL])


@pytest.mark.parametrize(
    "unit", ["<think></think>", "a<think>b</think>", "<think>", "</think>", "<tool_call>"]
)
def test_megabytes_of_thoughts_take_linear_time(unit: str) -> None:
    text = unit * (10_000_000 // len(unit))
    split = split_reasoning(text)
    assert len(split.rest) <= len(text)


@pytest.mark.parametrize(
    "name", ["hermes", "llama", "mistral", "deepseek_v3", "kimi_k2", "gemma4", "minicpm"]
)
def test_ten_megabytes_of_text_and_a_call_are_read(name: str) -> None:
    calls = {
        "hermes": '<tool_call>{"name": "add", "arguments": {"note": TEXT}}</tool_call>',
        "llama": '<|python_tag|>{"name": "add", "parameters": {"note": TEXT}}',
        "mistral": '[TOOL_CALLS]add[ARGS]{"note": TEXT}',
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"note": TEXT}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"note": TEXT}<|tool_call_end|><|tool_calls_section_end|>',
        "gemma4": '<|tool_call>call:add{note:<|"|>BODY<|"|>}<tool_call|>',
        "minicpm": "<|tool_call_start|>add(note=TEXT)<|tool_call_end|>",
    }
    size = 500_000 if name == "minicpm" else 10_000_000
    body = "ab <x> {[( " * (size // 11)
    text = calls[name].replace("TEXT", json.dumps(body)).replace("BODY", body)
    (call,) = get_parser(name).parse(text, [TOOL]).tool_calls
    assert call.arguments == {"note": body}


@pytest.mark.parametrize("brackets", ["[]", "{}", "()"])
def test_a_hundred_thousand_brackets_are_an_error_and_no_crash(brackets: str) -> None:
    deep = brackets[0] * 100_000 + brackets[1] * 100_000
    nested = '{"a":' * LENGTH + "1" + "}" * LENGTH
    for name in sorted(KINDS.values()):
        for opening in openings(name):
            for text in (opening + deep, opening + nested):
                assert parse_text(get_parser(name), text, [TOOL]).tool_calls == ()
    with pytest.raises(ValueError, match="not a literal"):
        read_literal(deep)


@pytest.mark.parametrize("odd", ["\0", "\ud800", "\udfff\ud800", "\u202e", "\x1b[2J", "ｔool"])
def test_odd_characters_are_part_of_a_text(odd: str) -> None:
    written = f'<tool_call>{{"name": "add", "arguments": {{"note": "a{odd}b"}}}}</tool_call>'
    parsed = parse_text(get_parser("hermes"), f"{odd}{written}{odd}", [TOOL])
    (call,) = parsed.tool_calls
    assert call.arguments == {"note": f"a{odd}b"}
    assert validate_call(call, [TOOL]) is None
    for name in sorted(KINDS.values()):
        for opening in openings(name):
            parse_text(get_parser(name), opening + odd + opening + odd, [TOOL])
            assert parse_text(get_parser(name), f"a{odd}b", [TOOL]).content == f"a{odd}b"


def test_escaped_surrogates_in_arguments_do_not_stop_the_check_of_a_call() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"note": "\\ud800", "a": "\\udfff"}}</tool_call>'
    (call,) = get_parser("hermes").parse(text, [TOOL]).tool_calls
    assert call.arguments["note"] == "\ud800"
    assert "is not of type" in (validate_call(call, [TOOL]) or "")


DOUBLING = {str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(60)} | {"60": {}}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"pattern": "^(a+)+$"}}},
        {"patternProperties": {"^(a+)+$": {}}},
        {"$ref": "#/$defs/0", "$defs": DOUBLING},
    ],
    ids=["pattern", "names", "references"],
)
@pytest.mark.attack
def test_a_tool_server_cannot_hold_a_sampler_by_its_schema(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking these calls by their schema would take years."""
    monkeypatch.setattr(arguments, "CHECK_SECONDS", 0.1)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", **schema}}}
    text = "a" * 60 + "!"
    assert validate_call(ToolCall("add", {"a": text, text: 1}), [tool]) is None
