"""List a server's tools, again when they change; offer its resources and prompts as tools too."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.concurrency import background
from agentrl.tools.base import Schema, function_schema, schema_name
from agentrl.tools.mcp.content import render_item, render_resource
from agentrl.tools.specs import McpSpec

if TYPE_CHECKING:
    from mcp import Client


logger = logging.getLogger(__name__)

_MAX_PAGES = 100
_RELIST_SECONDS = 10.0
_SETTLE_SECONDS = 2.0
_LIST_RESOURCES, _READ_RESOURCE = "list_resources", "read_resource"
_LIST_PROMPTS, _GET_PROMPT = "list_prompts", "get_prompt"
_RESOURCE_TOOLS = (
    function_schema(_LIST_RESOURCES, "List the resources that read_resource can read.", None),
    function_schema(
        _READ_RESOURCE,
        "Read the resource at a URI.",
        {"type": "object", "properties": {"uri": {"type": "string"}}, "required": ["uri"]},
    ),
)
"""Tools of ours, for models that can only call tools."""
_PROMPT_TOOLS = (
    function_schema(
        _GET_PROMPT,
        "Return a prompt with its arguments filled in.",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "object", "additionalProperties": {"type": "string"}},
            },
            "required": ["name"],
        },
    ),
    function_schema(_LIST_PROMPTS, "List the prompts and their arguments.", None),
)


@dataclass(frozen=True, slots=True)
class Listed:
    """The tools of one listing."""

    schemas: tuple[Schema, ...]
    repeatable: frozenset[str]
    """Tools whose annotations say read-only or idempotent."""
    extras: frozenset[str]
    """Tools of ours that read resources and prompts."""


class Listing:
    """The tools of one connection, kept up to date."""

    def __init__(self, client: Client, listed: Listed, spec: McpSpec) -> None:
        self._client = client
        self.listed = listed
        self._spec = spec
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()

    def on_message(self, message: Any) -> None:
        """Record a notification that the tools changed."""
        from mcp_types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification):
            self._note()

    async def settled(self) -> None:
        """Wait, within a time limit, until the announced changes are listed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_SECONDS):
                await self._settled.wait()

    def watch(self) -> AbstractAsyncContextManager[None]:
        """List again after each change, until the block ends."""
        return background(self._relist(), self._subscribe())

    def _note(self) -> None:
        self._settled.clear()
        self._changed.set()

    async def _relist(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                async with asyncio.timeout(_RELIST_SECONDS):
                    self.listed = await list_tools(self._client, self._spec)
            except Exception as error:  # noqa: BLE001  any error of a foreign server
                logger.warning(
                    "the tools changed and cannot be listed; the earlier list stays",
                    extra={"server": self._spec.name, "why": type(error).__name__},
                )
            if not self._changed.is_set():
                self._settled.set()

    async def _subscribe(self) -> None:
        """Subscribe to changes where the protocol version needs it; older servers need no subscription."""
        from mcp.client.subscriptions import ListenNotSupportedError

        tools = self._client.server_capabilities.tools
        if tools is None or not tools.list_changed:
            return
        try:
            async with self._client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    self._note()
        except ListenNotSupportedError:
            return
        except Exception as error:  # noqa: BLE001  any error of a foreign server
            logger.debug("the subscription to tool changes ended: %r", error)


async def list_tools(client: Client, spec: McpSpec) -> Listed:
    """List the tools that ``spec`` offers, sorted by name, page by page."""
    by_name: dict[str, Schema] = {}
    repeatable: set[str] = set()
    async for tool in _pages(client.list_tools, "tools"):
        by_name[tool.name] = function_schema(tool.name, tool.description, tool.input_schema)
        hints = tool.annotations
        if hints is not None and (hints.read_only_hint or hints.idempotent_hint):
            repeatable.add(tool.name)
    can = client.server_capabilities
    own: tuple[Schema, ...] = ()
    if spec.options.resources and can.resources is not None:
        own = _RESOURCE_TOOLS
    if spec.options.prompts and can.prompts is not None:
        own = (*own, *_PROMPT_TOOLS)
    own = tuple(schema for schema in own if schema_name(schema) not in by_name)
    offered = spec.options.offer
    schemas = [
        schema for schema in (*by_name.values(), *own) if offered is None or schema_name(schema) in offered
    ]
    names = frozenset(map(schema_name, own))
    return Listed(tuple(sorted(schemas, key=schema_name)), frozenset(repeatable) | names, names)


async def _pages(method: Callable[..., Awaitable[Any]], name: str) -> AsyncIterator[Any]:
    """Yield the items ``name`` of each page that a listing method returns."""
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await method(cursor=cursor)
        for item in getattr(page, name):
            yield item
        cursor = page.next_cursor
        if cursor is None:
            return


async def call_extra(client: Client, tool: str, arguments: Mapping[str, Any]) -> str:
    """Run one of the tools that read resources and prompts. Raises MCPError."""
    if tool == _LIST_RESOURCES:
        keys = ("name", "description", "mimeType")
        listed = [_shown(item, "uri", *keys) async for item in _pages(client.list_resources, "resources")]
        templates = await client.list_resource_templates()
        listed += [_shown(item, "uriTemplate", *keys) for item in templates.resource_templates]
        return json.dumps(listed, ensure_ascii=False)
    if tool == _READ_RESOURCE:
        read = await client.read_resource(str(arguments["uri"]))
        return "\n".join(render_resource(_raw(item)) for item in read.contents)
    if tool == _LIST_PROMPTS:
        keys = ("name", "description", "arguments")
        listed = [_shown(item, *keys) async for item in _pages(client.list_prompts, "prompts")]
        return json.dumps(listed, ensure_ascii=False)
    texts = {str(name): str(value) for name, value in (arguments.get("arguments") or {}).items()}
    prompt = await client.get_prompt(str(arguments["name"]), texts)
    return "\n".join(f"{message.role}: {render_item(_raw(message.content))}" for message in prompt.messages)


def _shown(item: Any, *keys: str) -> dict[str, Any]:
    raw = _raw(item)
    return {key: raw[key] for key in keys if raw.get(key)}


def _raw(item: Any) -> dict[str, Any]:
    raw: dict[str, Any] = item.model_dump(mode="json", by_alias=True, exclude_none=True)
    return raw
