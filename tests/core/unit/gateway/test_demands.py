"""The shape of a format's tool calls, and the grammar of what a request demands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_models as models
import pytest
from chat_models import FAMILIES, of_family, opened

from agentrl.chat.parsers.parser import THINK
from agentrl.gateway.answerer import CallShape, call_shape, grammar_of
from agentrl.gateway.request import GatewayRequest

SHAPE = CallShape('<call>{"name": "', '", "arguments": ', "}</call>", None, "")
THINKS = CallShape(SHAPE.before_name, SHAPE.before_arguments, SHAPE.end, THINK, "\n\n")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CONTENT = {"type": "json_schema", "json_schema": {"type": "object"}}
BEGIN = '<call>{"name": "add", "arguments": '
CALL = {"type": "tag", "begin": BEGIN, "content": CONTENT, "end": "}</call>"}


def demanded(shape: CallShape | None, *, in_thought: bool = False, **demand: Any) -> Any:
    request = GatewayRequest(model="policy", messages=[{"role": "user", "content": "?"}], **demand)
    found = grammar_of(request, shape, in_thought=in_thought)
    return found and {name: json.loads(value) for name, value in found.items()}


def test_a_call_may_stand_behind_a_thought() -> None:
    found = demanded(THINKS, tools=[TOOL], must_call=("add",))["structural_tag"]["format"]
    thoughtful, plain = found["elements"]
    assert plain == CALL
    thought, space, call = thoughtful["elements"]
    assert (thought["begin"], thought["end"], space["value"], call) == ("<think>", "</think>", "\n\n", CALL)
    opened = demanded(THINKS, in_thought=True, tools=[TOOL], must_call=("add",))["structural_tag"]["format"]
    assert opened["elements"][0] == {**thought, "begin": ""}


@pytest.mark.parametrize(
    ("shape", "in_thought", "demand"),
    [
        (SHAPE, False, {"tools": [TOOL]}),
        (None, False, {"tools": [TOOL], "must_call": ("add",)}),
        (SHAPE, True, {"tools": [TOOL], "must_call": ("add",)}),
        (None, True, {"tools": [], "schema": {"type": "object"}}),
    ],
)
def test_what_no_grammar_can_be_written_for(
    shape: CallShape | None, in_thought: bool, demand: dict[str, Any]
) -> None:
    assert demanded(shape, in_thought=in_thought, **demand) is None


def test_a_schema_alone_is_the_engines_own() -> None:
    for shape in (None, SHAPE):
        assert demanded(shape, tools=[], schema={"type": "array"}) == {"json_schema": {"type": "array"}}


_TAGGED = ('<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>")
_SHAPES = {
    "llama-3": ('{"name": "f", "parameters": ', "}", None),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        THINK,
    ),
    "qwen3": (*_TAGGED, THINK),
}


@pytest.mark.parametrize("name", _SHAPES)
def test_the_shape_of_a_familys_calls(tmp_path: Path, name: str) -> None:
    shape = call_shape(of_family(tmp_path, name))
    assert shape is not None
    assert (shape.begin("f"), shape.end, shape.tags) == _SHAPES[name]
    assert shape.behind_thought == ("\n\n" if shape.tags else "")


def test_a_template_gives_its_shape_behind_the_thought_that_it_writes(tmp_path: Path) -> None:
    shape = call_shape(opened(tmp_path, models.KEEPS_ALL))
    assert shape is not None
    assert (shape.begin("f"), shape.end) == _TAGGED
    assert (shape.tags, shape.behind_thought) == (THINK, "\n\n\n")


def test_calls_without_a_json_object_have_no_shape(tmp_path: Path) -> None:
    assert set(FAMILIES) - set(_SHAPES) == {"gemma4"}
    assert call_shape(of_family(tmp_path, "gemma4")) is None
