"""Speak OpenAI Responses, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from agentrl.chat.chat_format import Delta, Message
from agentrl.documents.images import text_of
from agentrl.documents.task_json import kind_of
from agentrl.gateway.dialects.fields import (
    Fields,
    MessageList,
    Object,
    Tokens,
    arguments_of,
    choose,
    content_of,
    named_event,
    refuse,
    refuse_media,
    schema_of,
    short,
    warn_ignored,
)
from agentrl.gateway.dialects.openai_chat import ChatCompletions, function_tools, tool_choice
from agentrl.gateway.request import Answer, GatewayError, GatewayRequest, invalid
from agentrl.tools.tool import Schema

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_ROLES = {"developer": "system"}
_METADATA = 512
"""Characters of a value of an answer's metadata."""
_KNOWN = frozenset({
    "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "temperature",
    "top_p", "max_output_tokens", "stream", "stream_options", "previous_response_id", "background",
    "conversation", "top_logprobs", "prompt", "user", "metadata", "store", "safety_identifier",
    "prompt_cache_key", "include", "client_metadata",
})  # fmt: skip
"""Fields that are used or refused, and those that name the caller or its cache: none of them is ignored."""


def _listed(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields(Fields):
    input: Annotated[MessageList, BeforeValidator(_listed)]
    max_output_tokens: Tokens | None = None
    previous_response_id: str | None = None
    text: Object | None = None


class Responses(ChatCompletions):
    """``POST /v1/responses``; its errors are those of Chat Completions."""

    name = "responses"

    def parse(self, body: Mapping[str, Any]) -> GatewayRequest:
        refuse(body, "background", "answers are not queued", False)
        refuse(body, "conversation", "send the items, or previous_response_id")
        refuse(body, "top_logprobs", "only the logprob of the sampled token is known", 0)
        refuse(body, "prompt", "send input")
        warn_ignored(body, self.name, _KNOWN)
        fields = _Fields.of(body)
        text, previous = fields.text or {}, fields.previous_response_id
        warn_ignored(text, f"{self.name} text", frozenset({"format"}))
        instructions = body.get("instructions")
        messages: list[Message] = []
        if instructions:
            messages.append({"role": "system", "content": _text(instructions, "instructions")})
        tools, left_out = _tools(fields.tools or ())
        warn_ignored(dict.fromkeys(left_out, True), f"{self.name} tools", frozenset())
        request = GatewayRequest(
            model=fields.model,
            messages=[*messages, *_messages(fields.input)],
            tools=tools,
            changes=fields.changes("temperature", "top_p"),
            max_tokens=fields.max_output_tokens,
            stream=bool(fields.stream),
            one_call=body.get("parallel_tool_calls") is False,
            previous=None if previous is None else previous.rpartition("_")[2],
            schema=schema_of(text.get("format"), "text.format"),
            left_out=left_out,
        )
        return choose(request, *tool_choice(body.get("tool_choice")))

    def answer(self, answer: Answer) -> dict[str, Any]:
        return _response(answer, _items(answer))

    def stream(self, request: GatewayRequest) -> _Stream:  # type: ignore[override]
        return _Stream(request)

    def error_event(self, error: GatewayError) -> bytes:
        return named_event({
            "type": "error", "code": error.code, "message": error.text, "param": error.param,
            "sequence_number": 0,
        })  # fmt: skip


class _Stream:
    """The events of one answer: its items, one after the other."""

    def __init__(self, request: GatewayRequest) -> None:
        self._request = request
        self._id = ""
        self._number = 0
        self._index = 0
        self._open: str | None = None
        self._texts: dict[str, str] = {"reasoning": "", "content": ""}

    def begin(self, answer_id: str, created: int, prompt_tokens: int) -> Iterator[bytes]:
        self._id = answer_id
        started = {
            **_head(answer_id, created, self._request), "status": "in_progress", "output": [],
        }  # fmt: skip
        yield self._send("response.created", response=started)
        yield self._send("response.in_progress", response=started)

    def delta(self, delta: Delta) -> Iterator[bytes]:
        yield from self._begin_item(delta.kind)
        self._texts[delta.kind] += delta.text
        kind = "output_text" if delta.kind == "content" else "reasoning_text"
        item_id = _text_item(self._id, delta.kind, "")["id"]
        yield self._send(
            f"response.{kind}.delta", item_id=item_id, output_index=self._index,
            content_index=0, delta=delta.text, **({"logprobs": []} if kind == "output_text" else {}),
        )  # fmt: skip

    def end(self, answer: Answer) -> Iterator[bytes]:
        if not answer.tool_calls and not answer.content:
            yield from self._begin_item("content")
        yield from self._end_item()
        items = _items(answer)
        calls = [item for item in items if item["type"] == "function_call"]
        for call in calls:
            begun = {**call, "arguments": "", "status": "in_progress"}
            where = {"output_index": self._index, "item_id": call["id"]}
            yield self._send("response.output_item.added", output_index=self._index, item=begun)
            yield self._send("response.function_call_arguments.delta", **where, delta=call["arguments"])
            yield self._send(
                "response.function_call_arguments.done",
                **where,
                arguments=call["arguments"],
                name=call["name"],
            )
            yield self._send("response.output_item.done", output_index=self._index, item=call)
            self._index += 1
        whole = _response(answer, items)
        yield self._send(f"response.{whole['status']}", response=whole)

    def _begin_item(self, kind: str) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._end_item()
        self._open = kind
        item = {**_text_item(self._id, kind, ""), "content": [], "status": "in_progress"}
        yield self._send("response.output_item.added", output_index=self._index, item=item)
        yield self._send(
            "response.content_part.added", item_id=item["id"], output_index=self._index, content_index=0,
            part=_part(kind, ""),
        )  # fmt: skip

    def _end_item(self) -> Iterator[bytes]:
        kind = self._open
        if kind is None:
            return
        text = self._texts[kind]
        item = _text_item(self._id, kind, text)
        where = {"item_id": item["id"], "output_index": self._index, "content_index": 0}
        name = "output_text" if kind == "content" else "reasoning_text"
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
        yield self._send(f"response.{name}.done", **where, text=text, **logprobs)
        yield self._send("response.content_part.done", **where, part=_part(kind, text))
        yield self._send("response.output_item.done", output_index=self._index, item=item)
        self._open = None
        self._index += 1

    def _send(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(event)


def _head(answer_id: str, created: int, about: GatewayRequest | Answer) -> dict[str, Any]:
    left_out = {"tools_left_out": ", ".join(about.left_out)[:_METADATA]} if about.left_out else {}
    return {
        "id": f"resp_{answer_id}", "object": "response", "created_at": created, "model": about.model,
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": left_out, "error": None,
        "incomplete_details": None, "instructions": None, "temperature": None, "top_p": None,
    }  # fmt: skip


def _response(answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
    is_cut = answer.finish_reason == "length"
    return {
        **_head(answer.id, answer.created, answer),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items,
        "usage": {
            "input_tokens": answer.prompt_tokens, "output_tokens": answer.generated_tokens,
            "total_tokens": answer.prompt_tokens + answer.generated_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


def _items(answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        items.append(_text_item(answer.id, "reasoning", answer.reasoning))
    if answer.content or not answer.tool_calls:
        items.append(_text_item(answer.id, "content", answer.content))
    items += [
        {
            "id": f"fc_{answer.id}_{index}", "type": "function_call", "call_id": call.id, "name": call.name,
            "arguments": call.arguments, "status": "completed",
        }
        for index, call in enumerate(answer.tool_calls)
    ]  # fmt: skip
    return items


def _text_item(answer_id: str, kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {
            "id": f"rs_{answer_id}", "type": "reasoning", "summary": [], "content": [_part(kind, text)],
            "status": "completed",
        }  # fmt: skip
    return {
        "id": f"msg_{answer_id}", "type": "message", "role": "assistant", "status": "completed",
        "content": [_part(kind, text)],
    }  # fmt: skip


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _messages(items: Sequence[Any]) -> list[Message]:
    """Return the items of a request as chat messages: those of one answer become one message."""
    messages: list[Message] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise invalid(f"{where} is {kind_of(item)}; it must be an object", where)
        message = _message(item, where)
        last = messages[-1] if messages else None
        if last is not None and last["role"] == message["role"] == "assistant":
            _merge(last, message)
        else:
            messages.append(message)
    return messages


def _message(item: Mapping[str, Any], where: str) -> Message:
    match item.get("type", "message"):
        case "message":
            role = _ROLES.get(str(item.get("role")), item.get("role"))
            if role not in ("system", "user", "assistant"):
                raise invalid(f"{where}.role is {short(role)}; use system, user or assistant", where)
            content = _text(item.get("content"), f"{where}.content")
            if role == "assistant" and not isinstance(content, str):
                raise refuse_media("image", f"{where}.content")
            return {"role": role, "content": content}
        case "function_call":
            name = item.get("name")
            if not isinstance(name, str):
                raise invalid(f"{where}.name is {kind_of(name)}; it must be text", where)
            arguments = arguments_of(item.get("arguments"), f"{where}.arguments")
            function = {"name": name, "arguments": arguments}
            call = {"id": str(item.get("call_id") or ""), "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            text = _text(item.get("output"), f"{where}.output")
            return {"role": "tool", "content": text, "tool_call_id": str(item.get("call_id") or "")}
        case "reasoning":
            thought = text_of(_text(item.get("content"), f"{where}.content"))
            return {"role": "assistant", "content": "", "reasoning_content": thought}
        case other:
            raise refuse_media(other, where)


def _merge(message: Message, more: Message) -> None:
    """Add a further item of one answer to its message."""
    message["content"] += more["content"]
    if more.get("reasoning_content"):
        message["reasoning_content"] = message.get("reasoning_content", "") + more["reasoning_content"]
    if more.get("tool_calls"):
        message["tool_calls"] = [*message.get("tool_calls", ()), *more["tool_calls"]]


def _text(content: Any, where: str) -> Any:
    """Return the text of content, or its parts if there are images among them."""
    return content_of(content, where, texts=_TEXTS, image="input_image")


def _tools(value: Sequence[Any]) -> tuple[list[Schema], tuple[str, ...]]:
    """Return the function tools of a request, and what names the others; here fields stand beside the type.

    Tools of other types (web_search, namespace, custom, …) are run by OpenAI's server, or called in a form
    that no chat template has. Agents such as Codex send them unasked: the model is not shown them.
    """
    kinds = [item.get("type") if isinstance(item, dict) else None for item in value]
    others = [isinstance(kind, str) and kind != "function" for kind in kinds]
    left_out = (
        ":".join(filter(None, (kind, str(item.get("name") or ""))))
        for item, kind, other in zip(value, kinds, others, strict=True)
        if other
    )
    return function_tools([
        {"type": kind, "function": item} if isinstance(item, dict) else item
        for item, kind, other in zip(value, kinds, others, strict=True)
        if not other
    ]), tuple(left_out)  # fmt: skip
