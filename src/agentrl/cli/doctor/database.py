"""Check the database server of a run: version, replica set, latency, clock, rights, disk."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import TYPE_CHECKING

from agentrl.cli.doctor.check import Check, State
from agentrl.config.schema import RunConfig
from agentrl.errors import AgentRLError
from agentrl.observe.redact import redact
from agentrl.store.embedded.mongod import END_OF_LIFE, support_ended_on

if TYPE_CHECKING:
    from agentrl.store.admin.server import ServerInfo

_SLOW_SECONDS = 0.05
_CLOCK_WARN = 1.0
_GIB = 2**30
_DISK_FAIL, _DISK_WARN = 1 * _GIB, 10 * _GIB


async def database_checks(run: RunConfig) -> list[Check]:
    """Return the checks of the server; one row if it cannot be reached. Creates nothing."""
    from agentrl.store.admin.server import ServerInfos
    from agentrl.store.client import open_connection

    try:
        connection = await open_connection(run)
        try:
            info = await ServerInfos(connection).read()
        finally:
            await connection.close()
    except AgentRLError as error:
        state: State = "fail" if run.db_connection_string else "warn"
        return [Check("database", state, redact(error.message), error.hint or "agentrl mongo up")]
    return list(server_checks(info, date.today()))


def server_checks(info: ServerInfo, today: date) -> Iterator[Check]:
    """Yield a check per property of the server."""
    yield _check_version(info, today)
    yield _check_latency(info)
    yield _check_clock(info)
    yield _check_rights(info)
    if info.free_bytes is not None:
        yield _check_disk(info.free_bytes)


def _check_version(info: ServerInfo, today: date) -> Check:
    name, version = "database", ".".join(map(str, info.version))
    shape = f"replica set {info.replica_set} of {info.members}" if info.replica_set else "sharded cluster"
    found = f"MongoDB {version} at {info.host}, {shape}"
    end = END_OF_LIFE.get(info.version[0])
    if end is None:
        return Check(name, "warn", f"{found}; AgentRL knows 6, 7 and 8", "use MongoDB 7 or 8")
    if support_ended_on(info.version[0], today):
        return Check(
            name, "warn", f"{found}; support of {info.version[0]}.0 ended on {end}",
            "keep it on 127.0.0.1, or name a server of version 7 or 8 with --db_connection_string",
        )  # fmt: skip
    return Check(name, "ok", f"{found}, supported until {end}")


def _check_latency(info: ServerInfo) -> Check:
    found = f"{1000 * info.latency_seconds:.1f} ms per ping"
    if info.latency_seconds <= _SLOW_SECONDS:
        return Check("database latency", "ok", found)
    hint = "run the server nearer to the samplers, or on a machine with less load"
    return Check("database latency", "warn", found, hint)


def _check_clock(info: ServerInfo) -> Check:
    offset = info.clock_offset_seconds
    side = "behind" if offset > 0 else "ahead of"
    found = f"this machine's clock is {abs(offset):.2f} s {side} the server's"
    if abs(offset) <= _CLOCK_WARN:
        return Check("clock", "ok", found)
    hint = "a run follows the server's clock, but times in logs differ: timedatectl set-ntp true"
    return Check("clock", "warn", found, hint)


def _check_rights(info: ServerInfo) -> Check:
    name = "database rights"
    if info.user is None:
        return Check(
            name, "warn", "the server asks for no login", "start mongod with --auth, and bind it to 127.0.0.1"
        )
    who = f"{info.user} ({', '.join(info.roles) or 'no roles'})"
    if not info.may_read:
        hint = "grant it a role on the run: `agentrl db users --create`"
        return Check(name, "fail", f"{who} may not read this run", hint)
    if not info.may_write:
        return Check(name, "ok", f"{who} may read, not write: enough for audit, status and dashboard")
    return Check(name, "ok", f"{who} may read and write")


def _check_disk(free: int) -> Check:
    found = f"{free / _GIB:.1f} GiB free"
    if free >= _DISK_WARN:
        return Check("database disk", "ok", found)
    hint = "free space there, or prune finished runs: agentrl db prune"
    return Check("database disk", "fail" if free < _DISK_FAIL else "warn", found, hint)
