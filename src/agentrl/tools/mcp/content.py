"""Guard what MCP servers send: bound its size, render it as text for the model, name what went wrong."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from agentrl.documents.images import MAX_IMAGE_BYTES, Image, image_of_base64
from agentrl.errors import ImageError

if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage


MAX_MESSAGE_BYTES = 8 * 2**20
"""The largest message of a server; a larger one is an error that the model reads."""

LOST = -32000
"""The connection broke after the request was sent: the server may have acted on it. The SDK's code."""
TIMED_OUT = -32001
"""The SDK's code of a request without an answer in time."""
NOT_SENT = -32090
"""No server has received the request: it may be sent again."""
REFUSED = -32091
"""The server refuses all calls now: it asks for a login, is overloaded, or does not speak MCP."""
TOO_LARGE = -32092
"""The answer is longer than MAX_MESSAGE_BYTES."""
SESSION_LOST = -32093
"""The server does not know the session of the request: it did nothing."""
REJECTED = -32094
"""The server rejected a request of a session by an HTTP status alone: it may have lost the session."""
NOT_VALID = -32700
"""The answer cannot be decoded. The SDK's code."""
INTERNAL = -32603
"""JSON-RPC's code of an error that has none."""
OWN_ERROR = "agentrl/own"
"""The key in the ``data`` of a JSON-RPC error that says: the server made it, not the transport or the SDK."""
_SURROGATE = re.compile(
    rb"(\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
"""A surrogate of JSON: alone, or, as the group, in its pair. An escaped backslash is passed over."""
_SHOWN = 300
_TEXT_KEYS = ("text", "content")
"""Keys of a text item; AgentDock's nodes decode JSON in them."""
_IMAGE_KEYS = ("data", "image_url", "source", "image", "content")
"""Keys under which an image item holds its bytes, or an object with them."""
MAX_IMAGES = 8
"""Images of one tool result that a model reads."""


def read_message(message: bytes, answers: Any = None) -> bytes:
    """Return one JSON message of a server as the SDK can read it: bytes that are not UTF-8 and surrogates
    without their pair, such as half an emoji, become U+FFFD. An error is marked as the server's own, so that
    its code is not taken for one of the transport's, and is given the fields that it lacks, and the id of
    the request that it ``answers``: servers write null, and the SDK would wait on.
    """
    text = message.decode("utf-8-sig", "replace").encode()
    if b"\\u" in text:
        text = _SURROGATE.sub(lambda found: found[1] or rb"\ufffd", text)
    if b'"error"' not in text:
        return text
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(content, dict) or content.get("error") is None:
        return text
    content["id"] = content.get("id") if answers is None else answers
    error = content["error"] if isinstance(content["error"], Mapping) else {"message": content["error"]}
    code, said, data = error.get("code"), error.get("message"), error.get("data")
    content["error"] = {
        "code": code if isinstance(code, int) else INTERNAL,
        "message": said if isinstance(said, str) else json_text(error if said is None else said),
        "data": {**(data if isinstance(data, Mapping) else {"data": data}), OWN_ERROR: True},
    }
    return json.dumps(content).encode()


class NormalizedStream:
    """A read stream of a transport whose results are normalized before the SDK validates them."""

    def __init__(self, stream: Any, on_end: Callable[[], None]) -> None:
        """``on_end`` is called when the stream ends: no answer can come any more."""
        self._stream = stream
        self._on_end = on_end

    @property
    def last_context(self) -> Any:
        """Return the sender's context of the last message, which the SDK looks for."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        return _normalized(await self._stream.receive())

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return _normalized(await self._stream.__anext__())
        except StopAsyncIteration:
            self._on_end()
            raise

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._stream.__aexit__(*raised)


def _normalized(item: SessionMessage | Exception) -> SessionMessage | Exception:
    from mcp_types import JSONRPCResponse

    if not isinstance(item, Exception) and isinstance(item.message, JSONRPCResponse):
        item.message.result = normalize_result(item.message.result)
    return item


def normalize_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return a raw JSON-RPC result that every SDK version accepts.

    A tool result becomes one text, which describes its images, and the images behind it. A tool list loses
    its output schemas, which the SDK would enforce by refusing results, and entries that are not tools. Other
    results are returned as they are.
    """
    if isinstance(result.get("tools"), list):
        return {**result, "tools": [finite(_listed(tool)) for tool in result["tools"] if _is_tool(tool)]}
    if "content" not in result and "structuredContent" not in result:
        return result
    kept = {key: value for key, value in result.items() if key not in ("structuredContent", "isError")}
    text = render_content(result.get("content"), result.get("structuredContent"))
    content = [{"type": "text", "text": text}, *image_items(result.get("content"))]
    return {**kept, "content": content, "isError": result.get("isError") is True}


def image_items(content: Any) -> list[dict[str, Any]]:
    """Return the image items of a result, at most ``MAX_IMAGES`` that are not too large."""
    items = content if isinstance(content, list) else []
    images = [image for item in items if isinstance(item, Mapping) and (image := _image(item)) is not None]
    return [item for item in images[:MAX_IMAGES] if len(item["data"]) <= MAX_IMAGE_BYTES * 4 // 3 + 4]


def _image(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an image as MCP writes it, also of the forms of OpenAI and Anthropic; None without one."""
    kind = item.get("type")
    if kind not in ("image", "image_url"):
        return None
    held = next((item[key] for key in _IMAGE_KEYS if item.get(key)), None)
    if isinstance(held, Mapping):
        item, held = {**item, **held}, held.get("data", held.get("url"))
    if not isinstance(held, str):
        return None
    mime = str(item.get("mimeType") or item.get("media_type") or "image/png")
    if held.startswith("data:"):
        head, _, held = held.partition(",")
        mime = head.removeprefix("data:").partition(";")[0] or mime
    return {"type": "image", "data": held, "mimeType": mime}


def images_in(texts: Iterable[str]) -> tuple[Image, ...]:
    """Return the images in base64 ``texts``; what cannot be decoded stays a description."""
    images = []
    for text in texts:
        with suppress(ImageError):
            images.append(image_of_base64(text))
    return tuple(images)


def is_content(item: Any) -> bool:
    """Return whether a JSON value is a content item, and not data of a tool that has a ``type`` too."""
    if not isinstance(item, Mapping):
        return False
    kind = item.get("type")
    if kind == "text":
        return set(item) & set(_TEXT_KEYS) != set()
    return _image(item) is not None or kind in ("resource", "resource_link", "audio")


def render_content(content: Any, structured: Any = None) -> str:
    """Return the text of a tool result's content items and structured content."""
    items = content if isinstance(content, list) else [] if content is None else [content]
    parts = [render_item(item) for item in items]
    if structured is not None and not _is_said(structured, items):
        parts.append(json_text(structured))
    return "\n".join(parts)


def render_item(item: Any) -> str:
    """Return the text of one content item; an item without text is described by type, size and address."""
    if not isinstance(item, Mapping):
        return item if isinstance(item, str) else json_text(item)
    kind = item.get("type")
    if kind == "text" and (key := next((key for key in _TEXT_KEYS if key in item), None)):
        return item[key] if isinstance(item[key], str) else json_text(item[key])
    if kind == "resource" and isinstance(item.get("resource"), Mapping):
        return render_resource(item["resource"])
    if kind == "resource_link":
        return _described("resource", item, name=item.get("name"), uri=item.get("uri"))
    if (image := _image(item)) is not None:
        return _described("image", image)
    if kind in ("image", "audio"):
        return _described(str(kind), item)
    return f"[content of unknown type {str(kind)[:80]!r}: {json_text(dict(item))[:_SHOWN]}]"


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
    said = (item.get("text") for item in items if isinstance(item, Mapping))
    texts = [text for text in said if isinstance(text, str)]
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


_KINDS: dict[str, Any] = {
    "name": str, "description": str, "readOnlyHint": bool, "idempotentHint": bool,
    "properties": Mapping, "required": list,
}  # fmt: skip
"""What is read of a listed tool, its annotations and its schema, and the type that the SDK demands."""


def _listed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is read of a tool: one field that the SDK refuses would cost all tools of the server."""
    schema, hints = tool.get("inputSchema"), tool.get("annotations")
    kept = {"type": "object", "properties": {}}
    if isinstance(schema, Mapping) and schema.get("type", "object") == "object":
        kept = {"type": "object"} | {
            key: value for key, value in schema.items() if isinstance(value, _KINDS.get(key, object))
        }
    return {
        **{key: tool[key] for key in ("name", "description") if isinstance(tool.get(key), _KINDS[key])},
        "inputSchema": kept,
        "annotations": {
            key: hints[key]
            for key in ("readOnlyHint", "idempotentHint")
            if isinstance(hints, Mapping) and isinstance(hints.get(key), _KINDS[key])
        },
    }


def json_text(value: Any) -> str:
    """Return ``value`` as JSON; numbers that are not finite, which JSON cannot hold, are null."""
    return json.dumps(finite(value), ensure_ascii=False, default=str)


def finite(value: Any) -> Any:
    """Return a JSON value with None for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def reasons(error: BaseException) -> str:
    """Return the messages of an exception; for an exception group, those of its members."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(reasons(inner) for inner in error.exceptions))
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
