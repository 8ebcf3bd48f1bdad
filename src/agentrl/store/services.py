"""InferenceServices: which engines are alive, by the server's clock."""

from __future__ import annotations

from agentrl.documents.service import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.errors import StoreError
from agentrl.store import slots
from agentrl.store.connection import Json, Repository, database_call
from agentrl.store.names import SERVICE


class Services(Repository):
    """How an engine makes itself known, and how samplers find it."""

    @database_call
    async def register(self, service: InferenceService) -> None:
        """Insert or replace the engine's document and beat once."""
        await self._collection(SERVICE).replace_one({"_id": service.id}, service.to_document(), upsert=True)
        await self._collection(SERVICE).update_one({"_id": service.id}, {"$currentDate": {"heartbeat": True}})

    @database_call
    async def beat(
        self, service_id: str, *, status: ServiceStatus, policy_version: int | None, running_requests: int,
        detail: str | None = None,
    ) -> None:  # fmt: skip
        """Renew the heartbeat and say what the engine does. StoreError if it is not registered."""
        changes = {
            "$set": {
                "status": status.value, "policy_version": policy_version,
                "running_requests": running_requests, "detail": detail,
            },
            "$currentDate": {"heartbeat": True},
        }  # fmt: skip
        result = await self._collection(SERVICE).update_one({"_id": service_id}, changes)
        if not result.matched_count:
            raise StoreError(
                f"engine {service_id} is not registered in this run's database",
                hint="was the database dropped? start the engine again",
            )

    @database_call
    async def live(self, max_age_seconds: float) -> list[InferenceService]:
        """Engines whose heartbeat is younger than ``max_age_seconds`` and that are not stopped."""
        alive = [status.value for status in ServiceStatus if status is not ServiceStatus.STOPPED]
        youngest = {"$gte": ["$heartbeat", slots.after(-max_age_seconds)]}
        query: Json = {"status": {"$in": alive}, "$expr": youngest}
        found = [
            InferenceService.from_document(document)
            async for document in self._collection(SERVICE).find(query)
        ]
        return sorted(found, key=lambda service: service.id)

    @database_call
    async def stop(self, service_id: str) -> None:
        """Say that the engine has ended."""
        await self._collection(SERVICE).update_one(
            {"_id": service_id}, {"$set": {"status": ServiceStatus.STOPPED.value, "running_requests": 0}}
        )
