"""Test the parsers on the cases of SGLang's and vLLM's own parser tests, kept as data in ``parser_cases``.

Cases of chat templates that neither project reads name the template.

A case with ``contradicts`` says where the two projects disagree with each other or with a rule of ours, and
why; its expectation is ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat.parsers.parser import get_parser, parse_text

FOLDER = Path(__file__).parent / "parser_cases"
FILES = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
CASES = [
    pytest.param(case, content["tools"], id=f"{case['parser']}: {case['source']}")
    for content in FILES
    for case in content["cases"]
]


@pytest.mark.parametrize(("case", "tools"), CASES)
def test_a_case_of_the_upstream_suites(case: dict[str, Any], tools: list[dict[str, Any]]) -> None:
    tools, is_opened = case.get("tools", tools), case.get("opened", False)
    parsed = parse_text(get_parser(case["parser"]), case["text"], tools, opened=is_opened)
    assert [[call.name, call.arguments] for call in parsed.tool_calls] == case["calls"]
    assert json.loads(json.dumps([call.arguments for call in parsed.tool_calls], allow_nan=False)) == [
        arguments for _, arguments in case["calls"]
    ]
    assert (parsed.error is not None) == case.get("error", False), parsed.error
    assert parsed.reasoning == case.get("reasoning", "")
    if "content" in case and parsed.error is None:
        assert parsed.content == case["content"]
