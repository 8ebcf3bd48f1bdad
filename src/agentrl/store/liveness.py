"""Which samplers and engines of a run are alive, and since when those that are gone have been silent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agentrl.documents.service import InferenceService
from agentrl.documents.status import ServiceStatus, TaskStatus
from agentrl.store import slots
from agentrl.store.connection import Repository, database_call
from agentrl.store.names import RECORD, SERVICE, TASK


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """What the database knows of the processes of a run, at the server's time ``at``."""

    at: datetime
    claims: Mapping[str, int]
    """Sampler → slots that it holds under live leases."""
    last_claim: datetime | None
    """When the newest Record was begun, by its sampler's clock."""
    engines: Sequence[InferenceService]
    """Every engine that has registered, the one heard from last first."""
    alive_seconds: float
    """An engine whose heartbeat is older is dead."""

    @property
    def live_engines(self) -> list[InferenceService]:
        """Engines that are neither stopped nor dead."""
        return [
            engine
            for engine in self.engines
            if engine.status is not ServiceStatus.STOPPED
            and self._age(engine.heartbeat) <= self.alive_seconds
        ]

    def describe(self) -> str:
        """One line for a log: who is alive, and why nobody is."""
        return f"{self._samplers()}; {self._engines()}"

    def _samplers(self) -> str:
        if self.claims:
            return f"samplers: {len(self.claims)}, with {sum(self.claims.values())} claims"
        if self.last_claim is None:
            return "no sampler has begun a trajectory: is `agentrl sample` running? its log says why not"
        return f"no sampler holds a claim, the last one began {self._age(self.last_claim):.0f} s ago"

    def _engines(self) -> str:
        live = Counter(str(engine.status) for engine in self.live_engines)
        if live:
            return "engines: " + ", ".join(f"{count} {status}" for status, count in live.items())
        if not self.engines:
            return "no engine has registered: is `agentrl serve` running?"
        last = self.engines[0]
        how = "stopped" if last.status is ServiceStatus.STOPPED else "went silent"
        detail = f" ({last.detail})" if last.detail else ""
        return f"no engine is alive: {last.url} {how} {self._age(last.heartbeat):.0f} s ago{detail}"

    def _age(self, then: datetime) -> float:
        return max(0.0, (self.at - then).total_seconds())


class Presence(Repository):
    """Looks for the processes of a run; reads only."""

    @database_call
    async def look(self, split: str, alive_seconds: float) -> Liveness:
        """Who works on ``split`` now. Costs four reads, bounded by the groups that are open."""
        hello = await self._connection.client.admin.command("hello")
        newest = await self._collection(RECORD).find_one(
            {"split": split}, {"created_at": 1}, sort=[("created_at", -1)]
        )
        engines = await self._collection(SERVICE).find().sort("heartbeat", -1).to_list()
        return Liveness(
            at=hello["localTime"].replace(tzinfo=UTC),
            claims=await self._claims(split),
            last_claim=newest["created_at"] if newest else None,
            engines=[InferenceService.from_document(engine) for engine in engines],
            alive_seconds=alive_seconds,
        )

    async def _claims(self, split: str) -> dict[str, int]:
        live = {"$filter": {"input": "$slots", "as": "slot", "cond": slots.LIVE}}
        stages: list[dict[str, Any]] = [
            {"$match": {"split": split, "status": TaskStatus.RUNNING.value}},
            {"$project": {"slots": live}},
            {"$unwind": "$slots"},
            {"$group": {"_id": "$slots.owner", "claims": {"$sum": 1}}},
            {"$sort": {"_id": 1}},
        ]
        cursor = await self._collection(TASK).aggregate(stages)
        return {group["_id"]: group["claims"] for group in await cursor.to_list()}
