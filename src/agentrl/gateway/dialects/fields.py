"""Read the fields of requests, the same in all dialects: limits, sampling parameters, tools, content."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Self, TypeVar

import orjson
from pydantic import BeforeValidator, Field, PlainValidator

from agentrl.base.validation import Number, Switch, Text, Whole, check, wrong
from agentrl.chat.parsers.arguments import validator_of
from agentrl.documents.images import Part, joined
from agentrl.documents.sampling import COLDEST
from agentrl.documents.task_json import kind_of
from agentrl.errors import dotted
from agentrl.gateway.request import GatewayError, GatewayRequest, invalid
from agentrl.tools.tool import schema_name

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TOOLS = 512
MAX_MESSAGES = 10_000
MAX_STOPS = 16
_MAX_WARNINGS = 64
_LONGEST = 200
"""Most characters of a place that an error's ``param`` has: a client may choose the keys of a mapping."""
_warned: set[tuple[str, str]] = set()
"""(dialect, field) of the warnings that this process has logged."""
_COLD = ("any", "temperature")


def load_body(body: bytes) -> dict[str, Any]:
    """Decode the body of a request. Raises GatewayError unless it is a JSON object."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = _load_tolerantly(body)
    if not isinstance(value, dict):
        raise invalid(f"the body must be a JSON object, not {kind_of(value)}", code="invalid_json")
    return value


def _load_tolerantly(body: bytes) -> Any:
    """Decode JSON that only the standard library reads, such as a lone surrogate in a text."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from error


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _stops(value: Any) -> Any:
    # Before the texts are read: pydantic would list what is wrong with each of a million.
    if isinstance(value, list) and len(value) > MAX_STOPS:
        raise wrong(f"a list of at most {MAX_STOPS}")
    return _listed(value)


def _object(value: Any) -> Mapping[str, Any]:
    # PHP writes an empty object as [], and other clients an empty field as "" or false.
    if value and not isinstance(value, dict):
        raise wrong("a mapping")
    return value or {}


Share = Annotated[Number, Field(ge=0.0, le=1.0)]
Penalty = Annotated[Number, Field(ge=-2.0, le=2.0)]
Tokens = Annotated[Whole, Field(ge=1, le=2**31 - 1)]
Stop = Annotated[str, Field(min_length=1)]
"""Not ``Text``: a line end is a stop sequence too."""
Stops = Annotated[tuple[Stop, ...], BeforeValidator(_stops)]
MessageList = Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES)]
Object = Annotated[Mapping[str, Any], PlainValidator(_object)]
"""An object whose items are read elsewhere; what is empty is an empty one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields that a request has in every dialect; null is as good as none."""

    model: Text
    stream: Switch | None = None
    temperature: Annotated[Number, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[Number, Field(ge=1e-6, le=1.0)] | None = None
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)] | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return the fields of a body; it may hold others. Raises GatewayError."""
        # Leave the others out: pydantic cannot read a key that UTF-8 cannot hold.
        return checked(cls, {item.name: body[item.name] for item in fields(cls) if item.name in body})

    def changes(self, *names: str) -> dict[str, Any]:
        """Return the sampling parameters among ``names`` that are given.

        A temperature at which nothing can be trained is logged once a process.
        """
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if found.get("temperature", 1.0) < COLDEST and _COLD not in _warned:
            _warned.add(_COLD)
            logger.warning(
                "a client asks for a temperature at which no answer can be trained; let it leave the field"
                " out",
                extra={"temperature": found["temperature"], "at_least": COLDEST},
            )
        return found


def checked(kind: type[T], given: Any) -> T:
    """Return a request, or a part of it, as the dataclass ``kind``. Raises GatewayError."""
    return check(kind, given, lambda problem: invalid(str(problem), dotted(problem.place)[:_LONGEST] or None))


def arguments_of(value: Any, where: str) -> dict[str, Any]:
    """Return the arguments of a tool call in the history as an object; text is decoded as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise invalid(f"{where} is not JSON: {short(value)}", where) from error
    if value is not None and not isinstance(value, dict):
        raise invalid(f"{where} is {kind_of(value)}; it must be an object", where)
    return value or {}


def choose(request: GatewayRequest, choice: str | None, name: str | None = None) -> GatewayRequest:
    """Return the request with its tool choice: auto, none, required, or ``named`` for the tool ``name``.

    With ``none`` no tools are shown, and calls are not answered.
    """
    if choice == "none":
        return replace(request, tools=[], no_calls=True)
    if choice in (None, "auto"):
        return request
    offered = tuple(schema_name(tool) for tool in request.tools)
    if choice not in ("required", "named"):
        what = f"tool_choice {short(choice)} is not supported: use auto, none, required or a function"
        raise invalid(what, "tool_choice", code="unsupported_parameter")
    if not offered or (choice == "named" and name not in offered):
        tools = ", ".join(offered) or "none"
        raise invalid(f"tool_choice is {short(name or choice)}, and the tools are: {tools}", "tool_choice")
    return replace(request, must_call=offered if name is None else (name,))


def schema_of(value: Any, where: str) -> Mapping[str, Any] | None:
    """Return the JSON schema that ``{"type": "json_schema", …}`` asks for; None for text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    held = value.get("json_schema", value) if kind == "json_schema" else None
    schema = held.get("schema") if isinstance(held, dict) else None
    if not isinstance(schema, dict):
        what = f"{where} is {short(value)}; it must be text, json_object or json_schema with a schema"
        raise invalid(what, where, code="unsupported_parameter")
    try:
        validator_of(schema)
    except ValueError as error:
        raise invalid(f"{where} has a schema that is not valid: {error}", where) from error
    return schema


def warn_ignored(body: Mapping[str, Any], dialect: str, known: frozenset[str]) -> None:
    """Log once a process each field of ``body`` that has no effect here."""
    for name, value in body.items():
        if name in known or value is None or (dialect, name) in _warned or len(_warned) >= _MAX_WARNINGS:
            continue
        _warned.add((dialect, name))
        logger.warning("a field of a request has no effect", extra={"api": dialect, "field": short(name)})


def refuse(body: Mapping[str, Any], name: str, why: str, *allowed: Any) -> None:
    """Raise GatewayError if ``name`` is given and is not one of ``allowed``."""
    value = body.get(name)
    if value is not None and value not in allowed:
        raise invalid(f"{name} {short(value)} is not supported: {why}", name, code="unsupported_parameter")


def refuse_media(kind: Any, where: str) -> GatewayError:
    """Return the error for content other than text."""
    return invalid(
        f"{where} has content of type {short(kind)}, and the model of this run reads text only",
        where,
        code="unsupported_content",
    )


def require_model(request: GatewayRequest, models: Sequence[str]) -> None:
    """Raise GatewayError unless the request names the policy; ``models`` may be patterns, as ``claude-*``."""
    if not any(fnmatchcase(request.model, pattern) for pattern in models):
        raise GatewayError(
            "not_found",
            f"the model {short(request.model)} does not exist",
            code="model_not_found",
            param="model",
            hint=f"the policy is called {' or '.join(models)}",
        )


def short(value: Any) -> str:
    """Return a value for an error message, on one line."""
    try:
        text = json.dumps(value, ensure_ascii=True, default=str)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 60 else f"{text[:60]}…"


def named_event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event that is named by its ``type``."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


def image_part(value: Any, where: str) -> Part:
    """Return the part of an OpenAI image: a URL, or an object with one. Raises GatewayError."""
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise invalid(f"{where}.image_url is {kind_of(value)}; it must be a data: URL", where)
    return {"type": "image", "url": url, "where": where}


def content_of(content: Any, where: str, *, texts: Collection[str], image: str) -> Any:
    """Return the text of OpenAI's content, or its parts if there are images among them.

    ``texts`` and ``image`` are the types of parts with a text and with an image. Raises GatewayError.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(f"{where} is {kind_of(content)}; it must be text or a list of parts", where)
    pieces: list[str | Part] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == image:
            pieces.append(image_part(part.get("image_url"), f"{where}[{index}]"))
            continue
        if kind not in texts:
            raise refuse_media(kind, f"{where}[{index}]")
        text = part.get("text") or part.get("refusal") or ""
        if not isinstance(text, str):
            raise invalid(f"{where}[{index}].text is {kind_of(text)}; it must be text", where)
        pieces.append(text)
    return joined(pieces)


def source_part(source: Any, where: str) -> Part:
    """Return the part of an Anthropic image source. Raises GatewayError for other kinds than base64."""
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return image_part(source.get("url"), where)
    if kind != "base64" or not isinstance(source.get("data"), str):
        raise invalid(f"{where}.source has the type {short(kind)}; send the bytes as base64", where)
    media_type = str(source.get("media_type") or "image/png")
    return {"type": "image", "url": f"data:{media_type};base64,{source['data']}", "where": where}
