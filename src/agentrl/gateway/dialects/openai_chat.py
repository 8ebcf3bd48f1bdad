"""Speak OpenAI Chat Completions, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import Field

from agentrl.base.validation import Switch, Whole
from agentrl.chat.chat_format import Delta, Message
from agentrl.documents.task_json import kind_of
from agentrl.gateway.dialects.fields import (
    Fields,
    MessageList,
    Penalty,
    Share,
    Stops,
    Tokens,
    arguments_of,
    choose,
    content_of,
    refuse,
    refuse_media,
    schema_of,
    short,
    warn_ignored,
)
from agentrl.gateway.request import STATUS, Answer, GatewayError, GatewayRequest, invalid
from agentrl.tools.tool import Schema

_TYPES = {
    "authentication": "authentication_error", "not_found": "invalid_request_error",
    "limit": "permission_error", "timeout": "timeout_error", "internal": "server_error",
    "unavailable": "server_error",
}  # fmt: skip
_ROLES = {"developer": "system", "function": "tool"}
_FINISH = {"stop_sequence": "stop"}
_KNOWN = frozenset({
    "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "temperature",
    "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop", "max_tokens",
    "max_completion_tokens", "stream", "stream_options", "logprobs", "top_logprobs", "n", "logit_bias",
    "audio", "modalities", "functions", "function_call", "web_search_options", "user", "metadata", "store",
    "safety_identifier", "prompt_cache_key",
})  # fmt: skip
"""Fields that are used or refused, and those that name the caller or its cache: none of them is ignored."""


_ONE_ANSWER = (
    "one answer for each request; send n requests, each with another header Idempotency-Key: equal requests"
    " without one are retries of one call, and get one answer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields(Fields):
    messages: MessageList
    max_completion_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    """The older name of ``max_completion_tokens``."""
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63)] | None = None
    stop: Stops | None = None
    logprobs: Switch | None = None


class ChatCompletions:
    """``POST /v1/chat/completions``."""

    name = "chat"

    def parse(self, body: Mapping[str, Any]) -> GatewayRequest:
        refuse(body, "n", _ONE_ANSWER, 1)
        refuse(body, "top_logprobs", "only the logprob of the sampled token is known", 0)
        refuse(body, "logit_bias", "it would change what is trained", {})
        refuse(body, "audio", "answers are text")
        refuse(body, "modalities", "answers are text", ["text"])
        refuse(body, "functions", "give tools")
        refuse(body, "web_search_options", "give a tool that searches")
        warn_ignored(body, self.name, _KNOWN)
        fields = _Fields.of(body)
        changes = fields.changes("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        if fields.seed is not None:
            changes["seed"] = fields.seed % 2**31
        options = body.get("stream_options")
        request = GatewayRequest(
            model=fields.model,
            messages=[_message(item, f"messages[{index}]") for index, item in enumerate(fields.messages)],
            tools=function_tools(fields.tools or ()),
            changes=changes,
            max_tokens=fields.max_completion_tokens or fields.max_tokens,
            stop=fields.stop or (),
            stream=bool(fields.stream),
            include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            logprobs=bool(fields.logprobs),
            one_call=body.get("parallel_tool_calls") is False,
            schema=schema_of(body.get("response_format"), "response_format"),
        )
        return choose(request, *tool_choice(body.get("tool_choice")))

    def answer(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.tool_calls
            ]
        else:
            message["content"] = answer.content
        choice = {
            "index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": _logprobs(answer),
        }  # fmt: skip
        return {
            "id": f"chatcmpl-{answer.id}", "object": "chat.completion", "created": answer.created,
            "model": answer.model, "choices": [choice], "usage": _usage(answer),
        }  # fmt: skip

    def stream(self, request: GatewayRequest) -> _Stream:
        return _Stream(request)

    def error(self, error: GatewayError) -> dict[str, Any]:
        kind = _TYPES.get(error.kind, "invalid_request_error")
        return {
            "error": {"message": error.text, "type": kind, "param": error.param, "code": error.code},
        }

    def error_event(self, error: GatewayError) -> bytes:
        return _event({**self.error(error), "status": STATUS[error.kind]})


class _Stream:
    """The chunks of one answer."""

    def __init__(self, request: GatewayRequest) -> None:
        self._request = request
        self._head: dict[str, Any] = {}

    def begin(self, answer_id: str, created: int, prompt_tokens: int) -> Iterator[bytes]:
        self._head = {
            "id": f"chatcmpl-{answer_id}", "object": "chat.completion.chunk", "created": created,
            "model": self._request.model,
        }  # fmt: skip
        yield self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> Iterator[bytes]:
        yield self._chunk({"content" if delta.kind == "content" else "reasoning_content": delta.text})

    def end(self, answer: Answer) -> Iterator[bytes]:
        for index, call in enumerate(answer.tool_calls):
            function = {"name": call.name, "arguments": call.arguments}
            entry = {"index": index, "id": call.id, "type": "function", "function": function}
            yield self._chunk({"tool_calls": [entry]})
        yield self._chunk({}, _finish(answer), _logprobs(answer))
        if self._request.include_usage:
            yield _event({**self._head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return _event({**self._head, "choices": [choice]})


def tool_choice(value: Any) -> tuple[str | None, str | None]:
    """Return a tool choice and, for ``named``, the tool's name."""
    if not isinstance(value, dict):
        return value, None
    function = value.get("function", value)
    name = function.get("name") if value.get("type") == "function" and isinstance(function, dict) else None
    return ("named", str(name)) if name else (short(value), None)


def function_tools(given: Sequence[Any]) -> list[Schema]:
    """Return the function tools of a request in OpenAI's form. Raises GatewayError for other tools."""
    tools: list[Schema] = []
    for index, item in enumerate(given):
        where = f"tools[{index}]"
        kind = item.get("type") if isinstance(item, dict) else None
        if kind != "function":
            raise invalid(f"{where} has the type {short(kind)}; only function tools are supported", where)
        function = item.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{where}.function needs a name", where)
        schema = {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        }
        tools.append({"type": "function", "function": schema})
    return tools


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise invalid(f"{where} is {kind_of(item)}; it must be an object", where)
    role = _ROLES.get(str(item.get("role")), item.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise invalid(f"{where}.role is {short(role)}; use system, user, assistant or tool", f"{where}.role")
    message: Message = {"role": role, "content": _text(item.get("content"), f"{where}.content")}
    if role == "assistant":
        if not isinstance(message["content"], str):
            raise refuse_media("image", f"{where}.content")
        calls = item.get("tool_calls") or []
        if calls:
            message["tool_calls"] = [
                _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
            ]
        thought = item.get("reasoning_content") or item.get("reasoning")
        if isinstance(thought, str) and thought:
            message["reasoning_content"] = thought
    if role == "tool":
        message["tool_call_id"] = str(item.get("tool_call_id") or "")
        if isinstance(item.get("name"), str):
            message["name"] = item["name"]
    return message


def _text(content: Any, where: str) -> Any:
    """Return the text of content, or its parts if there are images among them."""
    return content_of(content, where, texts=("text", "refusal"), image="image_url")


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise invalid(f"{where} must be an object with a function", where)
    name = function.get("name")
    if not isinstance(name, str):
        raise invalid(f"{where}.function.name is {kind_of(name)}; it must be text", where)
    arguments = arguments_of(function.get("arguments"), f"{where}.function.arguments")
    return {
        "id": str(call.get("id") or ""), "type": "function",
        "function": {"name": name, "arguments": arguments},
    }  # fmt: skip


def _finish(answer: Answer) -> str:
    return _FINISH.get(answer.finish_reason, answer.finish_reason)


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.generated_tokens,
        "total_tokens": answer.prompt_tokens + answer.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in answer.logprobs
    ]
    return {"content": content, "refusal": None}


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
