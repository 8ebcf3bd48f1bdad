"""Run and disturb the database: one server behind proxies, or a replica set of three."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any, Protocol

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from agentrl.errors import AgentRLError, StoreError
from agentrl.local.mongod import (
    REPLICA_SET,
    Credentials,
    EmbeddedMongo,
    PortTakenError,
    choose_mongod,
    is_daemon,
    server_port,
    start_daemon,
    stop_daemon,
    uri,
)
from chaos.proxy import HOST, Proxy

_GONE_SECONDS = 20.0
_ALONE_SECONDS = 1.0
_LONG_SECONDS = 6.0
_PRIMARY_SECONDS = 60.0
_ELECTION_MILLISECONDS = 2000
_INITIALIZED = 23


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


class Member:
    """One mongod: ``data/``, ``mongod.log`` and ``mongod.pid`` in its folder; its port is kept."""

    def __init__(self, folder: Path, credentials: Credentials) -> None:
        self._credentials = credentials
        self._dbpath = folder / "data"
        self._log = folder / "mongod.log"
        self._pid: int | None = None
        self.port: int | None = None

    @property
    def running(self) -> bool:
        """Whether the server that was started last is running."""
        return self._pid is not None and is_daemon(self._pid, self._dbpath)

    def start(self) -> None:
        """Start it on its data unless it is running. Raises StoreError if it does not start."""
        if self.running:
            return
        self._dbpath.mkdir(parents=True, exist_ok=True)
        for _ in range(5):
            port = self.port or server_port()
            try:
                self._pid = start_daemon(
                    choose_mongod().mongod.path, self._dbpath, self._log, port,
                    key_file=self._credentials.key_file, cache_gigabytes=0.25,
                )  # fmt: skip
            except PortTakenError:
                if self.port is not None:
                    raise
                continue
            self.port = port
            return
        raise StoreError("no free port was found in five tries")

    @property
    def pid(self) -> int:
        """Its process id. Raises StoreError before ``start``."""
        if self._pid is None:
            raise StoreError("this member has not been started")
        return self._pid

    def kill(self) -> None:
        """Send SIGKILL and wait until the process is gone."""
        if self._pid is None or not self.running:
            return
        os.kill(self._pid, signal.SIGKILL)
        deadline = time.monotonic() + _GONE_SECONDS
        while self.running:
            if time.monotonic() > deadline:
                raise StoreError(f"mongod with pid {self._pid} outlived a SIGKILL by {_GONE_SECONDS:g} s")
            time.sleep(0.02)

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if it does not end."""
        if self._pid is not None:
            stop_daemon(self._pid, self._dbpath)


class ReplicaSet:
    """``members`` servers under ``folder``, with elections after two seconds without a primary."""

    def __init__(self, folder: Path, *, members: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._credentials = Credentials(folder)
        self._members = [Member(folder / f"member-{number}", self._credentials) for number in range(members)]

    @property
    def uri(self) -> str:
        """The connection string, with the password."""
        hosts = [f"127.0.0.1:{member.port}" for member in self._members]
        return uri(hosts, self._credentials.password, replicaSet=REPLICA_SET)

    def up(self) -> str:
        """Start every member, initiate the set, wait for a primary; return the URI. Raises StoreError."""
        self._credentials.make()
        try:
            for member in self._members:
                member.start()
            self._initiate()
            primary = self._members[self.primary()]
            with self._credentials.admin(f"127.0.0.1:{primary.port}") as client:
                self._credentials.ensure_user(client)
        except BaseException:
            self.down()
            raise
        return self.uri

    def primary(self) -> int:
        """Return the number of the primary. Raises StoreError if none is elected within a minute."""
        deadline = time.monotonic() + _PRIMARY_SECONDS
        while time.monotonic() < deadline:
            for number, member in enumerate(self._members):
                if member.running and _is_primary(member):
                    return number
            time.sleep(0.1)
        raise StoreError(f"the replica set elected no primary within {_PRIMARY_SECONDS:.0f} s")

    def primary_pid(self) -> int:
        """Return the process id of the primary."""
        return self._members[self.primary()].pid

    def kill_primary(self, alone_seconds: float = 0.0) -> int:
        """SIGKILL the primary; returns its number.

        With ``alone_seconds``, less than an election takes, the other members are killed that long before and
        started after it: its writes in between are on no other member, and are rolled back when it returns.
        """
        number = self.primary()
        others = [member for other, member in enumerate(self._members) if other != number]
        if alone_seconds:
            for member in others:
                member.kill()
            time.sleep(alone_seconds)
        self._members[number].kill()
        for member in others:
            member.start()
        return number

    def start_member(self, number: int) -> None:
        """Start a killed member on its data."""
        self._members[number].start()

    def down(self) -> None:
        """Stop every member."""
        for member in self._members:
            member.stop()

    def _initiate(self) -> None:
        config = {
            "_id": REPLICA_SET,
            "members": [
                {"_id": number, "host": f"127.0.0.1:{member.port}"}
                for number, member in enumerate(self._members)
            ],
            "settings": {"electionTimeoutMillis": _ELECTION_MILLISECONDS},
        }
        with self._credentials.admin(f"127.0.0.1:{self._members[0].port}") as client:
            try:
                client.admin.command("replSetInitiate", config)
            except OperationFailure as error:
                if error.code != _INITIALIZED:
                    raise StoreError(f"the replica set cannot be formed: {error}") from error
            except PyMongoError as error:
                raise StoreError(f"the replica set cannot be formed: {error}") from error


def _is_primary(member: Member) -> bool:
    address: MongoClient[dict[str, Any]] = MongoClient(
        f"127.0.0.1:{member.port}", directConnection=True, serverSelectionTimeoutMS=2000, timeoutMS=30_000
    )
    with address as client:
        try:
            return bool(client.admin.command("hello").get("isWritablePrimary"))
        except PyMongoError:
            return False


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
