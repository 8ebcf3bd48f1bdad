"""Register engines, samplers and outages; report who is alive and what is down; ask samplers to drain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pymongo import ASCENDING, DESCENDING, ReturnDocument

from agentrl.documents.document import plain
from agentrl.documents.run import Doing, EngineFigures, InferenceService, Outage, SamplerProcess
from agentrl.documents.status import ServiceStatus
from agentrl.errors import StoreError
from agentrl.store.claims import count_unscored, live_claims
from agentrl.store.mechanics.connection import (
    OUTAGE,
    RECORD,
    SAMPLER,
    SERVICE,
    Json,
    Repository,
    database_call,
)
from agentrl.store.mechanics.lease import after, literal

SEEN_SECONDS = 20.0
"""An outage that its process has not refreshed for this long is not known to go on."""
SERVED_VERSIONS = 20
"""How many of its last versions the document of an engine names."""


class OutageRecords(Repository):
    """The calls on Outages. Times are the server's."""

    @database_call
    async def refresh(
        self, outage_id: str, *, dependency: str, by: str, why: str, held: int, seconds: float
    ) -> None:
        """Store that an outage goes on, and has for ``seconds``. Idempotent."""
        began = {"$ifNull": ["$began_at", after(-seconds)]}
        await self._put(outage_id, dependency, by, why, held=held, began_at=began, ended_at=None)

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
        began, ended = after(-ago - seconds), after(-ago)
        await self._put(outage_id, dependency, by, why, held=0, began_at=began, ended_at=ended)

    async def _put(self, outage_id: str, dependency: str, by: str, why: str, **times: Any) -> None:
        fields = {"dependency": literal(dependency), "by": literal(by), "why": literal(why)}
        update: list[Json] = [{"$set": {**fields, "seen_at": "$$NOW", **times}}]
        await self._collection(OUTAGE).update_one({"_id": outage_id}, update, upsert=True)

    @database_call
    async def past(self, limit: int) -> list[Outage]:
        """Return the outages that ended last, the latest first."""
        return await self._all(
            Outage, OUTAGE, {"ended_at": {"$ne": None}}, sort=[("ended_at", DESCENDING)], limit=limit
        )

    @database_call
    async def ongoing(self) -> list[Outage]:
        """Return the outages that go on, the longest first."""
        recent = {"$and": [{"$gte": ["$seen_at", after(-SEEN_SECONDS)]}, {"$lte": ["$seen_at", "$$NOW"]}]}
        return await self._all(
            Outage, OUTAGE, {"ended_at": None, "$expr": recent}, sort=[("began_at", ASCENDING)]
        )


SCORING: Final = "-scoring"
"""Ends the name under which a sampler holds what it scores."""
SAMPLER_BEAT_SECONDS = 5.0
"""Interval at which a sampler sends a heartbeat, and so the time until it drains after it was asked."""
_ALIVE_SECONDS = 4 * SAMPLER_BEAT_SECONDS
_SWEPT_SECONDS = 600.0
"""A sampler that has been silent for so long is no longer listed once another one starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSampler:
    """A sampler as lists show it."""

    process: SamplerProcess
    claims: int
    """Number of slots that it holds under live leases."""
    silent_seconds: float
    """Age of its last heartbeat."""

    @property
    def is_alive(self) -> bool:
        """Return whether its last heartbeat is recent; one of the future is forged."""
        return 0 <= self.silent_seconds <= _ALIVE_SECONDS

    @property
    def state(self) -> str:
        """Return ``running``, ``asked to drain``, ``draining`` or ``dead``."""
        if not self.is_alive:
            return "dead"
        if self.process.draining_at is not None:
            return "draining"
        return "running" if self.process.asked_at is None else "asked to drain"

    @property
    def shown(self) -> str:
        """Return what it does, by its last heartbeat: ``sampling 6 trajectories``, ``draining``."""
        doing = self.process.doing
        return self.state if doing is None or self.state != "running" else doing.shown


def alive_samplers(listed: Sequence[ListedSampler], claims: Mapping[str, int]) -> dict[str, str]:
    """Return {sampler that is alive: what it does}: by its heartbeat; without any, by its claims."""
    alive = {each.process.id: each.shown for each in listed if each.is_alive}
    holders = {name.removesuffix(SCORING) for name in claims} - {each.process.id for each in listed}
    return alive | dict.fromkeys(sorted(holders), "holding claims")


class Samplers(Repository):
    """The calls on SamplerProcesses."""

    @database_call
    async def beat(
        self, sampler_id: str, *, host: str, pid: int, is_draining: bool, doing: Doing | None = None,
        gpus: int = 0,
    ) -> str | None:  # fmt: skip
        """Send a heartbeat with what it does; return who asked the sampler to drain, None if nobody has.

        The first heartbeat registers it. With ``gpus`` it is counted, and never listed.
        """
        began: Json = {"$ifNull": ["$draining_at", "$$NOW" if is_draining else None]}
        fields = {
            "host": literal(host), "pid": pid, "started_at": {"$ifNull": ["$started_at", "$$NOW"]},
            "heartbeat": "$$NOW", "draining_at": began, "ended_at": None, "doing": literal(plain(doing)),
            "gpus": gpus,
        }  # fmt: skip
        stored = await self._collection(SAMPLER).find_one_and_update(
            {"_id": sampler_id}, [{"$set": fields}], upsert=True, return_document=ReturnDocument.AFTER
        )
        return None if stored is None else stored.get("asked_by")

    @database_call
    async def sweep(self) -> int:
        """Take the samplers that have been silent for ten minutes off the list; return how many."""
        silent: Json = {"ended_at": None, "$expr": {"$lt": ["$heartbeat", after(-_SWEPT_SECONDS)]}}
        ended: list[Json] = [{"$set": {"ended_at": "$$NOW"}}]
        return (await self._collection(SAMPLER).update_many(silent, ended)).modified_count

    @database_call
    async def end(self, sampler_id: str) -> None:
        """Take a sampler that ends off the list."""
        await self._collection(SAMPLER).update_one({"_id": sampler_id}, {"$currentDate": {"ended_at": True}})

    @database_call
    async def all(self) -> list[ListedSampler]:
        """Return the samplers that have not ended, by name; dead ones too."""
        return await self.holding(await live_claims(self._connection))

    @database_call
    async def holding(self, claims: Mapping[str, int]) -> list[ListedSampler]:
        """Return the samplers that have not ended, with the numbers of ``live_claims``, by name."""
        listed: Json = {"ended_at": None, "gpus": {"$in": [0, None]}}
        found = await self._all(SamplerProcess, SAMPLER, listed, sort=[("_id", ASCENDING)])
        # Ask for the time last: a heartbeat that comes meanwhile would lie in the future.
        at = await self._connection.server_time()
        return [
            ListedSampler(
                process=each,
                claims=claims.get(each.id, 0),
                silent_seconds=(at - each.heartbeat).total_seconds(),
            )
            for each in found
        ]

    @database_call
    async def ask_to_drain(self, sampler_id: str, by: str) -> bool:
        """Ask a sampler to drain; return False if it has ended. Idempotent: the first request is kept."""
        fields = {
            "asked_at": {"$ifNull": ["$asked_at", "$$NOW"]},
            "asked_by": {"$ifNull": ["$asked_by", literal(by)]},
        }
        result = await self._collection(SAMPLER).update_one(
            {"_id": sampler_id, "ended_at": None}, [{"$set": fields}]
        )
        return result.matched_count > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The live samplers and engines of a run, at the server's time ``at``."""

    at: datetime
    claims: Mapping[str, int]
    """Sampler → number of slots that it holds under live leases."""
    listed: Sequence[ListedSampler]
    """The samplers that have not ended; dead ones too."""
    last_claim: datetime | None
    """When the newest Record was created, by its sampler's clock."""
    engines: Sequence[InferenceService]
    """Every engine that has registered, latest heartbeat first."""
    outages: Sequence[Outage]
    """What samplers find down now."""
    waiting_for_score: int
    """Number of sampled trajectories in the queue for a score."""
    alive_seconds: float
    """An engine whose heartbeat is older is dead."""

    @property
    def live_engines(self) -> list[InferenceService]:
        """Return the engines that are neither stopped nor dead."""
        return [
            engine
            for engine in self.engines
            if engine.status is not ServiceStatus.STOPPED
            and self._age(engine.heartbeat) <= self.alive_seconds
        ]

    @property
    def sampler_states(self) -> dict[str, str]:
        """Return {sampler: its state}, of all that have not ended."""
        return {each.process.id: each.state for each in self.listed}

    @property
    def samplers(self) -> dict[str, str]:
        """Return {sampler that is alive: what it does}."""
        return alive_samplers(self.listed, self.claims)

    def held(self, sampler: str) -> int:
        """Return the number of claims of a sampler, those for scoring among them."""
        return self.claims.get(sampler, 0) + self.claims.get(f"{sampler}{SCORING}", 0)

    def describe(self) -> str:
        """Return one line for a log: the live samplers and engines, and what is down."""
        parts = [self._samplers(), self._engines()]
        if self.waiting_for_score:
            parts.append(f"{self.waiting_for_score} sampled trajectories wait for a score")
        parts += [
            f"{outage.dependency}: down for {self._age(outage.began_at):.0f} s ({outage.why:.120})"
            # Name a dependency once, by who has found it down longest: of equal keys the last one stays.
            for outage in {outage.dependency: outage for outage in reversed(self.outages)}.values()
        ]
        return "; ".join(parts)

    @property
    def ending(self) -> str:
        """Return how many samplers end soon: ``1 asked to drain, 2 draining``, or nothing."""
        # Leave out the dead: those of a finished run stay listed until a sampler starts.
        counts = Counter(state for state in self.sampler_states.values() if state not in ("running", "dead"))
        return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))

    def _samplers(self) -> str:
        if self.samplers:
            works = ", ".join(f"{count} {what}" for what, count in Counter(self.samplers.values()).items())
            return f"samplers: {len(self.samplers)}, with {sum(self.claims.values())} claims, {works}"
        if self.last_claim is None:
            return "no sampler has begun a trajectory: is `agentrl sample` running? its log says why not"
        return f"no sampler is alive, the last trajectory began {self._age(self.last_claim):.0f} s ago"

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


class Services(Repository):
    """The calls on engines, and the report of which engines and samplers are alive."""

    @database_call
    async def register(self, service: InferenceService) -> None:
        """Insert or replace the engine's document and send its first heartbeat."""
        await self._collection(SERVICE).replace_one({"_id": service.id}, service.to_document(), upsert=True)
        # Take the server's time in a second write: a replacement document cannot ask for it.
        await self._collection(SERVICE).update_one({"_id": service.id}, {"$currentDate": {"heartbeat": True}})

    @database_call
    async def beat(
        self, service_id: str, *, status: ServiceStatus, policy_version: int, running_requests: int,
        running_tokens: int = 0, context_length: int | None = None, detail: str | None = None,
        adapter: str | None = None,
        needs_full: bool = False, figures: EngineFigures | None = None,
    ) -> None:  # fmt: skip
        """Send a heartbeat with the engine's state, and record when its version changes.

        Raises StoreError if the engine is not registered.
        """
        served = {"$ifNull": ["$served", []]}
        loaded = {"$concatArrays": [served, [{"version": policy_version, "at": "$$NOW"}]]}
        is_same = {"$eq": [policy_version, "$policy_version"]}
        fields = {
            "status": literal(status.value), "policy_version": policy_version,
            "running_requests": running_requests, "running_tokens": running_tokens,
            "context_length": context_length, "detail": literal(detail), "needs_full": needs_full,
            "figures": literal(plain(figures)),
            "heartbeat": "$$NOW", "adapter": literal(adapter),
            "served": {"$cond": [is_same, served, {"$slice": [loaded, -SERVED_VERSIONS]}]},
        }  # fmt: skip
        result = await self._collection(SERVICE).update_one({"_id": service_id}, [{"$set": fields}])
        if not result.matched_count:
            raise StoreError(
                f"engine {service_id} is not registered in this run's database",
                hint="was the database dropped? start the engine again",
            )

    @database_call
    async def live(self, max_age_seconds: float) -> list[InferenceService]:
        """Return the engines that are not stopped and whose heartbeat is newer than ``max_age_seconds``."""
        alive = [status.value for status in ServiceStatus if status is not ServiceStatus.STOPPED]
        recent = {"$gte": ["$heartbeat", after(-max_age_seconds)]}
        query: Json = {"status": {"$in": alive}, "$expr": recent}
        services = await self._all(InferenceService, SERVICE, query)
        return sorted(services, key=lambda service: service.id)

    @database_call
    async def stop(self, service_id: str) -> None:
        """Mark the engine as stopped."""
        await self._collection(SERVICE).update_one(
            {"_id": service_id},
            {"$set": {"status": ServiceStatus.STOPPED.value, "running_requests": 0, "running_tokens": 0}},
        )

    @database_call
    async def liveness(self, split: str, alive_seconds: float) -> Liveness:
        """Return who works on ``split`` now. Costs eight reads, bounded by the number of open groups."""
        at = await self._connection.server_time()
        newest = await self._collection(RECORD).find_one(
            {"split": split}, {"created_at": 1}, sort=[("created_at", -1)]
        )
        engines = await self._all(InferenceService, SERVICE, {}, sort=[("heartbeat", DESCENDING)])
        claims = await live_claims(self._connection, split)
        return Liveness(
            at=at,
            claims=claims,
            listed=await Samplers(self._connection).holding(claims),
            last_claim=newest["created_at"] if newest else None,
            engines=engines,
            outages=await OutageRecords(self._connection).ongoing(),
            waiting_for_score=await count_unscored(self._connection, split),
            alive_seconds=alive_seconds,
        )
