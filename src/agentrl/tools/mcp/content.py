"""Render a tool's result as text for the model; describe content that is not text."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from agentrl.documents.images import Image
from agentrl.documents.read_image import MAX_IMAGE_BYTES, image_of_base64
from agentrl.errors import ImageError

_SHOWN = 300
MAX_IMAGES = 8
"""Images of one tool result that a model reads."""


def normalize_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return a raw JSON-RPC result that every SDK version accepts.

    A tool result becomes one text, which describes its images, and the images behind it. A tool list loses
    its output schemas, which the SDK would enforce by refusing results, and entries that are not tools. Other
    results are returned as they are.
    """
    if isinstance(result.get("tools"), list):
        return {**result, "tools": [_listed(tool) for tool in result["tools"] if _is_tool(tool)]}
    if "content" not in result and "structuredContent" not in result:
        return result
    kept = {key: value for key, value in result.items() if key not in ("structuredContent", "isError")}
    text = render_content(result.get("content"), result.get("structuredContent"))
    content = [{"type": "text", "text": text}, *_images(result.get("content"))]
    return {**kept, "content": content, "isError": result.get("isError") is True}


def _images(content: Any) -> list[dict[str, Any]]:
    """Return the image items of a result, at most ``MAX_IMAGES`` that are not too large."""
    items = content if isinstance(content, list) else []
    found = [
        {"type": "image", "data": item["data"], "mimeType": str(item.get("mimeType") or "image/png")}
        for item in items
        if isinstance(item, Mapping) and item.get("type") == "image" and isinstance(item.get("data"), str)
    ]
    return [item for item in found[:MAX_IMAGES] if len(item["data"]) <= MAX_IMAGE_BYTES * 4 // 3 + 4]


def images_in(items: Iterable[Any]) -> tuple[Image, ...]:
    """Return the images of a normalized result; what cannot be decoded stays a description."""
    images = []
    for item in items:
        if getattr(item, "type", None) == "image":
            with suppress(ImageError):
                images.append(image_of_base64(item.data))
    return tuple(images)


def render_content(content: Any, structured: Any = None) -> str:
    """Return the text of a tool result's content items and structured content."""
    items = content if isinstance(content, list) else [] if content is None else [content]
    parts = [render_item(item) for item in items]
    if structured is not None and not _is_said(structured, items):
        parts.append(_json(structured))
    return "\n".join(parts)


def render_item(item: Any) -> str:
    """Return the text of one content item; an item without text is described by type, size and address."""
    if not isinstance(item, Mapping):
        return item if isinstance(item, str) else _json(item)
    kind = item.get("type")
    if kind == "text" and isinstance(item.get("text"), str):
        return str(item["text"])
    if kind == "resource" and isinstance(item.get("resource"), Mapping):
        return render_resource(item["resource"])
    if kind == "resource_link":
        return _described("resource", item, name=item.get("name"), uri=item.get("uri"))
    if kind in ("image", "audio"):
        return _described(str(kind), item)
    return f"[content of unknown type {str(kind)[:80]!r}: {_json(dict(item))[:_SHOWN]}]"


def render_resource(resource: Mapping[str, Any]) -> str:
    """Return a resource's text, or a description of its bytes."""
    if isinstance(resource.get("text"), str):
        return str(resource["text"])
    return _described("resource", resource, uri=resource.get("uri"))


def _described(kind: str, item: Mapping[str, Any], **named: Any) -> str:
    """Return ``[image, image/png, 1,234 bytes]``."""
    parts = [kind, *(str(value) for value in named.values() if value)]
    parts.append(str(item.get("mimeType") or "unknown type"))
    data = item.get("data", item.get("blob"))
    if isinstance(data, str):
        parts.append(f"{_size(data):,} bytes; not shown")
    return f"[{', '.join(parts)}]"


def _size(data: str) -> int:
    try:
        return len(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        return len(data)


def _is_said(structured: Any, items: list[Any]) -> bool:
    """Return whether the texts say the structured content already, as the protocol recommends.

    Servers wrap a value that is not an object as ``{"result": value}``, or under another name, and say the
    value.
    """
    found = (item.get("text") for item in items if isinstance(item, Mapping))
    texts = [text for text in found if isinstance(text, str)]
    if texts and isinstance(structured, Mapping) and set(structured) == {"result"}:
        return True
    values = [structured]
    if isinstance(structured, Mapping) and len(structured) == 1:
        values += structured.values()
    return any(text in values or _parsed(text) in values for text in texts)


def _parsed(text: str) -> Any:
    """Return the JSON value of ``text``, or ``text`` itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_tool(tool: Any) -> bool:
    return isinstance(tool, Mapping) and isinstance(tool.get("name"), str) and bool(tool["name"])


def _listed(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("inputSchema")
    kept = {key: value for key, value in tool.items() if key not in ("outputSchema", "icons")}
    kept["inputSchema"] = {"type": "object", "properties": {}}
    if isinstance(schema, Mapping) and schema.get("type", "object") == "object":
        kept["inputSchema"] = {"type": "object", **schema}
    return kept


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
