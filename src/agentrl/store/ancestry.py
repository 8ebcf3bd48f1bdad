"""Read and write the family of a run: its parent, its children, and which run holds a document."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agentrl.documents.family import CHILD_PREFIX, PARENT, Relative, child_key
from agentrl.documents.run import TRAINER
from agentrl.documents.status import APPLIED_STEPS, values
from agentrl.errors import ConfigError, StoreError
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call, id_prefix
from agentrl.store.names import LEASE, RUN, STEP

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
