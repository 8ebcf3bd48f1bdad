"""Send requests to an engine's HTTP server: JSON calls and streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import orjson

from agentrl.errors import ENGINES, EngineError
from agentrl.inference.connections import Connections
from agentrl.inference.engine import EngineRefusedError, malformed

CONTROL_SECONDS = 30.0

_CONNECT_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 4.0
"""Below the 5 s after which uvicorn closes an idle connection."""
_EXCERPT = 300
_END_SECONDS = 1.0
"""How long a server may take to end a stream after ``[DONE]``."""
_SLACK = 0.02
"""Fraction of a stream's time limit by which it may be late: not every event moves the timer."""
_LARGEST = 64 * 1024 * 1024
"""Most bytes of an event, and of an answer that is not a stream."""
_JSON = {"content-type": "application/json"}
_DATA, _DONE = b"data:", b"[DONE]"


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer; ``kind`` is its content type."""

    status: int
    kind: str
    content: bytes

    @property
    def text(self) -> str:
        """The content, with a replacement character for each byte that is not UTF-8."""
        return self.content.decode("utf-8", "replace")


class EngineHttp:
    """The HTTP connections to one server. Methods raise EngineError with url, status and answer."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._connections = Connections(self.url)
        """For streams; the client is for everything else."""
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            timeout=httpx2.Timeout(CONTROL_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEP_ALIVE_SECONDS
            ),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()
        await self._client.aclose()

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = CONTROL_SECONDS
    ) -> dict[str, Any]:
        """Return the JSON object of an answer; an empty dict for an empty or plain-text one."""
        response = await self.respond(method, path, body, timeout)
        if "html" in response.kind:
            raise malformed(f"{self.url}{path}", f"with a web page: {response.text[:_EXCERPT]}")
        if "json" not in response.kind:
            return {}
        answer = _parse(response.content, f"{self.url}{path}")
        return answer if isinstance(answer, dict) else {"value": answer}

    async def respond(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float = CONTROL_SECONDS,
        *,
        statuses: Collection[int] = (200,),
    ) -> Response:
        """Return the answer if its status is one of ``statuses``; else raise, 4xx as EngineRefusedError.

        ``timeout`` limits the whole call, in seconds.
        """
        limits = httpx2.Timeout(timeout, connect=_CONNECT_SECONDS)
        content = None if body is None else orjson.dumps(body)
        headers = _JSON if content else None
        try:
            async with (
                asyncio.timeout(timeout),  # the client's own limit starts again with each byte
                self._client.stream(method, path, content=content, headers=headers, timeout=limits) as answer,
            ):
                received = await _limited(answer.aiter_bytes(), f"{self.url}{path}")
                response = Response(answer.status_code, answer.headers.get("content-type", ""), received)
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise EngineError(
                f"engine {self.url}{path} did not answer within {timeout:g} s", outage=ENGINES
            ) from error
        except httpx2.HTTPError as error:
            raise _unreachable(f"{self.url}{path}", error) from error
        if response.status not in statuses:
            raise self._refusal(path, response.status, response.text)
        return response

    async def stream(
        self, path: str, body: bytes, timeout: float, headers: Mapping[str, str]
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the JSON objects of a stream of events until ``[DONE]`` or the end of the stream.

        ``timeout`` limits the wait for each event, in seconds. An answer that is one JSON object is yielded
        as one event.
        """
        where = f"{self.url}{path}"
        loop = asyncio.get_running_loop()
        is_done = False
        slack = timeout * _SLACK
        due = loop.time() + slack
        try:
            async with (
                asyncio.timeout(timeout + slack) as clock,
                self._connections.post(path, body, {**_JSON, **headers}) as answer,
            ):
                kind = answer.headers.get("content-type", "")
                if answer.status != 200 or "event-stream" not in kind:
                    body = await _limited(answer.pieces(), where)
                    yield self._single_event(path, answer.status, kind, body)
                    return
                async for data in _events(answer.pieces(), where):
                    if is_done:
                        continue  # the connection is kept only if all is read
                    is_done = data == _DONE
                    now = loop.time()
                    if is_done:
                        clock.reschedule(now + _END_SECONDS)
                        continue
                    if now >= due:
                        clock.reschedule(now + timeout + slack)
                        due = now + slack
                    yield _object(data, where)
        except TimeoutError as error:
            if not is_done:
                raise silent(where, timeout) from error
        except OSError as error:
            raise _unreachable(where, error) from error

    def _single_event(self, path: str, status: int, kind: str, body: bytes) -> dict[str, Any]:
        where, text = f"{self.url}{path}", body[: 4 * _EXCERPT].decode("utf-8", "replace")
        if status != 200:
            raise self._refusal(path, status, text)
        if "json" not in kind:
            raise malformed(where, f"with {kind or 'no content type'}: {text[:_EXCERPT]}")
        return _object(body, where)

    def _refusal(self, path: str, status: int, text: str) -> EngineError:
        message = f"engine {self.url}{path} answered {status}: {text[:_EXCERPT]}"
        if 400 <= status < 500 and status not in (408, 429):
            return EngineRefusedError(message)
        return EngineError(message, outage=ENGINES)


async def _limited(pieces: AsyncIterator[bytes], where: str) -> bytes:
    """Return the joined pieces. Raises EngineAnswerError for more than ``_LARGEST`` bytes."""
    found, size = [], 0
    async for piece in pieces:
        size += len(piece)
        if size > _LARGEST:
            raise malformed(where, f"with more than {_LARGEST} bytes")
        found.append(piece)
    return b"".join(found)


async def _events(pieces: AsyncIterator[bytes], where: str) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event; ignore comments and other fields."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _LARGEST:
            raise malformed(where, f"with an event of more than {_LARGEST} bytes")
        for line in lines:
            if line.startswith(_DATA):
                yield line[len(_DATA) :].strip()
            elif line.strip() and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise malformed(where, f"with a line that is not an event: {line[:_EXCERPT]!r}")


def _object(data: bytes, where: str) -> dict[str, Any]:
    answer = _parse(data, where)
    if not isinstance(answer, dict):
        raise malformed(where, f"with JSON that is not an object: {data[:_EXCERPT]!r}")
    return answer


def _parse(data: bytes, where: str) -> Any:
    try:
        return orjson.loads(data)
    except ValueError as error:
        raise malformed(where, f"invalid JSON: {data[:_EXCERPT]!r}") from error


def silent(where: str, seconds: float) -> EngineError:
    """Return the error for a stream at the address ``where`` without a token for ``seconds``."""
    return EngineError(f"engine {where} sent no token for {seconds:g} s", outage=ENGINES)


def _unreachable(where: str, error: Exception) -> EngineError:
    return EngineError(
        f"engine {where} cannot be reached: {type(error).__name__}: {error}",
        hint="see the engine's log; `agentrl audit run` lists the live engines",
        outage=ENGINES,
    )
