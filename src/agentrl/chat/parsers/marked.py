"""Parse tool calls that are JSON between marks: most families, each with marks of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat.parsers.arguments import property_names
from agentrl.chat.parsers.parser import (
    MOST_FAILURES,
    CallSyntaxError,
    ParsedMessage,
    ToolCall,
    Tools,
    arguments_of,
    calls_of,
    decode_json,
    shown,
    skip_space,
    tool_call_parser,
    tool_names,
)


@dataclass(slots=True)
class Block:
    """The calls behind one opening mark, where they end, and the first problem among them."""

    end: int
    calls: list[ToolCall] = field(default_factory=list)
    error: str | None = None


class MarkedParser:
    """Tool calls behind one of ``opens``, up to ``close`` if the format has one.

    A subclass reads what stands between the marks with ``read``. The end of the text closes the last call
    too: models stop right behind its last brace.
    """

    opens: tuple[str, ...] = ()
    close: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts with which a call may begin: text without one of them holds no call."""
        return self.opens

    def parse(self, text: str, tools: Tools) -> ParsedMessage:
        """Parse every marked block; text outside of them is content."""
        outside: list[str] = []
        calls: list[ToolCall] = []
        error: str | None = None
        at = failures = 0
        while failures < MOST_FAILURES and (start := self.find(text, at)) >= 0:
            outside.append(text[at:start])
            inner = self.behind_open(text, start)
            try:
                block = self.read(text, inner, tools)
                calls += block.calls
                error = error or block.error
                at = self._behind_close(text, block)
            except CallSyntaxError as problem:
                error = error or str(problem)
                failures += 1
                at = self._next_mark(text, start)
        content = ("".join(outside) + text[at:]).strip()
        # Report a lone closing mark: else the call before it is content, and an answer in it counts.
        if self.close and self.close in content:
            error = error or f"{self.close} without {self.opens[0]}: {shown(content)}"
        return ParsedMessage(content, tuple(calls), error)

    def find(self, text: str, at: int) -> int:
        """Return where the next opening mark starts; -1 without one."""
        return min((index for mark in self.opens if (index := text.find(mark, at)) >= 0), default=-1)

    def behind_open(self, text: str, start: int) -> int:
        """Return the position behind the opening mark at ``start``."""
        return start + max((len(mark) for mark in self.opens if text.startswith(mark, start)), default=0)

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the calls that start at ``at``. Raises CallSyntaxError if there is none."""
        return read_json_calls(text, at)

    def _behind_close(self, text: str, block: Block) -> int:
        at = skip_space(text, block.end)
        if not self.close:
            return block.end
        if text.startswith(self.close, at):
            return at + len(self.close)
        if at == len(text):
            return at
        close, opening = text.find(self.close, at), self.find(text, at)
        # Let a call pass whose closing mark is missing: the next one is then behind another opening mark.
        if close >= 0 and not 0 <= opening < close:
            raise CallSyntaxError(f"text behind the tool call: {shown(text[at:close])}")
        return block.end

    def _next_mark(self, text: str, start: int) -> int:
        """Return where parsing goes on behind a malformed call that starts at ``start``."""
        close = text.find(self.close, start) if self.close else -1
        opening = self.find(text, start + 1)
        if opening >= 0 and (close < 0 or opening < close):
            return opening
        return len(text) if close < 0 else close + len(self.close)


# Give nothing back (`*+`): on repeated spaces plain quantifiers take quadratic time.
_OBJECT = re.compile(r"\[?\s*+\{\s*+[\"']")


def read_json_calls(text: str, at: int) -> Block:
    """Read JSON calls in a row: objects, or lists of them, with nothing but ``,`` and ``;`` in between.

    Stops at the first object behind a call that is not JSON, and reports it.
    """
    block = Block(at)
    while True:
        start = skip_space(text, block.end, ",;" if block.end > at else "")
        if start == len(text) or text[start] not in "{[":
            break
        try:
            value, block.end = decode_json(text, start)
        except CallSyntaxError as problem:
            if block.end == at:
                raise
            # Report only what begins as a call does: text behind a call may open with a brace too.
            if _OBJECT.match(text, start):
                block.error = block.error or str(problem)
            break
        calls, error = calls_of(value)
        block.calls += calls
        block.error = block.error or error
    if block.end == at:
        decode_json(text, at)
        raise CallSyntaxError(f"the tool call is not a JSON object: {shown(text[at:])}")
    return block


CODE_TOOLS = frozenset({"PythonInterpreter", "execute_code"})
"""Tools whose ``code`` argument may follow the JSON, unescaped inside ``<code>…</code>``."""

_CODE_OPEN = "<code>"
# End at a </code> that a tag or the end of the text follows: the code itself may hold one.
_CODE = re.compile(r"<code>\n?(.*?)\n?</code>(?=\s*(?:</tool_call>|<tool_call>|$))", re.DOTALL)


@tool_call_parser("hermes")
class HermesParser(MarkedParser):
    """Tool calls between ``<tool_call>`` tags, anywhere: one or several JSON objects in each pair."""

    opens = ("<tool_call>",)
    close = "</tool_call>"

    def read(self, text: str, at: int, tools: Tools) -> Block:
        block = read_json_calls(text, at)
        start = skip_space(text, block.end)
        if not block.calls or not text.startswith(_CODE_OPEN, start):
            return block
        code = _CODE.match(text, start)
        if code is None:
            raise CallSyntaxError(f"{_CODE_OPEN} is not closed by </code>: {shown(text[start:])}")
        last = block.calls[-1]
        if last.name not in CODE_TOOLS:
            raise CallSyntaxError(f"<code> is only for {', '.join(sorted(CODE_TOOLS))}, not for {last.name}")
        block.calls[-1] = ToolCall(last.name, {**last.arguments, "code": code.group(1)})
        block.end = code.end()
        return block


_MISTRAL_HEAD = re.compile(
    r"\s*+([^\[\]{}\s]++)\s*+(?:\[CALL_ID\]\s*+[^\[\]{}\s]*+\s*+)?(?:\[ARGS\]\s*+)?(?=\{)"
)


@tool_call_parser("mistral")
class MistralParser(MarkedParser):
    """Tool calls in the old and the new format, recognized behind each marker; text behind is content."""

    opens = ("[TOOL_CALLS]",)

    def read(self, text: str, at: int, tools: Tools) -> Block:
        start = skip_space(text, at)
        if text.startswith(("[{", "[ {", "[\n", "{"), start) or re.match(
            r"\[\s*[\[{\"\d]", text[start : start + 8]
        ):
            return read_json_calls(text, start)
        named = _MISTRAL_HEAD.match(text, at)
        if named is None:
            inside = text[at:].partition(self.opens[0])[0]
            raise CallSyntaxError(f"the tool call has no arguments: {shown(inside)}")
        name = named.group(1)
        value, end = decode_json(text, named.end())
        return Block(end, [ToolCall(name, arguments_of(value, name))])


_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

# Bound the name: without a limit, heads that end in no call take quadratic time.
_DEEPSEEK_NAME = r"\s*+([^\s<`][^\n<`]{0,255})"
_DEEPSEEK_HEAD = re.compile(
    rf"\s*+{_CALL}(?:function{_SEPARATOR}{_DEEPSEEK_NAME}\s{{0,32}}+```json|{_DEEPSEEK_NAME}{_SEPARATOR})"
)
_DEEPSEEK_TAIL = re.compile(rf"\s*+(?:```\s*+)?(?:{_CALL_END}|(?=<｜tool▁calls▁end｜>)|$)")


@tool_call_parser("deepseek_v3", "deepseek_v31")
class DeepSeekParser(MarkedParser):
    """Calls between ``<｜tool▁calls▁begin｜>`` and its end, recognized one by one in either format."""

    opens: tuple[str, ...] = ("<｜tool▁calls▁begin｜>",)
    close = "<｜tool▁calls▁end｜>"

    def read(self, text: str, at: int, tools: Tools) -> Block:
        block = Block(at)
        while (head := _DEEPSEEK_HEAD.match(text, block.end)) is not None:
            name = (head.group(1) or head.group(2)).strip()
            value, end = decode_json(text, head.end())
            tail = _DEEPSEEK_TAIL.match(text, end)
            if tail is None:
                raise CallSyntaxError(f"{name}: text behind the arguments: {shown(text[end:])}")
            block.calls.append(ToolCall(name, arguments_of(value, name)))
            block.end = tail.end()
        if not block.calls:
            raise CallSyntaxError(f"no tool call behind {self.opens[0]}: {shown(text[at:])}")
        return block


@tool_call_parser("deepseek_r1")
class DeepSeekR1Parser(DeepSeekParser):
    """DeepSeek V3's calls with or without the marks around them.

    The chat template of the distilled R1 models writes the opening mark only once in a conversation.
    """

    opens = (*DeepSeekParser.opens, _CALL)

    def behind_open(self, text: str, start: int) -> int:
        return start if text.startswith(_CALL, start) else super().behind_open(text, start)


_KIMI_END = "<|tool_call_end|>"
_KIMI_HEAD = re.compile(r"\s*<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>", re.DOTALL)
_KIMI_ID = re.compile(r"(?:functions\.)?(.+):\d+")


@tool_call_parser("kimi_k2")
class KimiParser(MarkedParser):
    """Calls between ``<|tool_calls_section_begin|>`` and its end."""

    opens = ("<|tool_calls_section_begin|>",)
    close = "<|tool_calls_section_end|>"

    def read(self, text: str, at: int, tools: Tools) -> Block:
        """Return the calls of one section; a malformed one does not hide those behind it."""
        block = Block(at)
        while (head := _KIMI_HEAD.match(text, block.end)) is not None:
            try:
                value, end = decode_json(text, head.end())
                name = _kimi_name(head.group(1).strip(), value, tools)
                block.calls.append(ToolCall(name, arguments_of(value, "the call")))
            except CallSyntaxError as problem:
                block.error = block.error or str(problem)
                end = head.end()
            close = text.find(_KIMI_END, end)
            block.end = len(text) if close < 0 else close + len(_KIMI_END)
        if block.end == at:
            raise CallSyntaxError(f"no tool call behind {self.opens[0]}: {shown(text[at:])}")
        return block


def _kimi_name(call_id: str, arguments: Any, tools: Tools) -> str:
    """Return the name in an id; a bare number is the only tool, or the only one with these arguments."""
    if (found := _KIMI_ID.fullmatch(call_id)) is not None:
        return found.group(1).strip()
    if call_id.isdigit():
        names = tool_names(tools)
        if len(names) > 1 and isinstance(arguments, dict):
            names = [name for name in names if arguments.keys() <= (property_names(name, tools) or set())]
        if len(names) == 1:
            return names[0]
    raise CallSyntaxError(f"the tool call's id is not functions.NAME:NUMBER: {shown(call_id)}")


@tool_call_parser("internlm")
class InternLMParser(MarkedParser):
    """``<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>``."""

    opens = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    close = "<|action_end|>"


@tool_call_parser("hunyuan", "hunyuan_a13b", "jamba")
class HunyuanParser(MarkedParser):
    """``<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>``."""

    opens = ("<tool_calls>",)
    close = "</tool_calls>"


@tool_call_parser("granite")
class GraniteParser(MarkedParser):
    """``<|tool_call|> [{"name": …, "arguments": {…}}, …]``; Granite 3.1 writes ``<tool_call>``."""

    opens = ("<|tool_call|>", "<tool_call>")


@tool_call_parser("phi4_mini", "phi4_mini_json")
class PhiParser(MarkedParser):
    """``functools[{"name": …, "arguments": {…}}, …]``."""

    opens = ("functools[",)

    def behind_open(self, text: str, start: int) -> int:
        return start + len(self.opens[0]) - 1  # the list's bracket


@tool_call_parser("nemotron", "nemotron_json")
class NemotronParser(MarkedParser):
    """``<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>``."""

    opens = ("<TOOLCALL>",)
    close = "</TOOLCALL>"


@tool_call_parser("gigachat3")
class GigaChatParser(MarkedParser):
    """``<|message_sep|>\\n\\nfunction call<|role_sep|>\\n{"name": …, "arguments": {…}}``."""

    opens = ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n")
