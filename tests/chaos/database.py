"""The database under fire: one server behind proxies, or a replica set whose primary is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Protocol

from agentrl.errors import AgentRLError
from agentrl.store.embedded.credentials import uri
from agentrl.store.embedded.server import EmbeddedMongo
from chaos.proxy import HOST, Proxy
from chaos.replica_set import ReplicaSet

_GONE_SECONDS = 20.0
_ALONE_SECONDS = 1.0
_LONG_SECONDS = 6.0


class Database(Protocol):
    """What a run needs of it."""

    uri: str
    """Where the harness itself connects, past every proxy."""

    async def start(self) -> None:
        """Start it and wait for a primary."""

    async def uri_for(self, client: str) -> str:
        """The connection string of one process."""

    async def kill(self, seconds: float) -> None:
        """SIGKILL the server that takes the writes; it is started on its data after ``seconds``."""

    async def freeze(self, seconds: float) -> None:
        """SIGSTOP to the server that takes the writes, and SIGCONT after ``seconds``."""

    async def stop(self) -> None:
        """Stop it."""


class SingleServer:
    """One mongod; every process has a proxy of its own in front of it, in ``proxies`` by name."""

    def __init__(self, folder: Path) -> None:
        self._mongo = EmbeddedMongo(folder)
        self.proxies: dict[str, Proxy] = {}
        self.uri = ""

    async def start(self) -> None:
        """Start the server."""
        self.uri = (await asyncio.to_thread(self._mongo.up)).uri

    async def uri_for(self, client: str) -> str:
        """Through a new proxy; a direct connection, since the replica set knows itself by another port."""
        status = self._mongo.status()
        assert status.port is not None
        proxy = self.proxies[client] = Proxy(status.port)
        return uri([f"{HOST}:{await proxy.start()}"], status.password, directConnection="true")

    async def kill(self, seconds: float) -> None:
        """SIGKILL, a pause, and a start on the same data."""
        pid = self._mongo.status().pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(self._wait_until_gone)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._mongo.up)

    async def freeze(self, seconds: float) -> None:
        """Connections stay open meanwhile, and nothing answers."""
        pid = self._mongo.status().pid
        if pid is not None:
            await _freeze(pid, seconds)

    async def stop(self) -> None:
        """Close the proxies and stop the server."""
        for proxy in self.proxies.values():
            await proxy.close()
        await asyncio.to_thread(self._mongo.down)

    def _wait_until_gone(self) -> None:
        deadline = time.monotonic() + _GONE_SECONDS
        while self._mongo.status().running:
            if time.monotonic() > deadline:
                raise AgentRLError(f"mongod outlived a SIGKILL by {_GONE_SECONDS:g} s")
            time.sleep(0.02)


class ThreeServers:
    """A replica set of three; clients find its primary by themselves, without a proxy."""

    def __init__(self, folder: Path) -> None:
        self._set = ReplicaSet(folder, members=3)
        self.uri = ""

    async def start(self) -> None:
        """Start all three."""
        self.uri = await asyncio.to_thread(self._set.up)

    async def uri_for(self, client: str) -> str:
        """The same for all."""
        return self.uri

    async def kill(self, seconds: float) -> None:
        """SIGKILL the primary; it comes back as a secondary.

        Where it is long away, the others are killed first, so that it has writes that none of them has.
        """
        alone = _ALONE_SECONDS if seconds > _LONG_SECONDS else 0.0
        killed = await asyncio.to_thread(self._set.kill_primary, alone)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._set.start_member, killed)

    async def freeze(self, seconds: float) -> None:
        """The primary; the others elect another meanwhile."""
        await _freeze(await asyncio.to_thread(self._set.primary_pid), seconds)

    async def stop(self) -> None:
        """Stop all three."""
        await asyncio.to_thread(self._set.down)


async def _freeze(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
