"""Validate a tool call against the schemas of the tools offered; errors are texts for the model."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.base import ToolCall

_UNTYPED = ("integer", "number", "boolean", "object", "array", "null")


def validate_call(call: ToolCall, schemas: Sequence[Mapping[str, Any]]) -> str | None:
    """Return None if ``call`` matches one of the function ``schemas``, else what is wrong with it.

    Arguments of a tool with an invalid schema are not validated.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError, UnknownType, best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    parameters = _parameters(call.name, schemas)
    if parameters is None:
        return _unknown_tool(call.name, schemas)
    try:
        Draft202012Validator.check_schema(parameters)
        checker = Draft202012Validator(parameters, registry=Registry())
        error = best_match(checker.iter_errors(call.arguments))
    except (SchemaError, UnknownType, Unresolvable, re.error):
        return None
    if error is None:
        return None
    where = ".".join(str(part) for part in error.absolute_path)
    expected = ", ".join(_signature(parameters)) or "none"
    at = f"argument {where}: " if where else ""
    return f"{call.name}: {at}{error.message}. Arguments: {expected}."


def typed_call(call: ToolCall, schemas: Sequence[Mapping[str, Any]]) -> ToolCall:
    """Return ``call`` with text values decoded if the schema has a type other than text."""
    parameters = _parameters(call.name, schemas)
    if call.typed or parameters is None:
        return call
    properties = parameters.get("properties", {})
    return ToolCall(
        call.name, {key: _decoded(value, properties.get(key, {})) for key, value in call.arguments.items()}
    )


def _parameters(name: str, schemas: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    for schema in schemas:
        function = schema.get("function", schema)
        if function.get("name") == name:
            return function.get("parameters") or {}
    return None


def _unknown_tool(name: str, schemas: Sequence[Mapping[str, Any]]) -> str:
    names = [str(schema.get("function", schema).get("name")) for schema in schemas]
    if not names:
        return f"there is no tool named {name!r}; no tools are offered"
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"there is no tool named {name!r}; {hint}The tools are: {', '.join(names)}"


def _signature(parameters: Mapping[str, Any]) -> list[str]:
    required = parameters.get("required", ())
    rows = []
    for name, spec in parameters.get("properties", {}).items():
        kind = spec.get("type", "any") if isinstance(spec, Mapping) else "any"
        rows.append(f"{name}{'' if name in required else '?'} ({kind})")
    return rows


def _decoded(value: Any, spec: Any) -> Any:
    kinds = spec.get("type") if isinstance(spec, Mapping) else None
    wanted = kinds if isinstance(kinds, list) else [kinds]
    if not isinstance(value, str) or not any(kind in _UNTYPED for kind in wanted):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        lowered = value.strip().lower()
        return {"true": True, "false": False}.get(lowered, value)
