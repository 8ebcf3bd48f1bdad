"""Open HTTP connections to MCP servers: a pool as large as the concurrency, and failures of single calls.

The SDK ends a whole connection when one request fails in transport. Here such a failure becomes the JSON-RPC
error of that request, with a code that says whether the server can have received it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from agentrl.llm.limits import retry_after
from agentrl.tools.mcp.connection import reasons
from agentrl.tools.mcp.content import LOST, MAX_MESSAGE_BYTES, NOT_SENT, REFUSED
from agentrl.tools.specs import HttpSpec

_CONNECT_SECONDS = 30.0
_SPARE_CONNECTIONS = 16
"""Connections for event streams and control requests, beside those of calls."""
_MESSAGES = ("application/json", "text/event-stream")
_EXCERPT = 200


def open_client(spec: HttpSpec, *, connections: int, read_seconds: float) -> httpx2.AsyncClient:
    """Return a client for ``connections`` calls at a time, of at most ``read_seconds`` of silence each."""
    limits = httpx2.Limits(
        max_connections=connections + _SPARE_CONNECTIONS, max_keepalive_connections=connections
    )
    return httpx2.AsyncClient(
        headers=dict(spec.headers),
        timeout=httpx2.Timeout(_CONNECT_SECONDS, read=read_seconds, pool=read_seconds),
        transport=GuardedTransport(httpx2.AsyncHTTPTransport(limits=limits)),
    )


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Answer a failed POST with a JSON-RPC error, and bound the length of JSON answers."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send ``request``; a POST raises no TransportError."""
        if request.method == "GET" or request.headers.get("mcp-method") == "subscriptions/listen":
            request.extensions["timeout"]["read"] = None  # a stream of events, silent until one happens
        if request.method != "POST":
            return await self._inner.handle_async_request(request)
        try:
            response = await self._inner.handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            return _error(request, NOT_SENT, reasons(error))
        except httpx2.TransportError as error:
            return _error(request, LOST, reasons(error))
        kind = response.headers.get("content-type", "").lower()
        refusal = _refusal(response, kind)
        if refusal is not None:
            excerpt = await _excerpt(response)
            await response.aclose()
            code, text, data = refusal
            return _error(request, code, f"{text}{': ' if excerpt else ''}{excerpt}", data)
        if kind.startswith("application/json") and isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = _BoundedStream(response.stream)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    """A body that ends with StreamError when it is too long or breaks; the SDK makes it that call's error."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._stream:
                size += len(chunk)
                if size > MAX_MESSAGE_BYTES:
                    raise httpx2.StreamError(f"the answer is longer than {MAX_MESSAGE_BYTES // 2**20} MiB")
                yield chunk
        except httpx2.TransportError as error:
            raise httpx2.StreamError(f"the answer broke off: {reasons(error)}") from error

    async def aclose(self) -> None:
        await self._stream.aclose()


def _refusal(response: httpx2.Response, kind: str) -> tuple[int, str, dict[str, Any]] | None:
    """Return the code, text and data of an answer that is not an MCP message; None for an MCP message."""
    status = response.status_code
    if status in (401, 403):
        return REFUSED, f"it asks for a login (HTTP {status})", {"login": True}
    if status in (429, 503):
        return REFUSED, f"it is overloaded (HTTP {status})", {"retry_after": retry_after(response.headers)}
    if status >= 500 and not kind.startswith("application/json"):
        return LOST, f"HTTP {status}", {}
    if status == 200 and not kind.startswith(_MESSAGES):
        return REFUSED, f"it answers {kind or 'no content type'} instead of MCP", {}
    return None


async def _excerpt(response: httpx2.Response) -> str:
    """Return the beginning of a refusal's body."""
    text = b""
    try:
        if isinstance(response.stream, httpx2.AsyncByteStream):
            async for chunk in response.stream:
                text += chunk
                if len(text) >= _EXCERPT:
                    break
    except httpx2.TransportError:
        return ""
    return " ".join(text[:_EXCERPT].decode("utf-8", "replace").split())


def _error(
    request: httpx2.Request, code: int, message: str, data: dict[str, Any] | None = None
) -> httpx2.Response:
    """Return a response whose body is a JSON-RPC error; the SDK gives it to the caller of ``request``."""
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message, "data": data or {}}}
    return httpx2.Response(
        500, headers={"content-type": "application/json"}, content=json.dumps(body), request=request
    )
