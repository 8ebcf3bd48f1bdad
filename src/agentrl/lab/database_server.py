"""A MongoDB server: version, clock, disk and this user's rights; and a user per kind of process."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from pymongo.errors import OperationFailure

from agentrl.errors import StoreError
from agentrl.store.gateways import allowed_actions
from agentrl.store.mechanics.connection import (
    COLUMN,
    DATA,
    EPOCH,
    EVALUATION,
    GATE,
    GATEWAY_CALL,
    GATEWAY_SESSION,
    IMAGE,
    JUDGE_CHECK,
    LABEL,
    LEASE,
    MODEL_CALL,
    OUTAGE,
    RECORD,
    RUN,
    SAMPLER,
    SERVICE,
    SETTINGS,
    STEP,
    TASK,
    TOKEN_STATISTICS,
    VERSION,
    Connection,
    Json,
    Repository,
    database_call,
)
from agentrl.store.run_list import read_disk
from agentrl.store.schema import VALIDATORS, VIEWS, prepare
from agentrl.store.settings import Ancestry

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
        allowed = allowed_actions(status["authInfo"], self._connection.database.name)
        disks = [await read_disk(each) for each in (self._connection.database, self._connection.client.admin)]
        return ServerInfo(
            host=self._connection.host,
            version=tuple(int(part) for part in version.split("-")[0].split(".")),
            replica_set=hello.get("setName"),
            members=len(hello.get("hosts", ())),
            latency_seconds=statistics.median(pings),
            clock_offset_seconds=min(offsets, key=abs),
            user=f"{users[0]['user']}@{users[0]['db']}" if users else None,
            roles=sorted(f"{role['role']}@{role['db']}" for role in roles),
            may_read="find" in allowed or not users,
            may_write=allowed >= _WRITES or not users,
            # The disk of a database that does not exist yet has a total of 0.
            free_bytes=next((disk.free for disk in disks if disk.total), None),
        )


_READ = ["find", "changeStream", "listCollections", "listIndexes", "collStats", "dbStats"]
_MAKE = ["createCollection", "createIndex", "collMod"]
_ADD, _CHANGE = ["insert"], ["insert", "update"]
_FILES = ["insert", "createIndex"]
_EDIT = ["insert", "update", "remove"]
_PASSWORD_BYTES = 24
_EXISTS = {51002, 51003}
"""The role or the user exists already."""
_NOT_ALLOWED = {13, 18}
_READER = "agentrl_auditor"
_READERS = {_READER, "agentrl_annotator"}
"""Roles that open existing runs only, and never create a schema."""


def _packed(collection: str, *more: str) -> dict[str, list[str]]:
    return {f"{collection}.packed.{part}": [*_FILES, *more] for part in ("files", "chunks")}


ROLES: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "agentrl_sampler": {
        TASK: _CHANGE, RECORD: _CHANGE, MODEL_CALL: _EDIT, DATA: _ADD, GATE: _CHANGE, EPOCH: _CHANGE,
        SETTINGS: _ADD, OUTAGE: _CHANGE, EVALUATION: _CHANGE, GATEWAY_SESSION: _CHANGE, GATEWAY_CALL: _CHANGE,
        IMAGE: _CHANGE, COLUMN: _CHANGE, SAMPLER: _CHANGE, JUDGE_CHECK: _CHANGE, **_packed(COLUMN),
        **_packed(MODEL_CALL, "remove"), **_packed(DATA), **_packed(IMAGE),
    },
    "agentrl_trainer": {
        TASK: ["update"], RECORD: ["update"], DATA: ["update"], STEP: _CHANGE, VERSION: _CHANGE,
        LEASE: _CHANGE, SETTINGS: _ADD, TOKEN_STATISTICS: _CHANGE,
    },
    "agentrl_engine": {SERVICE: _CHANGE, SETTINGS: _ADD},
    _READER: {},
    "agentrl_annotator": {LABEL: _EDIT},
}  # fmt: skip
"""Role → collection → allowed actions. Every role may read the whole run and watch its changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedUser:
    """One user. ``password`` is None unless it was generated: it is the environment's, or the old one."""

    name: str
    uri: str
    password: str | None
    is_new: bool


class Users(Repository):
    """Lists and creates database users. Its own user must have the right to manage users."""

    @database_call
    async def create(self, *, all_runs: bool = False) -> list[CreatedUser]:
        """Create or update each role, and a user of the same name.

        They belong to the run's database, and may read the run's ancestors. With ``all_runs`` they belong to
        ``admin``, with rights on every present and future run. A password is taken from
        ``AGENTRL_SAMPLER_PASSWORD`` and the like, or generated; without one in the environment, an existing
        user keeps its password.
        """
        where = "admin" if all_runs else self._connection.database.name
        if not all_runs:
            await prepare(self._connection.database)
        try:
            names = [] if all_runs else [each.run for each in await Ancestry(self._connection).lineage()]
            for name in names:  # users of a run read its ancestors too
                await self._make_role(_READER, name, privileges_of(_READER, name))
            reads = [{"role": _READER, "db": name} for name in names]
            return [await self._create(role, where, all_runs, reads) for role in ROLES]
        except OperationFailure as error:
            if error.code not in _NOT_ALLOWED:
                raise
            raise StoreError(
                f"MongoDB at {self._connection.host} does not let this user manage users",
                hint="give --db_connection_string with a user that has the role userAdmin on the database"
                " (userAdminAnyDatabase for --all_runs), on a server that runs with authentication",
            ) from error

    @database_call
    async def existing(self) -> dict[str, list[str]]:
        """Return the users of the run's database and of ``admin`` with their roles, as ``role@database``."""
        roles_of = {}
        for name in ("admin", self._connection.database.name):
            reply = await self._connection.client[name].command("usersInfo", 1)
            for user in reply["users"]:
                roles = sorted(f"{role['role']}@{role['db']}" for role in user["roles"])
                roles_of[f"{user['user']}@{name}"] = roles
        return roles_of

    async def _create(self, role: str, where: str, all_runs: bool, reads: Sequence[Json]) -> CreatedUser:
        database = self._connection.client[where]
        await self._make_role(role, where, privileges_of(role, "" if all_runs else where))
        given = os.environ.get(f"{role.upper()}_PASSWORD")
        generated = secrets.token_urlsafe(_PASSWORD_BYTES)
        grant = [{"role": role, "db": where}, *reads]
        try:
            await database.command("createUser", role, pwd=given or generated, roles=grant)
            is_new = True
        except OperationFailure as error:
            if error.code not in _EXISTS:
                raise
            changes: Json = {"roles": grant} if given is None else {"roles": grant, "pwd": given}
            await database.command("updateUser", role, **changes)
            is_new = False
        password = generated if is_new and given is None else None
        return CreatedUser(
            name=role, uri=_uri(self._connection, role, password, where), password=password, is_new=is_new
        )

    async def _make_role(self, role: str, where: str, privileges: Sequence[Json]) -> None:
        """Create a role, or update it if it exists."""
        database = self._connection.client[where]
        try:
            await database.command("createRole", role, privileges=privileges, roles=[])
        except OperationFailure as error:
            if error.code not in _EXISTS:
                raise
            await database.command("updateRole", role, privileges=privileges, roles=[])


def privileges_of(role: str, database: str) -> list[Json]:
    """Return the privileges of a role on one database with a schema; on all if ``database`` is empty.

    A role for all databases may also create the schema of a new run.
    """
    privileges = [_privilege(database, "", _READ)]
    privileges += [_privilege(database, name, actions) for name, actions in ROLES[role].items()]
    if not database and role not in _READERS:
        privileges += [_privilege("", name, _MAKE) for name in (*VALIDATORS, *VIEWS.known())]
        privileges += [_privilege("", name, _ADD) for name in (RUN, GATE)]  # never changed by them
    return privileges


def _privilege(database: str, collection: str, actions: Sequence[str]) -> Json:
    return {"resource": {"db": database, "collection": collection}, "actions": list(actions)}


def _uri(connection: Connection, name: str, password: str | None, where: str) -> str:
    """Return the connection string; without ``password``, it names the variable that holds it."""
    shown = quote(password, safe="") if password is not None else f"${name.upper()}_PASSWORD"
    replica_set = connection.client.options.replica_set_name
    options = f"&replicaSet={replica_set}" if replica_set else ""
    return f"mongodb://{name}:{shown}@{connection.host}/?authSource={where}{options}"
