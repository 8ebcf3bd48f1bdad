"""Arguments that a format writes as text keep what the model wrote; schemas that refer to themselves end."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.chat.parsers.arguments import convert_arguments, convert_text, validate_call
from agentrl.chat.parsers.parser import MAX_NESTING, CallSyntaxError, ToolCall, get_parser, load_json

LOSSY = ("02134", "+31205551234", "007", "1e5", "1.10", "-0", "1_000", " 5", "٣", "5.", ".5", "0x10", "1E3")
UNIONS = (
    {"type": ["string", "integer"]},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "null"}, {"type": "number"}, {"$ref": "#/$defs/text"}]},
    {"type": ["boolean", "number", "string"]},
    {},
)
ROOT = {"$defs": {"text": {"type": "string"}}}


@pytest.mark.parametrize("union", UNIONS)
def test_text_that_a_value_would_write_otherwise_stays_text(union: dict[str, Any]) -> None:
    assert [convert_text(text, union, ROOT) for text in LOSSY] == list(LOSSY)


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("5", ["string", "integer"], 5), ("1.5", ["string", "number"], 1.5),
        ("1", ["boolean", "string"], "1"), ("0", ["boolean", "string"], "0"),
        ("true", ["boolean", "string"], True), ("False", ["boolean", "string"], False),
        ("TRUE", ["boolean", "string"], "TRUE"), ("null", ["string", "null"], None),
        ('"5"', ["string", "integer"], "5"), ('{"a": 1}', ["string", "object"], {"a": 1}),
        ("(1, 2)", ["string", "array"], "(1, 2)"), ("02134", ["integer"], 2134), ("1e5", ["number"], 1e5),
        ("1", ["boolean"], True),
    ],
)  # fmt: skip
def test_a_value_wins_where_nothing_is_lost(text: str, kinds: list[str], value: Any) -> None:
    read = convert_text(text, {"type": kinds})
    assert (read, type(read)) == (value, type(value))


def test_schemas_that_refer_to_themselves_are_walked_once() -> None:
    names = [f"L{level}" for level in range(15)]
    wide = {name: {"anyOf": [{"$ref": f"#/$defs/L{at + 1}"}] * 9} for at, name in enumerate(names[:-1])}
    root = {
        "$ref": "#/$defs/A",
        "$defs": {
            **wide, "L14": {"type": "integer"},
            "A": {"properties": {"x": {"$ref": "#/$defs/L0"}}, "anyOf": [{"$ref": "#/$defs/A"}] * 9},
        },
    }  # fmt: skip
    tools = [{"function": {"name": "f", "parameters": root}}]
    assert convert_arguments("f", {"x": "5", "y": "z"}, tools) == {"x": 5, "y": "z"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}},
         "properties": {"x": {"$ref": "#/$defs/A"}}},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
    ],
)  # fmt: skip
def test_a_cycle_of_references_validates_nothing(parameters: dict[str, Any]) -> None:
    tool = {"function": {"name": "f", "parameters": parameters}}
    assert validate_call(ToolCall("f", {"x": 1}), [tool]) is None


def test_a_problem_lists_arguments_behind_references() -> None:
    root = {
        "$ref": "#/$defs/Args",
        "$defs": {
            "Args": {
                "allOf": [{"properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}],
                "anyOf": [{"properties": {"m": {"type": ["string", "null"]}}, "required": ["m"]}, {}],
            },
            "N": {"type": "integer"},
        },
    }  # fmt: skip
    problem = validate_call(ToolCall("f", {"n": "x"}), [{"function": {"name": "f", "parameters": root}}])
    assert str(problem).endswith("Arguments: n (integer), m? (string or null).")


@pytest.mark.parametrize("depth", [MAX_NESTING, MAX_NESTING + 1, 5000, 200_000])
def test_nesting_is_bounded_in_the_models_words(depth: int) -> None:
    text = "[" * depth + "]" * depth
    if depth <= MAX_NESTING:
        assert load_json(text)
        return
    with pytest.raises(CallSyntaxError):
        load_json(text)
    call = f'<tool_call>{{"name": "f", "arguments": {{"x": {text}}}}}</tool_call>'
    parsed = get_parser("hermes").parse(call, [])
    assert parsed.error
    assert not parsed.tool_calls
