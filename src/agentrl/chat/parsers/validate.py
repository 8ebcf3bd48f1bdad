"""Validate a tool call against the schemas of the tools offered; errors are texts for the model."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from agentrl.chat.parsers.arguments import parameters_of
from agentrl.chat.parsers.base import ToolCall, Tools

Check = Callable[[Mapping[str, Any]], str | None]
"""Returns the problem of a call's arguments; None if they fit the schema."""


def validate_call(call: ToolCall, tools: Tools) -> str | None:
    """Return None if ``call`` matches one of the ``tools``, else the problem as text.

    Arguments of a tool with an invalid schema are not validated.
    """
    parameters = parameters_of(call.name, tools)
    if parameters is None:
        return _unknown_tool(call.name, tools)
    problem = _check(json.dumps(parameters, default=str))(call.arguments)
    if problem is None:
        return None
    expected = ", ".join(_signature(parameters)) or "none"
    return f"{call.name}: {problem}. Arguments: {expected}."


def load_validator() -> None:
    """Import what validation needs: it takes 50 ms, which the first tool calls would wait for."""
    _check("{}")


@lru_cache(maxsize=1024)
def _check(parameters: str) -> Check:
    """Return the check of a schema given as JSON. Compiling one takes half a millisecond, so it is cached."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError, UnknownType, best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema = json.loads(parameters)
    try:
        Draft202012Validator.check_schema(schema)
    except (SchemaError, re.error):
        return lambda arguments: None
    validator = Draft202012Validator(schema, registry=Registry())

    def check(arguments: Mapping[str, Any]) -> str | None:
        try:
            error = best_match(validator.iter_errors(arguments))
        except (UnknownType, Unresolvable, re.error):
            return None
        if error is None:
            return None
        where = ".".join(str(part) for part in error.absolute_path)
        return f"argument {where}: {error.message}" if where else str(error.message)

    return check


def _unknown_tool(name: str, tools: Tools) -> str:
    names = [str(tool.get("function", tool).get("name")) for tool in tools]
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
