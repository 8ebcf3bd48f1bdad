"""Choose the parser of a model's tool calls by the marks in its chat template."""

from __future__ import annotations

DEFAULT = "hermes"
"""The parser of a template without any known mark: the format most models have seen."""

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
    """Return the name of the parser for the tool calls that a chat template writes."""
    return next((parser for mark, parser in _MARKS if mark in source), DEFAULT)
