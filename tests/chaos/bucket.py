"""An S3 server in a process of its own, behind a proxy that takes it away and brings it back."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from agentrl.base.processes import free_port, start_child, stop_child
from chaos.proxy import HOST, Proxy

_START_SECONDS = 60.0
_KEYS = {"AWS_ACCESS_KEY_ID": "chaos", "AWS_SECRET_ACCESS_KEY": "chaos", "AWS_DEFAULT_REGION": "us-east-1"}


class Bucket:
    """The bucket ``weights`` of moto's server, which keeps its objects in memory."""

    url = "s3://weights"

    def __init__(self, log: Path) -> None:
        self._port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self._port)]
        self._process = start_child(command, log=log)
        self._files: Any = None
        self.proxy = Proxy(self._port)

    async def start(self) -> dict[str, str]:
        """Create the bucket; return the environment by which a process reaches it through the proxy."""
        async with asyncio.timeout(_START_SECONDS):
            while True:
                try:
                    _, writer = await asyncio.open_connection(HOST, self._port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    break
        self._files = await asyncio.to_thread(self._open)
        return {**_KEYS, "AWS_ENDPOINT_URL": f"http://{HOST}:{await self.proxy.start()}"}

    def _open(self) -> Any:
        import fsspec

        files = fsspec.filesystem(
            "s3", key="chaos", secret="chaos", endpoint_url=f"http://{HOST}:{self._port}",
            skip_instance_cache=True, use_listings_cache=False,
        )  # fmt: skip
        files.mkdir(self.url)
        return files

    async def read(self, address: str) -> bytes | None:
        """Return an object, read past the proxy; None if it does not exist."""
        try:
            data: bytes = await asyncio.to_thread(self._files.cat_file, address)
        except FileNotFoundError:
            return None
        return data

    async def stop(self) -> None:
        """Stop proxy and server."""
        await self.proxy.close()
        await asyncio.to_thread(stop_child, self._process)
