"""Guard what MCP servers send: bound its size, normalize results, and say whether a request was sent."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentrl.tools.mcp.content import normalize_result

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream
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
NOT_VALID = -32700
"""The answer cannot be decoded. The SDK's code."""


class NormalizedStream:
    """A read stream of a transport whose results are normalized before the SDK validates them."""

    def __init__(self, stream: ReadStream[SessionMessage | Exception]) -> None:
        self._stream = stream

    @property
    def last_context(self) -> Any:
        """Return the sender's context of the last message, which the SDK looks for."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message."""
        return _normalized(await self._stream.receive())

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return _normalized(await self._stream.__anext__())

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stream.__aexit__(kind, error, trace)


def _normalized(item: SessionMessage | Exception) -> SessionMessage | Exception:
    from mcp_types import JSONRPCResponse

    if not isinstance(item, Exception) and isinstance(item.message, JSONRPCResponse):
        item.message.result = normalize_result(item.message.result)
    return item
