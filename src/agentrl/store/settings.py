"""What a run was begun with: written once by the first process, compared by every other."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pymongo import ASCENDING
from pymongo.errors import DuplicateKeyError

from agentrl.documents.base import now, plain
from agentrl.documents.run import FLAGS, RunSettings, flags_key
from agentrl.errors import ConfigError
from agentrl.store.connection import Repository, database_call
from agentrl.store.names import RECORD, SETTINGS

FIXED: Final = frozenset({"tasks", "model"})
"""Concerns whose settings stay as they are once anything has been sampled."""

_SHOWN = 120


class Settings(Repository):
    """The settings that the processes of a run must agree on, and the flags that each role began with."""

    @database_call
    async def begin(self, concern: str, values: Mapping[str, Any], role: str) -> None:
        """Write the settings of ``concern``, or compare them with those that are written.

        Raises ConfigError that names every setting that differs. A setting that only one side has is not
        compared.
        """
        fact = _fact(concern, values, role)
        try:
            await self._collection(SETTINGS).insert_one(fact.to_document())
        except DuplicateKeyError:
            await self.check(concern, values)

    @database_call
    async def check(self, concern: str, values: Mapping[str, Any]) -> None:
        """Compare with what is written, if anything is. Raises ConfigError as ``begin`` does."""
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
    async def keep_flags(self, role: str, values: Mapping[str, Any]) -> None:
        """Keep the flags of the first process of ``role``; they hold no secrets."""
        fact = _fact(flags_key(role), values, role)
        try:
            await self._collection(SETTINGS).insert_one(fact.to_document())
        except DuplicateKeyError:
            return

    @database_call
    async def all(self) -> list[RunSettings]:
        """The settings of every concern that has been written."""
        flags = [flags_key(role) for role in FLAGS]
        cursor = self._collection(SETTINGS).find({"_id": {"$nin": flags}}, sort=[("_id", ASCENDING)])
        return [RunSettings.from_document(document) async for document in cursor]

    @database_call
    async def forget(self, concern: str) -> RunSettings | None:
        """Delete the settings of a concern: the next process that starts writes its own. Returns them.

        Raises ConfigError where what has been sampled depends on them.
        """
        if concern in FIXED and await self._collection(RECORD).find_one({}, {"_id": 1}) is not None:
            raise ConfigError(
                f"the {concern} of run {self._connection.database.name!r} cannot change any more:"
                " trajectories have been sampled with it",
                hint="start another run: --run_name NAME",
            )
        document = await self._collection(SETTINGS).find_one_and_delete({"_id": concern})
        return None if document is None else RunSettings.from_document(document)


def _fact(key: str, values: Mapping[str, Any], role: str) -> RunSettings:
    by = f"agentrl {role} on {socket.gethostname()}"
    return RunSettings(id=key, values=plain(dict(values)), by=by, at=now())


def _differences(concern: str, begun: RunSettings, values: Mapping[str, Any]) -> Iterator[str]:
    for name, stored in begun.values.items():
        if name in values and values[name] != stored:
            what = f"the model's {name}" if concern == "model" else f"--{name}"
            yield f"{what} is {_shown(values[name])}, and the run has {_shown(stored)}"


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _hint(concern: str, run: str) -> str:
    same = "give the model that the run has" if concern == "model" else "give the flags that the run has"
    changing = f"agentrl db accept {concern} --run_name {run}"
    when = ", while nothing is sampled," if concern in FIXED else ""
    return f"{same}, or another --run_name;{when} `{changing}` lets the next process set its own"
