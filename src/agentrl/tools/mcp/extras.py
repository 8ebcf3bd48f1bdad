"""Offer a server's resources and prompts as tools, for models that can only call tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl.tools.base import Schema, function_schema
from agentrl.tools.mcp.content import render_item, render_resource

if TYPE_CHECKING:
    from mcp import Client

LIST_RESOURCES, READ_RESOURCE = "list_resources", "read_resource"
LIST_PROMPTS, GET_PROMPT = "list_prompts", "get_prompt"
_MAX_PAGES = 100


def resource_tools() -> list[Schema]:
    """Return the tools that list and read resources."""
    uri = {"type": "object", "properties": {"uri": {"type": "string"}}, "required": ["uri"]}
    return [
        function_schema(LIST_RESOURCES, "List the resources that read_resource can read.", None),
        function_schema(READ_RESOURCE, "Read the resource at a URI.", uri),
    ]


def prompt_tools() -> list[Schema]:
    """Return the tools that list and fill prompts."""
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    parameters = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "arguments": texts},
        "required": ["name"],
    }
    return [
        function_schema(GET_PROMPT, "Return a prompt with its arguments filled in.", parameters),
        function_schema(LIST_PROMPTS, "List the prompts and their arguments.", None),
    ]


async def call(client: Client, tool: str, arguments: Mapping[str, Any]) -> str:
    """Run one of these tools. Raises MCPError."""
    if tool == LIST_RESOURCES:
        return await _list_resources(client)
    if tool == READ_RESOURCE:
        read = await client.read_resource(str(arguments["uri"]))
        return "\n".join(render_resource(_raw(item)) for item in read.contents)
    if tool == LIST_PROMPTS:
        return await _list_prompts(client)
    texts = {str(name): str(value) for name, value in (arguments.get("arguments") or {}).items()}
    prompt = await client.get_prompt(str(arguments["name"]), texts)
    return "\n".join(f"{message.role}: {render_item(_raw(message.content))}" for message in prompt.messages)


async def _list_resources(client: Client) -> str:
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_resources(cursor=cursor)
        found += [_described(item, "uri", "name", "description", "mimeType") for item in page.resources]
        cursor = page.next_cursor
        if cursor is None:
            break
    templates = await client.list_resource_templates()
    found += [
        _described(item, "uriTemplate", "name", "description", "mimeType")
        for item in templates.resource_templates
    ]
    return json.dumps(found, ensure_ascii=False)


async def _list_prompts(client: Client) -> str:
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_prompts(cursor=cursor)
        found += [_described(item, "name", "description", "arguments") for item in page.prompts]
        cursor = page.next_cursor
        if cursor is None:
            break
    return json.dumps(found, ensure_ascii=False)


def _described(item: Any, *keys: str) -> dict[str, Any]:
    raw = _raw(item)
    return {key: raw[key] for key in keys if raw.get(key)}


def _raw(item: Any) -> dict[str, Any]:
    raw: dict[str, Any] = item.model_dump(mode="json", by_alias=True, exclude_none=True)
    return raw
