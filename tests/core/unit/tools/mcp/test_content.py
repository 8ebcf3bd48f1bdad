"""Render tool results as text, and normalize what the SDK would refuse."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.tools.mcp.content import normalize_result, render_content


@pytest.mark.parametrize(
    ("text", "structured", "said"),
    [
        ('{"a": 1}', {"a": 1}, True),
        ("5", {"result": 5}, True),
        ("the text", {"content": "the text"}, True),
        ('[{"n": 1}]', {"entities": [{"n": 1}]}, True),
        ("done", {"a": 1}, False),
        ("done", {"a": 1, "b": "done"}, False),
    ],
)
def test_structured_content_is_shown_unless_the_text_says_it(text: str, structured: Any, said: bool) -> None:
    shown = render_content([{"type": "text", "text": text}], structured)
    assert (shown == text) is said
    assert shown.startswith(text)


def test_a_tool_list_keeps_what_is_read_and_loses_what_the_sdk_would_refuse() -> None:
    tools = [
        {"name": "a", "inputSchema": {"type": "object"}, "outputSchema": {"type": "object"}, "icons": [1]},
        {"name": "b", "inputSchema": "none"},
        {
            "name": "d", "description": ["x"], "title": 3, "_meta": 4, "execution": 5,
            "inputSchema": {"properties": ["p"], "required": "p", "$defs": {}},
            "annotations": {"readOnlyHint": "perhaps", "idempotentHint": True, "title": 6},
        },
        {"name": ""},
        "c",
    ]  # fmt: skip
    schemas = ({"type": "object"}, {"type": "object", "properties": {}}, {"type": "object", "$defs": {}})
    hints: tuple[dict[str, Any], ...] = ({}, {}, {"idempotentHint": True})
    kept = [
        {"name": name, "inputSchema": schema, "annotations": hint}
        for name, schema, hint in zip("abd", schemas, hints, strict=True)
    ]
    assert normalize_result({"tools": tools, "nextCursor": "n"}) == {"tools": kept, "nextCursor": "n"}


def test_other_results_are_returned_as_they_are() -> None:
    result = {"contents": [{"uri": "u", "text": "t"}]}
    assert normalize_result(result) is result
