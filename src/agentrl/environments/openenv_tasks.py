"""Read the address of an OpenEnv server: its options, its action schema, and how text becomes an action."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrl.documents.base import excerpt
from agentrl.environments.openenv_session import Json, headers
from agentrl.environments.server_address import count, get_json
from agentrl.errors import TaskEnvironmentError, TaskFileError
from agentrl.tools.base import Schema, function_schema

NAME = "openenv"
OPTIONS = (
    "url", "action", "action_field", "observation_field", "reward", "query", "reset", "max_sessions",
    "max_turns", "system_prompt",
)  # fmt: skip
FIRST = "{observation}"
"""The place of the first observation in ``query``."""
_EXAMPLE = f"env:{NAME}?url=http://127.0.0.1:8000"
_SCALARS = ("string", "integer", "number", "boolean")
_CALL = {"tool_name", "arguments"}
"""The fields of the action that calls an MCP tool of the server."""
_EXCERPT = 200


def refuse(problem: str, hint: str | None = None) -> TaskFileError:
    """Return the error of an address that cannot be loaded."""
    return TaskFileError(f"env:{NAME}: {problem}", hint=hint or _EXAMPLE)


def action_schema(url: str) -> Json:
    """Return the JSON schema of the server's actions. Raises TaskFileError."""
    schema = get_json(f"{url}/schema", "an OpenEnv server", headers()).get("action")
    if not isinstance(schema, dict):
        raise refuse(f"{url}/schema has no schema of actions", "this is not an OpenEnv server")
    return schema


def settings(schema: Json, options: Mapping[str, str]) -> Json:
    """Return how the model acts, and what it sees, as ``Task.meta`` keeps it. Raises TaskFileError."""
    fields = {name: own for name, own in schema.get("properties", {}).items() if name != "metadata"}
    mode = _choice(options, "action", ("text", "tool", "mcp"), _mode(schema, fields, options))
    given: Json = {
        "action": mode,
        "observation_field": options.get("observation_field"),
        "reward": _choice(options, "reward", ("sum", "last"), "sum"),
        "reset": json.dumps(_parameters(options.get("reset", "{}"))),
        "max_sessions": count(options, "max_sessions", NAME),
        "shows_first": FIRST in options.get("query", FIRST),
    }
    if mode == "text":
        name = options.get("action_field") or _single(schema, fields)
        kind = fields.get(name or "", {}).get("type")
        if kind not in _SCALARS:
            raise refuse(
                f"action_field={name} is not text, a number or a boolean; the action has {', '.join(fields)}",
                "name another action_field, or give action=tool",
            )
        given |= {"field": name, "type": kind}
    elif mode == "tool":
        given["tools"] = json.dumps([_step_tool(schema, fields)])
    return given


def task_fields(options: Mapping[str, str]) -> Json:
    """Return the fields of every task that the options set."""
    turns, prompt = count(options, "max_turns", NAME), options.get("system_prompt")
    return {
        **({} if turns is None else {"max_turns": turns}),
        **({} if prompt is None else {"system_prompt": prompt}),
    }


def listed_tools(observation: Json) -> list[Schema]:
    """Return the tools in the answer to ``list_tools``. Raises TaskFileError for none."""
    found = observation.get("tools")
    tools = [tool for tool in found if isinstance(tool, dict)] if isinstance(found, list) else []
    if not tools:
        raise refuse(
            f"the server lists no tools: {excerpt(observation, _EXCERPT)}", "give action=tool or text"
        )
    return [
        function_schema(tool["name"], tool.get("description"), tool.get("input_schema")) for tool in tools
    ]


def action_value(text: str, kind: str) -> Any:
    """Return the model's message as a value of the JSON type ``kind``. Raises ValueError."""
    if kind == "string":
        return text
    value = json.loads(text)
    if isinstance(value, bool) != (kind == "boolean") or not isinstance(value, (int, float)):
        raise ValueError(f"{text.strip()!r} is not of type {kind}")
    return value


def observation_text(observation: Json, field: str | None) -> str:
    """Return what the model reads: a field, the only text among the fields, or all of them as JSON.

    Of a tool's result, it is the result. Raises TaskEnvironmentError if the field is missing.
    """
    if field is not None:
        if field not in observation:
            raise TaskEnvironmentError(
                f"the observation has no field {field!r}; it has {', '.join(observation) or 'none'}",
                hint="correct observation_field= and load the tasks again",
            )
        return _plain(observation[field])
    if "tool_name" in observation and "result" in observation:
        return _tool_result(observation["result"])
    shown = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
    texts = [value for value in shown.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else _plain(shown)


def _tool_result(result: Any) -> str:
    """Return the text of an MCP tool's result: its data, or the texts of its content."""
    if isinstance(result, dict) and result.get("data") is not None:
        return _plain(result["data"])
    content = result.get("content") if isinstance(result, dict) else None
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return _plain(result)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _mode(schema: Json, fields: Json, options: Mapping[str, str]) -> str:
    if not fields or fields.keys() >= _CALL:
        return "mcp"
    return "text" if "action_field" in options or _single(schema, fields) else "tool"


def _single(schema: Json, fields: Json) -> str | None:
    """Return the only field that an action must have if it is a text."""
    required = [name for name in schema.get("required", ()) if name in fields] or list(fields)
    is_text = len(required) == 1 and fields[required[0]].get("type") == "string"
    return required[0] if is_text else None


def _step_tool(schema: Json, fields: Json) -> Schema:
    parameters = {name: value for name, value in schema.items() if name not in ("title", "description")}
    parameters["properties"] = fields
    return function_schema("step", schema.get("description") or "Act in the environment.", parameters)


def _choice(options: Mapping[str, str], name: str, known: tuple[str, ...], default: str) -> str:
    chosen = options.get(name, default)
    if chosen not in known:
        raise refuse(f"{name}={chosen} is not one of {', '.join(known)}")
    return chosen


def _parameters(text: str) -> Json:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise refuse(f"reset={text} is not a JSON object", 'such as reset={"difficulty": "easy"}')
    return found
