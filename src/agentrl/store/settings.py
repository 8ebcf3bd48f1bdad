"""Store the settings and the functions that a run began with, and compare later processes with them."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from pymongo import ASCENDING
from pymongo.errors import DuplicateKeyError, OperationFailure

from agentrl.documents.base import excerpt, now, plain
from agentrl.documents.run import FLAGS, IDENTITY, ImportList, RunSettings, flags_key
from agentrl.errors import ConfigError
from agentrl.folder_owner import Owner
from agentrl.store.mechanics.connection import Repository, database_call
from agentrl.store.names import IMPORTS, RECORD, SETTINGS

FIXED: Final = frozenset({"tasks", "model"})
"""Concerns whose settings cannot change once anything has been sampled."""

_OF_MODEL: Final = ("model", "files")
"""Concerns of what a model's folder holds, not of flags."""

_SHOWN = 120


class Settings(Repository):
    """The settings that the processes of a run must agree on, and the configuration of each role."""

    @database_call
    async def begin(self, concern: str, values: Mapping[str, Any], role: str) -> None:
        """Insert the settings of ``concern``, or compare ``values`` with the stored ones.

        Raises ConfigError that names every setting that differs. A setting that only one side has is not
        compared.
        """
        try:
            await self._collection(SETTINGS).insert_one(_document(concern, values, role).to_document())
        except DuplicateKeyError:
            await self.check(concern, values)

    @database_call
    async def check(self, concern: str, values: Mapping[str, Any]) -> None:
        """Compare with the stored settings, if there are any. Raises ConfigError as ``begin`` does."""
        document = await self._collection(SETTINGS).find_one({"_id": concern})
        if document is None:
            return
        begun = RunSettings.from_document(document)
        differing = list(_differences(concern, begun, plain(dict(values))))
        if differing:
            raise ConfigError(
                f"run {self._connection.database.name!r} was begun with other settings, by {begun.by} at"
                f" {begun.at:%Y-%m-%d %H:%M} UTC:\n  " + "\n  ".join(differing),
                hint=_hint(concern, self._connection.database.name),
            )

    @database_call
    async def join(
        self,
        role: str,
        values: Mapping[str, Any],
        *,
        given: Collection[str],
        packages: Mapping[str, str],
        threads: int | None = None,
        per_process: Collection[str] = (),
    ) -> list[str]:
        """Store the resolved configuration of the first process of ``role``, and return how others differ.

        ``values`` are all flags without secrets, ``given`` those that were given, ``packages`` the versions
        of packages, ``threads`` a trainer's. The result has a line for each flag outside ``per_process`` that
        differs from the stored configuration of the role, or that was given with another value to another
        role.
        """
        more = {"given": tuple(sorted(given)), "packages": dict(packages), "threads": threads}
        own = _document(flags_key(role), values, role, **more)
        with suppress(DuplicateKeyError):
            await self._collection(SETTINGS).insert_one(own.to_document())
        stored = (await self.resolved()).values()
        return [line for each in stored for line in _contradictions(each, own, per_process)]

    @database_call
    async def resolved(self) -> dict[str, RunSettings]:
        """Return {role: its stored configuration}: its flags, and the versions of its packages."""
        return {str(item.role): item for item in await self._stored("$in")}

    @database_call
    async def all(self) -> dict[str, RunSettings]:
        """Return {concern: its stored settings}."""
        return {item.id: item for item in await self._stored("$nin")}

    async def _stored(self, operator: str) -> list[RunSettings]:
        others = [flags_key(role) for role in FLAGS] + ([IDENTITY] if operator == "$nin" else [])
        return await self._all(RunSettings, SETTINGS, {"_id": {operator: others}}, sort=[("_id", ASCENDING)])

    @database_call
    async def owner(self, *, makes: bool = True) -> Owner:
        """Return the run as the owner of folders; the first call of all makes its id.

        Without ``makes`` nothing is written: the id of a run that has claimed nothing is empty. A rename and
        an import keep the id; a fork and a what-if have their own.
        """
        stored = await self._one(RunSettings, SETTINGS, {"_id": IDENTITY})
        if stored is None and makes:
            made = RunSettings(id=IDENTITY, values={"id": secrets.token_hex(16)}, by=_by("run"), at=now())
            with suppress(DuplicateKeyError):
                await self._collection(SETTINGS).insert_one(made.to_document())
            stored = await self._one(RunSettings, SETTINGS, {"_id": IDENTITY})
        connection, id = self._connection, "" if stored is None else str(stored.values["id"])
        return Owner(run=connection.database.name, id=id, server=connection.host)

    @database_call
    async def forget(self, concern: str) -> RunSettings | None:
        """Delete and return the settings of a concern; the next process that starts stores its own.

        Raises ConfigError if sampled trajectories depend on them.
        """
        if concern in FIXED and await self._collection(RECORD).find_one({}, {"_id": 1}) is not None:
            raise ConfigError(
                f"the {concern} of run {self._connection.database.name!r} cannot change any more:"
                " trajectories have been sampled with it",
                hint="start another run: --run_name NAME",
            )
        document = await self._collection(SETTINGS).find_one_and_delete({"_id": concern})
        return None if document is None else RunSettings.from_document(document)


def _document(key: str, values: Mapping[str, Any], role: str, **more: Any) -> RunSettings:
    return RunSettings(id=key, values=plain(dict(values)), by=_by(role), at=now(), **more)


def _by(role: str) -> str:
    return f"agentrl {role} on {socket.gethostname()}"


def _differences(concern: str, begun: RunSettings, values: Mapping[str, Any]) -> Iterator[str]:
    for name, stored in begun.values.items():
        if name in values and values[name] != stored:
            what = f"the model's {name}" if concern in _OF_MODEL else f"--{name}"
            yield f"{what} is {excerpt(values[name], _SHOWN)}, and the run has {excerpt(stored, _SHOWN)}"


def _contradictions(stored: RunSettings, own: RunSettings, per_process: Collection[str]) -> Iterator[str]:
    """Yield a line for each flag of ``own`` that contradicts ``stored``: of another role, if both gave it.

    What one role leaves at auto, another one may have resolved.
    """
    for name, value in own.values.items():
        if name in per_process or name not in stored.values or value == stored.values[name]:
            continue
        is_given = name in own.given and name in stored.given and "auto" not in (value, stored.values[name])
        if stored.id == own.id or is_given:
            other = excerpt(stored.values[name], _SHOWN)
            yield f"--{name} is {excerpt(value, _SHOWN)}, and {stored.by} has {other}"


def _hint(concern: str, run: str) -> str:
    same = "give the model that the run has" if concern in _OF_MODEL else "give the flags that the run has"
    command = f"agentrl db accept {concern} --run_name {run}"
    when = "while nothing is sampled, " if concern in FIXED else ""
    return f"{same}, or another --run_name; {when}`{command}` lets the next process set its own"


_NOT_ALLOWED = 13


class Imports(Repository):
    """The calls on the list. On a server with authentication samplers may only read it."""

    @database_call
    async def paths(self) -> frozenset[str]:
        """Return the paths that may be imported."""
        document = await self._collection(IMPORTS).find_one({"_id": ImportList().id})
        return frozenset(() if document is None else ImportList.from_document(document).paths)

    @database_call
    async def add(self, paths: Collection[str]) -> bool:
        """Add paths; return False if the database user may not."""
        if not paths or frozenset(paths) <= await self.paths():
            return True
        try:
            await self._collection(IMPORTS).update_one(
                {"_id": ImportList().id}, {"$addToSet": {"paths": {"$each": sorted(paths)}}}, upsert=True
            )
        except OperationFailure as error:
            if error.code != _NOT_ALLOWED:
                raise
            return False
        return True
