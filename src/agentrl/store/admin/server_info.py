"""Read what a MongoDB server is: version, replica set, latency, clock, disk, and the rights of this user."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pymongo.errors import OperationFailure

from agentrl.store.mechanics.connection import Json, Repository, database_call

_PINGS = 5
_WRITES = {"insert", "update"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says about itself and about this user."""

    host: str
    version: tuple[int, ...]
    replica_set: str | None
    """None behind a ``mongos``."""
    members: int
    latency_seconds: float
    """Median time of a ping."""
    clock_offset_seconds: float
    """The server's clock minus this machine's."""
    user: str | None
    """None where the server asks for no login."""
    roles: Sequence[str]
    may_read: bool
    may_write: bool
    free_bytes: int | None
    """Free space of the server's disk; None if this user may not read it."""


class ServerInfos(Repository):
    """Reads the server of the connection. It never writes."""

    @database_call
    async def read(self) -> ServerInfo:
        """Return what the server says."""
        admin = self._connection.client.admin
        version = (await admin.command("buildInfo"))["version"]
        pings, offsets, hello = [], [], {}
        for _ in range(_PINGS):
            began, clock = time.monotonic(), datetime.now(UTC)
            hello = await admin.command("hello")
            seconds = time.monotonic() - began
            pings.append(seconds)
            server = hello["localTime"].replace(tzinfo=UTC)
            offsets.append((server - clock).total_seconds() - seconds / 2)
        status = await admin.command("connectionStatus", showPrivileges=True)
        users = status["authInfo"]["authenticatedUsers"]
        roles = status["authInfo"]["authenticatedUserRoles"]
        may_read, may_write = self._rights(status["authInfo"])
        return ServerInfo(
            host=self._connection.host,
            version=tuple(int(part) for part in version.split("-")[0].split(".")),
            replica_set=hello.get("setName"),
            members=len(hello.get("hosts", ())),
            latency_seconds=statistics.median(pings),
            clock_offset_seconds=min(offsets, key=abs),
            user=f"{users[0]['user']}@{users[0]['db']}" if users else None,
            roles=sorted(f"{role['role']}@{role['db']}" for role in roles),
            may_read=may_read or not users,
            may_write=may_write or not users,
            free_bytes=await self._free_bytes(),
        )

    def _rights(self, info: Json) -> tuple[bool, bool]:
        """Return whether the user may read the run's database, and write its Records."""
        name = self._connection.database.name
        may_read = may_write = False
        for privilege in info.get("authenticatedUserPrivileges", ()):
            resource, actions = privilege["resource"], set(privilege["actions"])
            if not resource.get("anyResource") and resource.get("db") not in ("", name):
                continue
            may_read = may_read or "find" in actions
            may_write = may_write or actions >= _WRITES
        return may_read, may_write

    async def _free_bytes(self) -> int | None:
        for database in (self._connection.database, self._connection.client.admin):
            try:
                stats = await database.command("dbStats")
            except OperationFailure:
                continue
            if total := stats.get("fsTotalSize"):  # 0 for a database that does not exist yet
                return int(total - stats["fsUsedSize"])
        return None
