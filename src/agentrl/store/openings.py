"""Openings: new groups are begun one after another, so that never more are open than the limit allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pymongo import ASCENDING, DESCENDING, ReturnDocument
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from agentrl.documents.run import ADMISSION
from agentrl.documents.status import STEPPED, DataStatus, TaskStatus, values
from agentrl.store.connection import Json, Part
from agentrl.store.names import DATA, GATE, STEP, TASK

BY_ORDER = [("epoch", ASCENDING), ("order", ASCENDING)]
_TRANSIENT = "TransientTransactionError"


@dataclass(frozen=True, slots=True)
class Room:
    """How many groups may be open; with ``after_step``, as long as that is the last committed step.

    A step that commits after the number was worked out has made room for another policy's groups.
    ``engines_lag``: it grows as soon as the engines have loaded the newest version, which nothing announces.
    """

    groups: int
    after_step: int | None = None
    engines_lag: bool = False


class OpeningRacedError(Exception):
    """Another claimer opened a group at the same moment; nothing was written."""


class Openings(Part):
    """Counts open groups, and opens one more where there is room."""

    async def count(self, split: str, session: AsyncClientSession | None = None) -> int:
        """Groups begun and not yet trained: running, waiting, or finalised with untrained data."""
        begun = [TaskStatus.RUNNING.value, TaskStatus.WAITING.value]
        running = await self._collection(TASK).count_documents(
            {"split": split, "status": {"$in": begun}}, session=session
        )
        untrained = {
            "split": split,
            "status": {"$in": [DataStatus.READY.value, DataStatus.PLANNED.value]},
            "trained_count": 0,
        }
        return running + len(await self._collection(DATA).distinct("task", untrained, session=session))

    async def open(
        self, split: str, room: Room | None, query: Mapping[str, object], update: Sequence[Json]
    ) -> Json | None:
        """Take the first Task of ``split`` that nobody has begun, by ``update``; None without one, or room.

        With a ``room`` that happens in a transaction that first writes the gate (``Admission``): of two
        claimers at once one commits, and the other is an OpeningRacedError. The count is thus taken while no
        one else can open, and the limit is exact.
        """
        created = {"split": split, "status": TaskStatus.CREATED.value, **query}
        if room is None:
            return await self._begin(created, update, None)
        tasks = self._collection(TASK)
        if room.groups <= 0:
            return None
        if await tasks.find_one(created, {"_id": 1}) is None or await self.count(split) >= room.groups:
            return None
        async with self._connection.client.start_session() as session:
            try:
                async with await session.start_transaction(
                    read_concern=ReadConcern("snapshot"), write_concern=WriteConcern(w="majority", j=True)
                ):
                    await self._collection(GATE).update_one(
                        {"_id": ADMISSION}, {"$inc": {"opened": 1}}, session=session
                    )
                    if not await self._has_room(split, room, session):
                        await session.abort_transaction()
                        return None
                    return await self._begin(created, update, session)
            except PyMongoError as error:
                if error.has_error_label(_TRANSIENT):
                    raise OpeningRacedError from error
                raise

    async def _has_room(self, split: str, room: Room, session: AsyncClientSession) -> bool:
        if room.after_step is not None:
            last = await self._collection(STEP).find_one(
                {"status": {"$in": values(STEPPED)}}, {"step": 1}, sort=[("step", DESCENDING)],
                session=session,
            )  # fmt: skip
            if (0 if last is None else last["step"]) != room.after_step:
                return False
        return await self.count(split, session) < room.groups

    async def _begin(
        self, query: Json, update: Sequence[Json], session: AsyncClientSession | None
    ) -> Json | None:
        return await self._collection(TASK).find_one_and_update(
            query, list(update), sort=BY_ORDER, return_document=ReturnDocument.AFTER, session=session
        )
