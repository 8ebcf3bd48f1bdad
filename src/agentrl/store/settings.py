"""What a run is: its family, settings, functions, withdrawals; compare later processes with them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pymongo import ASCENDING
from pymongo.errors import DuplicateKeyError, OperationFailure

from agentrl.base.folder_owner import Owner, read_owner
from agentrl.documents.document import excerpt, now, plain
from agentrl.documents.run import (
    CHILD_PREFIX,
    FLAGS_PREFIX,
    IDENTITY,
    PARENT,
    TRAIN_ROLE,
    TRAINER,
    ImportList,
    Relative,
    Retraction,
    RunSettings,
    child_key,
    flags_at,
    flags_key,
)
from agentrl.documents.run import SETTINGS as CONCERNS
from agentrl.documents.status import APPLIED_STEPS, values
from agentrl.documents.training import TrainStep
from agentrl.errors import ConfigError, StoreError
from agentrl.store.mechanics.connection import (
    IMPORTS,
    LEASE,
    RECORD,
    RETRACTION,
    RUN,
    SETTINGS,
    STEP,
    Connection,
    Json,
    Repository,
    database_call,
    id_prefix,
)

CHILDREN: Json = {"_id": id_prefix(CHILD_PREFIX)}
"""The documents of ``Run`` that name children."""


class Ancestry(Repository):
    """The calls on a run's family. Children read their parent's documents; they never write them."""

    @database_call
    async def parent(self) -> Relative | None:
        """Return where this run begins in its parent; None for a run without a parent."""
        return await self._one(Relative, RUN, {"_id": PARENT})

    @database_call
    async def lineage(self) -> list[Relative]:
        """Return the parent, the grandparent and so on; empty for a run without a parent.

        Raises StoreError if one of them is not on this server.
        """
        found: list[Relative] = []
        connection = self._connection
        while document := await connection.collection(RUN).find_one({"_id": PARENT}):
            relative = Relative.from_document(document)
            if relative.run in (each.run for each in found):
                raise StoreError(f"run {relative.run!r} is its own ancestor", hint="agentrl db check")
            connection = connection.beside(relative.run)
            if await connection.collection(RUN).find_one({}, {"_id": 1}) is None:
                raise StoreError(
                    f"run {relative.run!r}, the parent of {found[-1].run if found else self._name!r}, is not"
                    f" on MongoDB at {self._connection.host}",
                    hint="import it under that name: agentrl db import DIR --run_name NAME",
                )
            found.append(relative)
        return found

    @database_call
    async def holder(self, collection: str, key: str) -> str | None:
        """Return the run that holds a document: this run or the nearest ancestor; None if no run does.

        A Task that a child copied from its parent counts as its parent's.
        """
        names = [self._name, *(relative.run for relative in await self.lineage())]
        for name in names:
            query = {"_id": key, "inherited": {"$ne": True}}
            if await self._connection.beside(name).collection(collection).find_one(query, {"_id": 1}):
                return name
        return None

    @database_call
    async def children(self) -> list[Relative]:
        """Return the children that this run knows, by name; a child may have been dropped by hand."""
        return await self._all(Relative, RUN, CHILDREN, sort=[("_id", 1)])

    @database_call
    async def living_children(self) -> list[Relative]:
        """Return the children whose database names this run as its parent. Needs rights on all runs."""
        return [child for child in await self.children() if await self._is_ours(child.run)]

    @database_call
    async def begin(self, begun: Relative) -> None:
        """Make this run the child of ``begun``, with copies of the steps in its weights. Idempotent.

        The parent's note is written first, so that what the child needs is kept. Raises as ``adopt``.
        """
        parent = self._connection.beside(begun.run)
        await Ancestry(parent).adopt(self._name, begun)
        steps = {"$match": {"status": {"$in": values(APPLIED_STEPS)}, "step": {"$lte": begun.step}}}
        await copy_into(self._connection, parent, STEP, steps, {"$set": {"inherited": True}})
        await self._collection(RUN).replace_one({"_id": PARENT}, begun.to_document(), upsert=True)

    @database_call
    async def adopt(self, name: str, begun: Relative) -> None:
        """Write the note ``child/NAME``, from which on this run keeps the checkpoint of ``begun``.

        Raises ConfigError, and writes nothing, if the trainer is deleting that checkpoint.
        """
        note = replace(begun, id=child_key(name), run=name).to_document()
        folder = Path(begun.checkpoint).name

        async def write() -> None:
            # The trainer writes the same document before it deletes a checkpoint: one of the two retries.
            await self._collection(LEASE).update_one({"_id": TRAINER}, {"$inc": {"writes": 1}})
            lease = await self._collection(LEASE).find_one({"_id": TRAINER}) or {}
            if folder in lease.get("discarded", ()):
                raise ConfigError(
                    f"{begun.checkpoint} is being deleted (--save_total_limit)",
                    hint="give a later step, or the trainer a higher --save_total_limit",
                )
            await self._collection(RUN).replace_one({"_id": note["_id"]}, note, upsert=True)

        await self._connection.transaction(write)

    @database_call
    async def release(self, name: str) -> None:
        """Delete the note of a child, whose database is gone; idempotent."""
        await self._collection(RUN).delete_one({"_id": child_key(name)})

    @database_call
    async def forget_dropped(self) -> list[str]:
        """Delete the notes of children that no longer exist; return their names."""
        living = {child.run for child in await self.living_children()}
        gone = [child.run for child in await self.children() if child.run not in living]
        for name in gone:
            await self.release(name)
        return gone

    async def require_childless(self, verb: str) -> None:
        """Raise StoreError, which names the children, if there are any; ``verb`` says what they prevent."""
        if children := await self.living_children():
            names = ", ".join(child.run for child in children[:5]) + (", …" if len(children) > 5 else "")
            raise StoreError(
                f"run {self._name!r} cannot be {verb}: it is the parent of {names}, which read its data and"
                " its checkpoints",
                hint=f"delete them first: agentrl runs rm {' '.join(child.run for child in children[:5])}",
            )

    @property
    def _name(self) -> str:
        return self._connection.database.name

    async def _is_ours(self, name: str) -> bool:
        other = await self._connection.beside(name).collection(RUN).find_one({"_id": PARENT}, {"run": 1})
        return other is not None and other["run"] == self._name


async def copy_into(child: Connection, parent: Connection, collection: str, *stages: Json) -> None:
    """Write what an aggregation in the parent yields into the child's collection, inside the server."""
    into = {"db": child.database.name, "coll": collection}
    merge = {"$merge": {"into": into, "whenMatched": "replace"}}
    await parent.collection(collection).aggregate([*stages, merge])


FIXED: Final = frozenset({"tasks", "model"})
"""Concerns whose settings cannot change once anything has been sampled."""

_OF_MODEL: Final = ("model", "files")
"""Concerns of what a model's folder holds, not of flags."""

_SHOWN = 120


logger = logging.getLogger(__name__)


def _is_taken(folder: Path, id: str) -> bool:
    try:
        owner = read_owner(folder)
    except ConfigError as error:
        logger.warning("%s is left out: %s", folder, error.message)
        return True
    return owner is not None and owner.id != id


class Settings(Repository):
    """The settings that the processes of a run must agree on, and the configuration of each role."""

    @database_call
    async def begin(self, concern: str, values: Mapping[str, Any], role: str) -> None:
        """Insert the settings of ``concern``, or compare ``values`` with the stored ones.

        Raises ConfigError that names every setting that differs. A setting that only one side has is not
        compared.
        """
        try:
            begun = settings_document(concern, values, role)
            await self._collection(SETTINGS).insert_one(begun.to_document())
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
        differs from the newest stored configuration of the role, or that was given with another value to
        another role.
        """
        more = {"given": tuple(sorted(given)), "packages": dict(packages), "threads": threads}
        own = settings_document(flags_key(role), values, role, **more)
        with suppress(DuplicateKeyError):
            await self._collection(SETTINGS).insert_one(own.to_document())
        stored = (await self.resolved()).values()
        return [line for each in stored for line in _contradictions(each, own, per_process)]

    @database_call
    async def start(self, own: RunSettings, attempt: int) -> None:
        """Store the flags of the trainer ``attempt`` unless the one before had the same. Idempotent."""
        before = flags_at(await self.starts(), attempt)
        kept = (own.values, own.given, own.packages, own.threads)
        if before is None or kept != (before.values, before.given, before.packages, before.threads):
            document = replace(own, id=flags_key(TRAIN_ROLE, attempt)).to_document()
            with suppress(DuplicateKeyError):
                await self._collection(SETTINGS).insert_one(document)

    @database_call
    async def starts(self) -> list[RunSettings]:
        """Return the flags of the trainers, in the order in which they began; see ``flags_at``."""
        return [item for item in await self.flags() if item.role == TRAIN_ROLE]

    async def checkpoint_folders(self, *, taken: bool = False) -> list[Path]:
        """Return the folders in which the run's trainers saved checkpoints, those of the newest start first.

        A start may have had another ``--output_dir``; the checkpoints of its steps stay there. Those that
        another run has by now, or whose owner cannot be read, count with ``taken`` alone.
        """
        found, name = list[Path](), self._connection.database.name
        for flags in [item.values for item in reversed(await self.starts())] or [dict[str, Any]()]:
            found.append(Path(flags.get("output_dir") or f"output/{name}"))
            if fallback := flags.get("fallback_output_dir"):
                found.append(Path(fallback) / name)
        id = (await self.owner(makes=False)).id
        return [
            root for root in dict.fromkeys(found) if taken or not await asyncio.to_thread(_is_taken, root, id)
        ]

    @database_call
    async def of_steps(self, steps: Iterable[TrainStep]) -> dict[str, RunSettings]:
        """Return {``_id`` of a step: the flags of the trainer that made it}, without steps of unknown flags.

        The first steps of a child were made by trainers of its parent.
        """
        steps, starts = list(steps), await self.starts()
        found = {step.id: made for step in steps if (made := flags_at(starts, step.attempt)) is not None}
        parent = await self._one(Relative, RUN, {"_id": PARENT})
        inherited = [step for step in steps if parent is not None and step.step <= parent.step]
        if parent is not None and inherited:
            found |= await Settings(self._connection.beside(parent.run)).of_steps(inherited)
        return found

    @database_call
    async def resolved(self) -> dict[str, RunSettings]:
        """Return {role: its newest stored configuration}: its flags, and the versions of its packages."""
        return {str(item.role): item for item in await self.flags()}

    @database_call
    async def flags(self) -> list[RunSettings]:
        """Return every stored configuration, by role; those of the trainers in their order."""
        found = await self._all(RunSettings, SETTINGS, {"_id": id_prefix(FLAGS_PREFIX)})
        return sorted(found, key=lambda item: (str(item.role), item.attempt))

    @database_call
    async def all(self) -> dict[str, RunSettings]:
        """Return {concern: its stored settings}."""
        concerns = {"_id": {"$in": [*CONCERNS]}}
        found = await self._all(RunSettings, SETTINGS, concerns, sort=[("_id", ASCENDING)])
        return {item.id: item for item in found}

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


def settings_document(key: str, values: Mapping[str, Any], role: str, **more: Any) -> RunSettings:
    """Return the document ``key`` of ``Settings``, as a process of ``role`` on this host writes it."""
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
        if stored.role == own.role or is_given:
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


class Withdrawals(Repository):
    """What ``agentrl retract`` has begun to withdraw: every trainer asks, with or without that command."""

    @database_call
    async def unfinished(self) -> list[Retraction]:
        """Return the retractions that a call began and did not finish, oldest first."""
        return await self._all(Retraction, RETRACTION, {"finished_at": None}, sort=[("_id", 1)])

    @database_call
    async def require_deleted(self) -> None:
        """Raise StoreError if a call was interrupted whose data, or whose weights, are still to be deleted.

        A trainer calls it before it reads a checkpoint or data: what it trains now, nobody finds later.
        """
        query = {"finished_at": None, "$or": [{"deleted_at": None}, {"rebuilds": True, "rebuilt": None}]}
        for item in await self._all(Retraction, RETRACTION, query, sort=[("_id", 1)], limit=1):
            run = self._connection.database.name
            raise StoreError(
                f"run {run} still holds what {item.by} withdrew on {item.at:%Y-%m-%d %H:%M} UTC: that call of"
                " `agentrl retract` was interrupted",
                hint=f"finish it first: agentrl retract {run}",
            )
