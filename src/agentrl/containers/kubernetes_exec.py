"""Run a command in a pod by the websocket ``exec`` of the API server: input, outputs and exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from agentrl.batches import batches
from agentrl.concurrency import background
from agentrl.containers.base import back_end_away
from agentrl.containers.cluster import Cluster
from agentrl.proxies import proxy_of
from agentrl.tools.sandbox.launcher import Output

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

CHUNK: Final = 1 << 16
_OPEN_SECONDS: Final = 30.0
_STDIN, _STDOUT, STDERR, STATUS, _CLOSE = b"\0", 1, 2, 3, b"\xff"
"""Channels of ``v5.channel.k8s.io``: the first byte of each message."""


@contextlib.asynccontextmanager
async def open_exec(
    cluster: Cluster, pod: str, words: Sequence[str], stdin: AsyncIterator[bytes] | None = None
) -> AsyncIterator[AsyncIterator[tuple[int, bytes]]]:
    """Start a command in the pod at path ``pod``; yield its messages, as channel and content, to its end.

    Raises ToolServerError, as an outage, if the pod cannot be reached, TimeoutError if it does not answer.
    """
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException
    from websockets.typing import Subprotocol

    query = [("container", "main"), *((name, "true") for name in ("stdin", "stdout", "stderr"))]
    query += [("command", word) for word in words]
    try:
        connection = connect(
            f"ws{cluster.url.removeprefix('http')}{pod}/exec?{urlencode(query)}",
            ssl=cluster.ssl or None, additional_headers=cluster.headers(), compression=None,
            subprotocols=[Subprotocol("v5.channel.k8s.io")], max_size=None, open_timeout=_OPEN_SECONDS,
            proxy=proxy_of(cluster.url),
        )  # fmt: skip
        async with connection as socket, background(_feed(socket, stdin)):
            yield _messages(socket)
    except TimeoutError:
        raise
    except (OSError, WebSocketException) as error:
        name = pod.rpartition("/")[2]
        raise back_end_away("kubernetes", f"no command reaches the pod {name}: {error}") from error


async def _messages(socket: ClientConnection) -> AsyncIterator[tuple[int, bytes]]:
    async for message in socket:
        if isinstance(message, bytes) and message[1:]:
            yield message[0], message[1:]


async def _feed(socket: ClientConnection, stdin: AsyncIterator[bytes] | None) -> None:
    """Write a command's input and close it. A command that ends before it has read it is not an error."""
    from websockets.exceptions import ConnectionClosed

    with contextlib.suppress(ConnectionClosed):
        if stdin is not None:
            async for part in stdin:
                for piece in batches(part, CHUNK):
                    await socket.send(_STDIN + piece)
        await socket.send(_CLOSE + _STDIN)


class Command:
    """What a command says on its channels, and the limit that it has exceeded."""

    def __init__(self, output_bytes: int, shown_bytes: int | None) -> None:
        self.stdout, self.stderr = (Output.of(output_bytes, shown_bytes) for _ in range(2))
        self.pid: int | None = None
        self.code = -int(signal.SIGKILL)
        self.exceeded: str | None = None
        self._first = b""
        self._has_pid = asyncio.Event()

    async def input(self, script: bytes, stdin: bytes) -> AsyncIterator[bytes]:
        """Yield what the command reads: it begins with ``stdin`` once its id is known."""
        yield script
        await self._has_pid.wait()
        yield b"\n" + stdin

    def receive(self, channel: int, content: bytes) -> None:
        """Take one message. The first line of standard output is the id of the process."""
        if channel == STATUS:
            self.code = exit_code(content)
            return
        if channel == _STDOUT and self.pid is None:
            self._first += content
            line, found, content = self._first.partition(b"\n")
            if not found:
                return
            self.pid = int(line)
            self._has_pid.set()
        if not (self.stderr if channel == STDERR else self.stdout).add(content):
            self.exceeded = "output"


def exit_code(content: bytes) -> int:
    """Return the exit code of a command from the Status that ends its channel."""
    status: dict[str, Any] = json.loads(content)
    if status.get("status") == "Success":
        return 0
    causes = (status.get("details") or {}).get("causes", [])
    return next((int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"), 1)
