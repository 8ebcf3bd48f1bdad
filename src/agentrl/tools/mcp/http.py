"""Open HTTP connections to MCP servers: a pool as large as the concurrency, and failures of single calls.

The SDK ends a whole connection when one request fails in transport. Here such a failure becomes the JSON-RPC
error of that request, with a code that says whether the server can have received it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from agentrl.base.proxies import ProxiedTransport
from agentrl.documents.document import shortened
from agentrl.llm.chat import retry_after
from agentrl.tools.config import HttpSpec
from agentrl.tools.mcp.content import (
    LOST,
    MAX_MESSAGE_BYTES,
    NOT_SENT,
    REFUSED,
    REJECTED,
    SESSION_LOST,
    TOO_LARGE,
    read_message,
    reasons,
)

_CONNECT_SECONDS = 30.0
_SPARE_CONNECTIONS = 16
"""Connections for event streams and control requests, beside those of calls."""
_EXCERPT = 200


def open_client(spec: HttpSpec, *, connections: int, read_seconds: float) -> httpx2.AsyncClient:
    """Return a client for ``connections`` calls at a time, of at most ``read_seconds`` of silence each."""
    limits = httpx2.Limits(
        max_connections=connections + _SPARE_CONNECTIONS, max_keepalive_connections=connections
    )
    return httpx2.AsyncClient(
        headers=dict(spec.headers),
        timeout=httpx2.Timeout(_CONNECT_SECONDS, read=read_seconds, pool=read_seconds),
        transport=GuardedTransport(ProxiedTransport(limits=limits)),
    )


def sse_http_client(
    headers: dict[str, str] | None = None,
    timeout: httpx2.Timeout | None = None,
    auth: httpx2.Auth | None = None,
) -> httpx2.AsyncClient:
    """Return the client of a server behind HTTP+SSE, as the SDK asks for it."""
    transport = ReadableTransport(ProxiedTransport())
    return httpx2.AsyncClient(headers=headers, timeout=timeout, auth=auth, transport=transport)


class ReadableTransport(httpx2.AsyncBaseTransport):
    """Make each message in a stream of events readable, and wait for events without a time limit."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET" or request.headers.get("mcp-method") == "subscriptions/listen":
            request.extensions["timeout"]["read"] = None  # a stream of events, silent until one happens
        response = await self._inner.handle_async_request(request)
        response.request = request
        if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            return _with_content(response, stream=_ReadableEvents(response))
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class GuardedTransport(ReadableTransport):
    """Answer a failed POST with a JSON-RPC error, bound JSON answers, and make each message readable."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send ``request``; a POST raises no TransportError before the first event of its answer."""
        if request.method != "POST":
            return await super().handle_async_request(request)
        try:
            response = await super().handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            return _error(request, NOT_SENT, reasons(error))
        except httpx2.TransportError as error:
            return _error(request, LOST, reasons(error))
        kind = response.headers.get("content-type", "").lower()
        if kind.startswith("text/event-stream") or (response.status_code < 400 and not response.is_success):
            return response
        try:
            body = await _body(response)
        except httpx2.TransportError as error:
            return _error(request, LOST, f"the answer broke off: {reasons(error)}")
        if body is None:
            return _error(request, TOO_LARGE, f"the answer is longer than {MAX_MESSAGE_BYTES // 2**20} MiB")
        refusal = _refusal(response, kind, body)
        if refusal is not None:
            code, text, data = refusal
            excerpt = shortened(" ".join(body.decode("utf-8", "replace").split()), _EXCERPT)
            return _error(request, code, f"{text}{': ' if excerpt else ''}{excerpt}", data)
        return _with_content(response, content=read_message(body, json.loads(request.content).get("id")))


def _with_content(response: httpx2.Response, **content: Any) -> httpx2.Response:
    """Return ``response`` with another body, which is neither compressed nor of the announced length."""
    headers = [
        (name, value)
        for name, value in response.headers.multi_items()
        if name.lower() not in ("content-encoding", "content-length", "transfer-encoding")
    ]
    return httpx2.Response(
        response.status_code,
        headers=headers,
        request=response.request,
        extensions=response.extensions,
        **content,
    )


class _ReadableEvents(httpx2.AsyncByteStream):
    """The events of a response, of bounded length, whose data are read as messages."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for event in httpx2.EventSource(self._response, max_event_size=MAX_MESSAGE_BYTES):
            lines = [b"event: " + event.event.encode(), b"id: " + event.id.encode()]
            if event.retry is not None:
                lines.append(b"retry: %d" % event.retry)
            lines += [b"data: " + line for line in read_message(event.data.encode()).split(b"\n")]
            yield b"\n".join(lines) + b"\n\n"

    async def aclose(self) -> None:
        await self._response.aclose()


async def _body(response: httpx2.Response) -> bytes | None:
    """Return the body, decompressed; None if it is longer than ``MAX_MESSAGE_BYTES``."""
    body = bytearray()
    try:
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > MAX_MESSAGE_BYTES:
                return None
    finally:
        await response.aclose()
    return bytes(body)


def _refusal(response: httpx2.Response, kind: str, body: bytes) -> tuple[int, str, dict[str, Any]] | None:
    """Return the code, text and data of an answer that is not an MCP message; None for an MCP message.

    A server that has lost its sessions says so by 404, as the protocol demands, or by another status of 4xx.
    One without sessions answers a call so while it is deployed; to other methods 4xx may mean that it does
    not know them.
    """
    status, is_json = response.status_code, kind.startswith("application/json")
    is_message = is_json and b'"jsonrpc"' in body  # gateways and web frameworks answer JSON of their own
    has_session = "mcp-session-id" in response.request.headers
    if has_session and status in (404, 410):
        return SESSION_LOST, f"the session is lost (HTTP {status})", {}
    if status in (401, 403) and not (has_session and b"session" in body.lower()):
        return REFUSED, f"it asks for a login (HTTP {status})", {"login": True}
    if status in (429, 503):
        return REFUSED, f"it is overloaded (HTTP {status})", {"retry_after": retry_after(response.headers)}
    if status >= 500 and not is_message:
        return LOST, f"HTTP {status}", {}
    is_call = b'"tools/call"' in response.request.content
    if (has_session or is_call) and 400 <= status < 500 and not is_message:
        return REJECTED, f"it rejects the request (HTTP {status})", {}
    if status == 200 and not is_json:
        return REFUSED, f"it answers {kind or 'no content type'} instead of MCP", {}
    return None


def _error(
    request: httpx2.Request, code: int, message: str, data: dict[str, Any] | None = None
) -> httpx2.Response:
    """Return a response whose body is a JSON-RPC error; the SDK gives it to the caller of ``request``."""
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message, "data": data or {}}}
    return httpx2.Response(
        500, headers={"content-type": "application/json"}, content=json.dumps(body), request=request
    )
