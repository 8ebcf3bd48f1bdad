"""Convert arguments that a format writes as text to the types that the tool's schema gives."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any

from agentrl.chat.parsers.base import Tools

_UNTYPED = frozenset({"integer", "number", "boolean", "null", "object", "array"})
"""Types that an untyped value may have, besides text."""

_NULL = frozenset({"null", "none", "nil"})
_DEPTH = 16
"""Longest chain of ``$ref`` that is followed."""


def parameters_of(name: str, tools: Tools) -> Mapping[str, Any] | None:
    """Return the parameter schema of the tool ``name``; None for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return None


def convert_arguments(name: str, texts: Mapping[str, str], tools: Tools) -> dict[str, Any]:
    """Return the arguments of the tool ``name`` with each text converted by the tool's schema."""
    root = parameters_of(name, tools) or {}
    return {key: convert_text(text, _property(key, root), root) for key, text in texts.items()}


def convert_text(text: str, spec: Any, root: Mapping[str, Any] | None = None) -> Any:
    """Return the value that ``text`` stands for under the schema ``spec``; ``text`` itself if none fits.

    A value of an enumeration is that value. Else the first type wins, in the order null, integer, number,
    boolean, object, array, string; without any type a text that is JSON is decoded. ``root`` resolves
    ``$ref``.
    """
    choices, types = _choices_and_types(spec, root or {}, _DEPTH)
    for choice in choices:
        if text == choice or (not isinstance(choice, str) and text.strip() == _written(choice)):
            return choice
    if not types:
        return _untyped(text)
    for kind, convert in _CONVERSIONS.items():
        if kind in types:
            try:
                return convert(text.strip())
            except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                continue
    return text


def resolve(spec: Any, root: Mapping[str, Any]) -> Any:
    """Follow the local ``$ref`` of a schema; an unknown one resolves to an empty schema."""
    for _ in range(_DEPTH):
        reference = spec.get("$ref") if isinstance(spec, Mapping) else None
        if not isinstance(reference, str):
            return spec
        spec = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            spec = spec.get(key, {}) if isinstance(spec, Mapping) else {}
    return {}


def _property(key: str, root: Mapping[str, Any]) -> Any:
    schema = resolve(root, root)
    for part in _with_alternatives(schema, root, _DEPTH):
        properties = part.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
    extra = schema.get("additionalProperties") if isinstance(schema, Mapping) else None
    return extra if isinstance(extra, Mapping) else {}


def _with_alternatives(spec: Any, root: Mapping[str, Any], depth: int) -> list[Mapping[str, Any]]:
    """Return a schema and all its ``anyOf``, ``oneOf`` and ``allOf`` parts, references resolved."""
    found = resolve(spec, root)
    if not isinstance(found, Mapping) or depth == 0:
        return []
    parts = [found]
    for word in ("anyOf", "oneOf", "allOf"):
        inner = found.get(word)
        for item in inner if isinstance(inner, list) else ():
            parts += _with_alternatives(item, root, depth - 1)
    return parts


def _choices_and_types(spec: Any, root: Mapping[str, Any], depth: int) -> tuple[list[Any], set[str]]:
    choices: list[Any] = []
    types: set[str] = set()
    for part in _with_alternatives(spec, root, depth):
        if "const" in part:
            choices.append(part["const"])
        if isinstance(part.get("enum"), list):
            choices += part["enum"]
        kind = part.get("type")
        types.update(item for item in (kind if isinstance(kind, list) else [kind]) if isinstance(item, str))
        if kind is None and "properties" in part:
            types.add("object")
        if kind is None and "items" in part:
            types.add("array")
    if not types and choices:
        types = {_type_name(choice) for choice in choices}
    return choices, {_ALIASES.get(kind, kind) for kind in types}


def _untyped(text: str) -> Any:
    value = _json(text.strip(), text)
    return value if _type_name(value) in _UNTYPED else text


def _json(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return otherwise


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _null(text: str) -> None:
    if text.lower() not in _NULL:
        raise ValueError(text)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer():
            raise
        return int(value)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not math.isfinite(value):
            raise
        return value


def _boolean(text: str) -> bool:
    try:
        return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
    except KeyError as error:
        raise ValueError(text) from error


def _container(kind: type[Any], text: str) -> Any:
    """Decode JSON or a Python literal, also one that is quoted as a JSON string."""
    value = _json(text, text)
    if isinstance(value, str):
        value = _json(value, value)
    if isinstance(value, str):
        value = _json(value.replace('\\"', '"'), value) if '\\"' in value else value
    if isinstance(value, str):
        value = ast.literal_eval(value)
    if not isinstance(value, kind):
        raise ValueError(text)
    return value


_CONVERSIONS: dict[str, Any] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": lambda text: _container(dict, text),
    "array": lambda text: _container(list, text),
}

_ALIASES = {
    "int": "integer", "float": "number", "double": "number", "bool": "boolean", "dict": "object",
    "list": "array", "tuple": "array", "str": "string", "text": "string",
}  # fmt: skip
"""Type names of Python and others that tools write instead of those of JSON schema."""


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "string")


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
