"""Run a gateway's HTTP server in the event loop of its process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from agentrl.bounded_http import BoundedProtocol
from agentrl.config.agent import GatewayConfig
from agentrl.errors import ConfigError
from agentrl.gateway.app import GatewayApp

logger = logging.getLogger(__name__)

_START_SECONDS, _STOP_SECONDS = 30.0, 5.0
_BACKLOG = 1024


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class GatewayServer:
    """The server of one process."""

    def __init__(self, app: GatewayApp, config: GatewayConfig) -> None:
        self._config = config
        self._server = _Server(
            uvicorn.Config(
                app.app(),
                log_level="warning",
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                timeout_graceful_shutdown=1,
                timeout_keep_alive=30,
                http=BoundedProtocol,
            )
        )
        self._task: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address is taken."""
        host, port = self._config.gateway_host, self._config.gateway_port
        listener = _listen(host, port)
        found = listener.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{found}"
        self._task = asyncio.create_task(self._server.serve([listener]), name="gateway")
        async with asyncio.timeout(_START_SECONDS):
            await self._server.is_up.wait()
        logger.info("gateway listens at %s", self.url)

    async def close(self) -> None:
        """Stop listening; open connections are closed."""
        if self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=_STOP_SECONDS)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small pieces at once (TCP_NODELAY) only on sockets that name the protocol
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"a gateway cannot listen on {host}:{port}: {error.strerror}",
            hint="choose another --gateway_port, or 0 for a free one",
        ) from error
    listener.listen(_BACKLOG)
    return listener
