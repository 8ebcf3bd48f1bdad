"""Parse the MiniCPM format: Python calls between ``<|tool_call_start|>`` and ``<|tool_call_end|>``."""

from __future__ import annotations

import ast
import re

from agentrl.chat.parsers.base import CallSyntaxError, ParsedMessage, ToolCall, Tools, shown
from agentrl.chat.parsers.registry import tool_call_parser

START, END = "<|tool_call_start|>", "<|tool_call_end|>"

_FENCE = re.compile(r"^```(?:python)?\s*\n?(.*?)\n?```$", re.DOTALL)


@tool_call_parser("minicpm")
class MiniCPMParser:
    """Tool calls as Python expression statements with keyword arguments; values are literals."""

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse a message. Text outside the block is content."""
        before, start, after = text.partition(START)
        block, end, behind = after.partition(END)
        content = (before + behind).strip()
        if not start:
            return ParsedMessage(content)
        if not end:
            return ParsedMessage(content, (), f"{START} is not closed by {END}: {shown(after)}")
        try:
            return ParsedMessage(content, tuple(_read_block(block.strip())))
        except CallSyntaxError as problem:
            return ParsedMessage(content, (), str(problem))


def _read_block(block: str) -> list[ToolCall]:
    fenced = _FENCE.match(block)
    source = (fenced.group(1) if fenced else block).strip()
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CallSyntaxError(f"the tool call is no Python call ({error}): {shown(source)}") from error
    if not statements:
        raise CallSyntaxError("the tool call is empty")
    return [_read_call(statement, source) for statement in statements]


def _read_call(statement: ast.stmt, source: str) -> ToolCall:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        raise CallSyntaxError(f"the tool call is no function call: {shown(source)}")
    call = statement.value
    name = ast.unparse(call.func)
    if not re.fullmatch(r"[\w.]+", name):
        raise CallSyntaxError(f"the tool call has no name: {shown(source)}")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise CallSyntaxError(f"{name}: write every argument as key=value: {shown(source)}")
    arguments = {}
    for keyword in call.keywords:
        try:
            arguments[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, RecursionError, TypeError) as error:
            raise CallSyntaxError(
                f"{name}: {keyword.arg} is no literal: {shown(ast.unparse(keyword.value))}"
            ) from error
    return ToolCall(name, arguments)
