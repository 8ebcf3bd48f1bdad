"""Test that the parser of tool calls follows the marks in a chat template."""

from __future__ import annotations

import pytest

from agentrl.chat.parsers.base import _MARKS, PARSERS, parser_of_template


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ '<tool_call>\\n' + call | tojson + '\\n</tool_call>' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' + call.name + '>\\n<parameter=' }}", "qwen3_coder"),
        ("{{ '<tool_call>' + call.name + '<arg_key>' }}", "glm45"),
        ("{{ '<|start|>assistant to=functions.f<|channel|>commentary' }}", "gpt_oss"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function", "deepseek_v3"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}.', "llama"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '<|tool_call>call:' }}", "gemma4"),
        ("{{ message.content }}", "hermes"),
    ],
)
def test_the_marks_of_a_template_choose_the_parser(template: str, parser: str) -> None:
    assert parser_of_template(template) == parser


def test_every_mark_names_a_parser_that_there_is() -> None:
    assert {parser for _, parser in _MARKS} <= set(PARSERS.names())
