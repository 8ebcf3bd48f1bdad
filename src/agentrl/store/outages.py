"""Store the outages that samplers see, and list those that go on."""

from __future__ import annotations

from pymongo import ASCENDING, DESCENDING

from agentrl.documents.outage import Outage
from agentrl.store.connection import Json, Repository, database_call
from agentrl.store.lease import after, literal
from agentrl.store.names import OUTAGE

SEEN_SECONDS = 20.0
"""An outage that its process has not refreshed for this long is not known to go on."""


class OutageRecords(Repository):
    """The calls on Outages. Times are the server's."""

    @database_call
    async def refresh(
        self, outage_id: str, *, dependency: str, by: str, why: str, held: int, seconds: float
    ) -> None:
        """Store that an outage goes on, and has for ``seconds``. Idempotent."""
        fields: Json = {
            "dependency": literal(dependency), "by": literal(by), "why": literal(why),
            "held": held, "seen_at": "$$NOW", "ended_at": None,
            "began_at": {"$ifNull": ["$began_at", after(-seconds)]},
        }  # fmt: skip
        await self._collection(OUTAGE).update_one({"_id": outage_id}, [{"$set": fields}], upsert=True)

    @database_call
    async def end(self, outage_id: str) -> None:
        """Store that an outage has ended."""
        changes: Json = {"$set": {"held": 0}, "$currentDate": {"seen_at": True, "ended_at": True}}
        await self._collection(OUTAGE).update_one({"_id": outage_id}, changes)

    @database_call
    async def add_past(
        self, outage_id: str, *, dependency: str, by: str, why: str, ago: float, seconds: float
    ) -> None:
        """Store an outage that ended ``ago`` seconds ago, after ``seconds``. Idempotent."""
        fields: Json = {
            "dependency": literal(dependency), "by": literal(by), "why": literal(why),
            "held": 0, "seen_at": "$$NOW", "began_at": after(-ago - seconds),
            "ended_at": after(-ago),
        }  # fmt: skip
        await self._collection(OUTAGE).update_one({"_id": outage_id}, [{"$set": fields}], upsert=True)

    @database_call
    async def past(self, limit: int) -> list[Outage]:
        """Return the outages that ended last, the latest first."""
        cursor = self._collection(OUTAGE).find(
            {"ended_at": {"$ne": None}}, sort=[("ended_at", DESCENDING)], limit=limit
        )
        return [Outage.from_document(document) async for document in cursor]

    @database_call
    async def ongoing(self) -> list[Outage]:
        """Return the outages that go on, the longest first."""
        recent = {"$gte": ["$seen_at", after(-SEEN_SECONDS)]}
        cursor = self._collection(OUTAGE).find(
            {"ended_at": None, "$expr": recent}, sort=[("began_at", ASCENDING)]
        )
        return [Outage.from_document(document) async for document in cursor]
