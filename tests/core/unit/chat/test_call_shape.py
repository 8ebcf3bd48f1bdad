"""The text around a tool call's arguments, found by rendering one in each kind of template."""

from __future__ import annotations

from pathlib import Path

import chat_models as models
import pytest
from chat_models import FAMILIES, of_family, opened

from agentrl.chat.parsers.parser import THINK
from agentrl.gateway.answerer import call_shape

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
