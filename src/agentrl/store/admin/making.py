"""Let one process at a time make a run in an empty database: an import, a fork or a renaming.

Two of them at once, or one that was stopped and goes on after another has finished, must not write into one
database. Why not a transaction? A run is larger than one may be. The schema document is the mark: it says
that the database is not a run yet, and who is making it one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from pymongo.errors import DuplicateKeyError

from agentrl.documents.base import now, plain
from agentrl.documents.run import SCHEMA, Maker
from agentrl.errors import LeaseLostError, StoreError
from agentrl.processes import has_ended, identify, is_observable
from agentrl.store.mechanics.connection import Connection, Json
from agentrl.store.mechanics.lease import after, renewed
from agentrl.store.names import RUN, SCHEMA_VERSION

LEASE_SECONDS = 60.0
"""After this time a process of another machine, which cannot be observed from here, counts as ended."""


class Making:
    """The right of this process to make a run of a database; ``make_run`` acquires it."""

    def __init__(self, connection: Connection, maker: str) -> None:
        self._connection = connection
        self._own = {"_id": SCHEMA, "importing": True, "maker.id": maker}

    async def renew(self) -> None:
        """Extend the lease. Raises LeaseLostError if another process makes the run."""
        until = {"$set": {"maker.lease_expires_at": after(LEASE_SECONDS)}}
        if not (await self._connection.collection(RUN).update_one(self._own, [until])).matched_count:
            raise self._lost()

    async def finish(self, schema: Json) -> None:
        """Make the database a run with the schema document ``schema``. Raises LeaseLostError as ``renew``."""
        if not (await self._connection.collection(RUN).replace_one(self._own, schema)).matched_count:
            raise self._lost()

    async def drop(self) -> bool:
        """Drop the database, unless another process makes, or has made, a run of it; return whether."""
        is_own = await self._connection.collection(RUN).find_one(self._own, {"_id": 1}) is not None
        if is_own:
            await self._connection.client.drop_database(self._connection.database.name)
        return is_own

    def _lost(self) -> LeaseLostError:
        name = self._connection.database.name
        return LeaseLostError(
            f"another process makes run {name!r} now: this one stood still for longer than its lease",
            hint="`agentrl runs` shows whether that one has finished",
        )


@asynccontextmanager
async def make_run(connection: Connection, fields: Json | None = None) -> AsyncIterator[Making]:
    """Claim a database that is empty, or that an unfinished call left, and empty it.

    The schema document has ``fields`` too while the run is made.

    A block that raises leaves it unfinished: the next call begins anew. Raises StoreError if it holds
    something else, or if the process that makes a run of it is alive.
    """
    maker = secrets.token_hex(16)
    await _claim(connection, maker, fields or {})
    making = Making(connection, maker)
    try:
        async with renewed(making.renew, LEASE_SECONDS, f"the right to make run {connection.database.name}"):
            yield making
    finally:
        own = {"_id": SCHEMA, "maker.id": maker}
        with contextlib.suppress(StoreError):
            await connection.call(
                lambda: connection.collection(RUN).update_one(own, {"$unset": {"maker": ""}}),
                "releasing the database",
            )


async def _claim(connection: Connection, maker: str, fields: Json) -> None:
    runs, name = connection.collection(RUN), connection.database.name
    held = await runs.find_one({"_id": SCHEMA})
    listed = await connection.database.list_collection_names()
    others = sorted(item for item in listed if not item.startswith("system.") and item != RUN)
    if (held is None and others) or (held is not None and not held.get("importing")):
        raise StoreError(
            f"database {name!r} is not empty: it holds {', '.join((others or [RUN])[:5])}"
            + (", …" if len(others) > 5 else ""),
            hint="give a name that no run has; `agentrl runs` lists the runs",
        )
    before = held and held.get("maker")
    if before is not None and _is_alive(other := Maker.from_document(before)):
        raise StoreError(
            f"another process makes run {name!r}: {other.pid} on {other.host}",
            hint="wait until it has ended, or kill it",
        )
    own = Maker(
        id=maker, host=socket.gethostname(), process=identify(os.getpid()),
        lease_expires_at=now() + timedelta(seconds=LEASE_SECONDS),
    )  # fmt: skip
    mark = {**fields, "version": SCHEMA_VERSION, "importing": True, "maker": plain(own)}
    try:
        if held is None:
            await runs.insert_one({"_id": SCHEMA, **mark})
        elif not (await runs.replace_one({"_id": SCHEMA, "maker": before}, mark)).matched_count:
            raise DuplicateKeyError("another call was faster")
    except DuplicateKeyError as error:
        raise StoreError(
            f"another process has just begun to make run {name!r}", hint="wait until it has ended"
        ) from error
    for item in others:
        await connection.database.drop_collection(item)
    await runs.delete_many({"_id": {"$ne": SCHEMA}})


def _is_alive(maker: Maker) -> bool:
    """Return whether the process of ``maker`` may still write: not ended here, or its lease not expired."""
    if maker.process is not None and is_observable(maker.process):
        return not has_ended(maker.process)
    return maker.lease_expires_at > now()
