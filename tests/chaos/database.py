"""Run and disturb the database: one server behind proxies, or a replica set of three."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Protocol

from agentrl.errors import AgentRLError
from agentrl.local.mongod import EmbeddedMongo, uri
from chaos.proxy import HOST, Proxy
from chaos.replica_set import ReplicaSet

_GONE_SECONDS = 20.0
_ALONE_SECONDS = 1.0
_LONG_SECONDS = 6.0


class Database(Protocol):
    """The part of a database that a chaos run needs."""

    uri: str
    """The connection string of the test itself, without a proxy."""

    async def start(self) -> None:
        """Start the servers and wait for a primary."""

    async def uri_for(self, client: str) -> str:
        """Return the connection string of one process."""

    async def kill(self, seconds: float) -> None:
        """Kill the primary with SIGKILL; restart it on the same data after ``seconds``."""

    async def freeze(self, seconds: float) -> None:
        """Stop the primary with SIGSTOP; continue it after ``seconds``."""

    async def stop(self) -> None:
        """Stop the servers."""


class SingleServer:
    """One mongod; each process connects through a proxy of its own, ``proxies[name]``."""

    def __init__(self, folder: Path) -> None:
        self._mongo = EmbeddedMongo(folder)
        self.proxies: dict[str, Proxy] = {}
        self.uri = ""

    async def start(self) -> None:
        """Start the server."""
        self.uri = (await asyncio.to_thread(self._mongo.up)).uri

    async def uri_for(self, client: str) -> str:
        """Return the address of a new proxy; connect directly, because the replica set has another port."""
        status = self._mongo.status()
        assert status.port is not None
        proxy = self.proxies[client] = Proxy(status.port)
        return uri([f"{HOST}:{await proxy.start()}"], status.password, directConnection="true")

    async def kill(self, seconds: float) -> None:
        """Kill the server; restart it on the same data after ``seconds``."""
        pid = self._mongo.status().pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(self._wait_until_gone)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._mongo.up)

    async def freeze(self, seconds: float) -> None:
        """Freeze the server: connections stay open, and nothing answers."""
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
                raise AgentRLError(f"mongod still runs after a SIGKILL and {_GONE_SECONDS:g} s")
            time.sleep(0.02)


class ThreeServers:
    """A replica set of three servers; clients find its primary themselves, without a proxy."""

    def __init__(self, folder: Path) -> None:
        self._set = ReplicaSet(folder, members=3)
        self.uri = ""

    async def start(self) -> None:
        """Start the three servers."""
        self.uri = await asyncio.to_thread(self._set.up)

    async def uri_for(self, client: str) -> str:
        """Return the connection string, which is the same for all processes."""
        return self.uri

    async def kill(self, seconds: float) -> None:
        """Kill the primary; it returns as a secondary.

        Before a long outage the secondaries are killed first, so that only the primary has the last writes.
        """
        alone = _ALONE_SECONDS if seconds > _LONG_SECONDS else 0.0
        killed = await asyncio.to_thread(self._set.kill_primary, alone)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._set.start_member, killed)

    async def freeze(self, seconds: float) -> None:
        """Freeze the primary; the others elect a new one."""
        await _freeze(await asyncio.to_thread(self._set.primary_pid), seconds)

    async def stop(self) -> None:
        """Stop the three servers."""
        await asyncio.to_thread(self._set.down)


async def _freeze(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
