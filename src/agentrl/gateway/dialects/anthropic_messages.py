"""Speak Anthropic Messages, streaming and not, with ``count_tokens``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.chat_format import Delta, Message
from agentrl.documents.images import appended, joined
from agentrl.documents.task_json import kind_of
from agentrl.gateway.dialects.fields import (
    Fields,
    MessageList,
    Object,
    Stops,
    Tokens,
    choose,
    named_event,
    refuse,
    refuse_media,
    schema_of,
    short,
    source_part,
    warn_ignored,
)
from agentrl.gateway.request import Answer, GatewayError, GatewayRequest, Kind, invalid
from agentrl.tools.tool import Schema

_TYPES: dict[Kind, str] = {
    "invalid": "invalid_request_error", "too_large": "request_too_large", "limit": "permission_error",
    "authentication": "authentication_error", "not_found": "not_found_error", "timeout": "timeout_error",
    "unavailable": "overloaded_error", "internal": "api_error",
}  # fmt: skip
_STOP_REASONS = {
    "stop": "end_turn", "stop_sequence": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use",
}  # fmt: skip
_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "named"}
_KNOWN = frozenset({
    "model", "messages", "system", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k",
    "stop_sequences", "stream", "output_config", "output_format", "mcp_servers", "container", "metadata",
})  # fmt: skip
"""Fields that are used or refused, and ``metadata``, which names the caller: none of them is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields(Fields):
    messages: MessageList
    max_tokens: Tokens | None = None
    top_k: Tokens | None = None
    stop_sequences: Stops | None = None
    tool_choice: Object | None = None
    output_config: Object | None = None


class Messages:
    """``POST /v1/messages``."""

    name = "messages"

    def parse(self, body: Mapping[str, Any]) -> GatewayRequest:
        refuse(body, "mcp_servers", "the gateway calls no tools; give them as tools", [])
        refuse(body, "container", "the gateway runs no code")
        warn_ignored(body, self.name, _KNOWN)
        fields = _Fields.of(body)
        choice, output = fields.tool_choice or {"type": "auto"}, fields.output_config or {}
        warn_ignored(output, f"{self.name} output_config", frozenset({"format"}))
        kind = choice.get("type")
        system = _text(body.get("system"), "system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for index, item in enumerate(fields.messages):
            messages += _messages(item, f"messages[{index}]")
        request = GatewayRequest(
            model=fields.model,
            messages=messages,
            tools=_tools(fields.tools or ()),
            changes=fields.changes("temperature", "top_p", "top_k"),
            max_tokens=fields.max_tokens,
            stop=fields.stop_sequences or (),
            stream=bool(fields.stream),
            one_call=choice.get("disable_parallel_tool_use") is True,
            schema=schema_of(output.get("format") or body.get("output_format"), "output_config"),
        )
        return choose(request, _CHOICES.get(str(kind), short(kind)), choice.get("name"))

    def answer(self, answer: Answer) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        if answer.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content or not answer.tool_calls:
            blocks.append({"type": "text", "text": answer.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            for call in answer.tool_calls
        ]
        return {
            "id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model,
            "content": blocks, "stop_reason": _STOP_REASONS[answer.finish_reason],
            "stop_sequence": answer.stop_sequence, "usage": _usage(answer),
        }  # fmt: skip

    def stream(self, request: GatewayRequest) -> _Stream:
        return _Stream(request)

    def error(self, error: GatewayError) -> dict[str, Any]:
        text = error.text
        if error.code == "context_length_exceeded":
            text = f"prompt is too long: {text}"  # the words by which clients know that they must compact
        return {"type": "error", "error": {"type": _TYPES[error.kind], "message": text, "code": error.code}}

    def error_event(self, error: GatewayError) -> bytes:
        return named_event(self.error(error))


class _Stream:
    """The events of one answer: blocks of thinking, text and tool calls, one after the other."""

    def __init__(self, request: GatewayRequest) -> None:
        self._request = request
        self._open: str | None = None
        self._blocks = 0

    def begin(self, answer_id: str, created: int, prompt_tokens: int) -> Iterator[bytes]:
        message: dict[str, Any] = {
            "id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": self._request.model,
            "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }  # fmt: skip
        yield named_event({"type": "message_start", "message": message})

    def delta(self, delta: Delta) -> Iterator[bytes]:
        if delta.kind == "reasoning":
            yield from self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._piece({"type": "thinking_delta", "thinking": delta.text})
        else:
            yield from self._block("text", {"type": "text", "text": ""})
            yield self._piece({"type": "text_delta", "text": delta.text})

    def end(self, answer: Answer) -> Iterator[bytes]:
        if not self._blocks and not answer.tool_calls:
            yield from self._block("text", {"type": "text", "text": ""})
        for call in answer.tool_calls:
            yield from self._block(
                call.id, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            )
            yield self._piece({"type": "input_json_delta", "partial_json": call.arguments})
        yield from self._close()
        delta = {
            "stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": answer.stop_sequence,
        }  # fmt: skip
        yield named_event({"type": "message_delta", "delta": delta, "usage": _usage(answer)})
        yield named_event({"type": "message_stop"})

    def _block(self, name: str, start: Mapping[str, Any]) -> Iterator[bytes]:
        """Open a block, unless it is open; close the one before."""
        if self._open == name:
            return
        yield from self._close()
        self._open = name
        yield named_event({"type": "content_block_start", "index": self._blocks, "content_block": start})

    def _piece(self, delta: Mapping[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield named_event({"type": "content_block_stop", "index": self._blocks})
            self._blocks += 1
            self._open = None


def _messages(item: Any, where: str) -> list[Message]:
    """Return one message of a request as chat messages: each tool result becomes one of its own."""
    role = item.get("role") if isinstance(item, dict) else None
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role is {short(role)}; use user or assistant", f"{where}.role")
    content = item.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise invalid(f"{where}.content is {kind_of(content)}; it must be text or a list of blocks", where)
    return [_assistant(blocks, where)] if role == "assistant" else _others(role, blocks, where)


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        here = f"{where}.content[{index}]"
        match block.get("type"):
            case "text":
                texts.append(_string(block.get("text"), f"{here}.text"))
            case "thinking":
                thoughts.append(_string(block.get("thinking"), f"{here}.thinking"))
            case "redacted_thinking":
                continue
            case "tool_use":
                arguments = block.get("input") or {}
                if not isinstance(arguments, dict):
                    raise invalid(f"{here}.input is {kind_of(arguments)}; it must be an object", here)
                function = {"name": _string(block.get("name"), f"{here}.name"), "arguments": arguments}
                calls.append({"id": str(block.get("id") or ""), "type": "function", "function": function})
            case other:
                raise refuse_media(other, here)
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n\n".join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = calls
    return message


def _others(role: str, blocks: list[dict[str, Any]], where: str) -> list[Message]:
    converted: list[Message] = []
    for index, block in enumerate(blocks):
        here = f"{where}.content[{index}]"
        if block.get("type") == "tool_result":
            text = _text(block.get("content"), f"{here}.content")
            call_id = str(block.get("tool_use_id") or "")
            converted.append({"role": "tool", "content": text, "tool_call_id": call_id})
            continue
        text = _text([block], here)
        if converted and converted[-1]["role"] == role:
            converted[-1]["content"] = appended(converted[-1]["content"], text, "\n\n")
        else:
            converted.append({"role": role, "content": text})
    return converted or [{"role": role, "content": ""}]


def _text(value: Any, where: str) -> Any:
    """Return the text of content, which is text or a list of blocks; its parts if there are images."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid(f"{where} is {kind_of(value)}; it must be text or a list of blocks", where)
    texts: list[str | dict[str, Any]] = []
    for block in value:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "image":
            texts.append(source_part(block.get("source"), where))
            continue
        if kind != "text":
            raise refuse_media(kind, where)
        texts.append(_string(block.get("text"), f"{where}.text"))
    return joined(texts, "\n\n")


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise invalid(f"{where} is {kind_of(value)}; it must be text", where)
    return value


def _tools(given: Sequence[Any]) -> list[Schema]:
    tools: list[Schema] = []
    for index, item in enumerate(given):
        where = f"tools[{index}]"
        kind = item.get("type") if isinstance(item, dict) else "text"
        if kind not in (None, "custom"):
            raise invalid(f"{where} has the type {short(kind)}; only custom tools are supported", where)
        function = {
            "name": _string(item.get("name"), f"{where}.name"),
            "description": item.get("description") or "",
            "parameters": item.get("input_schema") or {"type": "object", "properties": {}},
        }
        tools.append({"type": "function", "function": function})
    return tools


def _usage(answer: Answer) -> dict[str, int]:
    cached = min(answer.cached_tokens, answer.prompt_tokens)
    return {
        "input_tokens": answer.prompt_tokens - cached, "output_tokens": answer.generated_tokens,
        "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
    }  # fmt: skip
