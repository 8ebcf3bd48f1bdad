"""Parse ``<invoke name="…"><parameter name="…">…``: MiniMax M2, and DeepSeek V3.2's DSML."""

from __future__ import annotations

import re
from dataclasses import replace

from agentrl.chat.parsers.arguments import convert_arguments, convert_text, property_names
from agentrl.chat.parsers.base import (
    CallSyntaxError,
    ParsedMessage,
    ToolCall,
    Tools,
    arguments_of,
    load_json,
    shown,
    skip_space,
)
from agentrl.chat.parsers.marked import Block, MarkedParser
from agentrl.chat.parsers.registry import tool_call_parser

WRAPPERS = frozenset({"arguments", "input"})
"""Names of a single parameter in which models wrap all arguments as one JSON object."""


@tool_call_parser("minimax_m2")
class MiniMaxParser(MarkedParser):
    """``<invoke name="f"><parameter name="x">1</parameter></invoke>`` in ``<minimax:tool_call>``."""

    opens: tuple[str, ...] = ("<minimax:tool_call>",)
    close = "</minimax:tool_call>"
    prefix = ""
    """What stands before the names of the inner tags."""

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the calls of one block. Raises CallSyntaxError."""
        block = Block(at)
        head = re.compile(rf'\s*<{self.prefix}invoke name="([^"<>\n]+)"\s*>')
        end = f"</{self.prefix}invoke>"
        while (found := head.match(text, block.end)) is not None:
            name = found.group(1).strip()
            texts, kinds, at = self._parameters(text, found.end(), end)
            close = text.find(end, at)
            if close < 0:
                raise CallSyntaxError(f"{name}: <invoke> is not closed by {end}: {shown(text[at:])}")
            block.calls.append(_call(name, texts, kinds, text[at:close], tools))
            block.end = close + len(end)
        if not block.calls:
            raise CallSyntaxError(f'the tool call is not of the form <invoke name="…">: {shown(text[at:])}')
        return block

    def _parameters(self, text: str, at: int, end: str) -> tuple[dict[str, str], dict[str, str], int]:
        """Return the texts of all parameters at ``at``, their ``string`` attributes and their end."""
        head = re.compile(rf'\s*<{self.prefix}parameter name="([^"<>\n]+)"(?: string="(true|false)")?\s*>')
        close = f"</{self.prefix}parameter>"
        closing = re.compile(rf"{re.escape(close)}(?=\s*(?:<{self.prefix}parameter name=|{re.escape(end)}))")
        texts: dict[str, str] = {}
        kinds: dict[str, str] = {}
        while (found := head.match(text, at)) is not None:
            last = closing.search(text, found.end())
            if last is None:
                raise CallSyntaxError(f"a parameter is not closed by {close}: {shown(text[found.end() :])}")
            key, value = found.group(1).strip(), text[found.end() : last.start()]
            if self.prefix and self.prefix in value:
                raise CallSyntaxError(f"the parameter {key} holds a tag of the format: {shown(value)}")
            texts[key], at = value, last.end()
            if found.group(2):
                kinds[key] = found.group(2)
        return texts, kinds, at


@tool_call_parser("deepseek_v32")
class DeepSeekDsmlParser(MiniMaxParser):
    """DSML: MiniMax's tags with the prefix ``｜DSML｜``; the body of an invocation may be JSON.

    As in DeepSeek's own parser, the prefix stands in tags only, ``string="true"`` gives text, and
    ``string="false"`` JSON. A parameter without the attribute is converted by the schema.
    """

    opens = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    close = "</｜DSML｜function_calls>"
    prefix = "｜DSML｜"

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse every section. A tag outside of sections is an error."""
        parsed = super().parse(text, tools)
        if parsed.error is None and self.prefix in parsed.content:
            return replace(parsed, error=f"a tag outside of {self.opens[0]}: {shown(parsed.content)}")
        return parsed

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the calls of one block, whichever of the two outer tags closes it."""
        block = super().read(text, at, tools)
        end = skip_space(text, block.end)
        other = self.close.replace("function_calls", "tool_calls")
        block.end = end + len(other) if text.startswith(other, end) else block.end
        return block


def _call(name: str, texts: dict[str, str], kinds: dict[str, str], rest: str, tools: Tools) -> ToolCall:
    body = rest.strip()
    if body and not texts:
        return ToolCall(name, arguments_of(load_json(body), name))
    if body:
        raise CallSyntaxError(f"{name}: text outside of its parameters: {shown(body)}")
    known = property_names(name, tools)
    if len(texts) == 1 and known is not None and (key := next(iter(texts))) in WRAPPERS - known:
        inner = convert_text(texts[key], {"type": "object"})
        if isinstance(inner, dict) and inner.keys() <= known:
            return ToolCall(name, inner)
    untyped = {key: text for key, text in texts.items() if key not in kinds}
    typed = {key: texts[key] if kind == "true" else load_json(texts[key]) for key, kind in kinds.items()}
    converted = convert_arguments(name, untyped, tools)
    return ToolCall(name, {key: typed[key] if key in typed else converted[key] for key in texts})
