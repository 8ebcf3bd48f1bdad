"""Find tool calls between marks, and parse the formats that write JSON there."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.chat.parsers.base import (
    MOST_FAILURES,
    CallSyntaxError,
    ParsedMessage,
    ToolCall,
    Tools,
    calls_of,
    decode_json,
    shown,
    skip_space,
)
from agentrl.chat.parsers.registry import tool_call_parser


@dataclass(slots=True)
class Block:
    """The calls behind one opening mark, the place where they end, and the first problem among them."""

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
        rest = text[at:]
        if self.close and self.close in rest:
            error = error or f"{self.close} without {self.opens[0]}: {shown(rest)}"
        return ParsedMessage(("".join(outside) + rest).strip(), tuple(calls), error)

    def find(self, text: str, at: int) -> int:
        """Return where the next opening mark starts; -1 without one."""
        return min((place for mark in self.opens if (place := text.find(mark, at)) >= 0), default=-1)

    def behind_open(self, text: str, start: int) -> int:
        """Return the place behind the opening mark at ``start``."""
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


def read_json_calls(text: str, at: int) -> Block:
    """Read JSON calls in a row: objects, or lists of them, with nothing but ``,`` and ``;`` in between.

    Stops at the first value behind a call that is not JSON.
    """
    block = Block(at)
    while True:
        start = skip_space(text, block.end, ",;" if block.end > at else "")
        if start == len(text) or text[start] not in "{[":
            break
        try:
            value, block.end = decode_json(text, start)
        except CallSyntaxError:
            if block.end == at:
                raise
            break
        calls, error = calls_of(value)
        block.calls += calls
        block.error = block.error or error
    if block.end == at:
        decode_json(text, at)
        raise CallSyntaxError(f"the tool call is not a JSON object: {shown(text[at:])}")
    return block


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
        """Return the place of the list's bracket."""
        return start + len(self.opens[0]) - 1


@tool_call_parser("nemotron", "nemotron_json")
class NemotronParser(MarkedParser):
    """``<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>``."""

    opens = ("<TOOLCALL>",)
    close = "</TOOLCALL>"


@tool_call_parser("gigachat3")
class GigaChatParser(MarkedParser):
    """``<|message_sep|>\\n\\nfunction call<|role_sep|>\\n{"name": …, "arguments": {…}}``."""

    opens = ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n")
