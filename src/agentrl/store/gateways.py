"""Store the base URLs of trajectories and the requests to them, so that any gateway can serve any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pymongo import ASCENDING, DESCENDING, ReturnDocument, UpdateOne
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import DuplicateKeyError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from agentrl.documents.base import now
from agentrl.documents.gateway import GatewayCall, GatewayCallStatus, GatewaySession
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store.mechanics import slots
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call
from agentrl.store.mechanics.lease import after, expired, literal, live
from agentrl.store.mechanics.write_coalescer import WriteCoalescer
from agentrl.store.names import GATEWAY_CALL, GATEWAY_SESSION, TASK

_TRIES = 64
_LIVE_CALLS = [GatewayCallStatus.RUNNING.value, GatewayCallStatus.DONE.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """A request as a gateway received it; the fields are those of GatewayCall."""

    record: str
    digest: str
    dialect: str
    answer_id: str
    gateway: str
    has_key: bool
    """Whether ``digest`` is of an idempotency key, which is valid for the whole trajectory."""

    def call(self, number: int) -> GatewayCall:
        """Return the document of this request as the ``number``-th one with its digest."""
        begun = now()
        return GatewayCall(
            id=f"{self.record}:{self.digest}:{number}", record=self.record, digest=self.digest,
            number=number, answer_id=f"{self.answer_id}{number:x}", dialect=self.dialect,
            gateway=self.gateway, status=GatewayCallStatus.RUNNING, expires_at=begun, created_at=begun,
        )  # fmt: skip


class Gateways(Repository):
    """The calls of gateways on sessions and requests. Leases and their ends are in the server's time."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._beginning = WriteCoalescer(self._begin_batch)
        self._asking = WriteCoalescer(self._calls_batch)

    @database_call
    async def open_session(self, session: GatewaySession) -> None:
        """Store the base URL of a trajectory."""
        await self._collection(GATEWAY_SESSION).insert_one(session.to_document())

    @database_call
    async def session(self, session_id: str) -> GatewaySession | None:
        """Return the session with this digest of a token; None if there is none."""
        return await self._one(GatewaySession, GATEWAY_SESSION, {"_id": session_id})

    @database_call
    async def session_of(self, record_id: str) -> GatewaySession | None:
        """Return the latest session of a Record; None if there is none."""
        return await self._one(
            GatewaySession, GATEWAY_SESSION, {"record": record_id}, sort=[("created_at", DESCENDING)]
        )

    @database_call
    async def close_session(self, session_id: str) -> GatewaySession | None:
        """Close a session: no request is answered from now on. Return it."""
        document = await self._collection(GATEWAY_SESSION).find_one_and_update(
            {"_id": session_id}, {"$currentDate": {"closed_at": True}}, return_document=ReturnDocument.AFTER
        )
        return None if document is None else GatewaySession.from_document(document)

    @database_call
    async def stop_session(self, session_id: str, limit: str) -> None:
        """Note the limit that refused a request."""
        await self._collection(GATEWAY_SESSION).update_one(
            {"_id": session_id}, {"$set": {"stopped_by": limit}}
        )

    @database_call
    async def live_calls(self, session_id: str) -> int | None:
        """Return the number of requests of a session that have an answer or are about to.

        None if the session is closed, or its claim is lost.
        """
        return await self._asking.write(session_id)

    @database_call
    async def calls_before(self, call: GatewayCall) -> int:
        """Return the number of live requests of a trajectory that are answered or began before ``call``."""
        began = {"$or": [
            {"status": GatewayCallStatus.DONE.value},
            {"created_at": {"$lt": call.created_at}},
            {"created_at": call.created_at, "_id": {"$lt": call.id}},
        ]}  # fmt: skip
        live_calls = {"record": call.record, "_id": {"$ne": call.id}, "status": {"$in": _LIVE_CALLS}}
        return await self._latest(GATEWAY_CALL).count_documents({**live_calls, **began})

    @database_call
    async def begin_first(self, request: CallRequest, lease_seconds: float) -> GatewayCall | None:
        """Store a request unless one with its digest exists; return its document, else None.

        The write is not journaled: if it is lost, ``ModelCalls.answer`` finds no request, and a retry begins
        again.
        """
        call = request.call(0)
        return call if await self._beginning.write((call, lease_seconds)) else None

    @database_call
    async def begin(
        self, request: CallRequest, *, lease_seconds: float, retry_seconds: float
    ) -> tuple[GatewayCall, bool]:
        """Return the document of a request, and whether the caller has to answer it.

        A retry gets the document of the first request: while that runs, and, for a request without an
        idempotency key, for ``retry_seconds`` after its end. A request whose gateway is gone or that failed
        is taken over.
        """
        calls = self._latest(GATEWAY_CALL)
        for _ in range(_TRIES):
            latest = await calls.find_one(
                {"record": request.record, "digest": request.digest}, sort=[("number", DESCENDING)]
            )
            if latest is None:
                begun = await self._insert(request, 0, lease_seconds)
            elif latest["gateway"] == request.gateway and latest["answer_id"].startswith(request.answer_id):
                return GatewayCall.from_document(latest), True  # an outage lost the answer of its insertion
            elif await calls.find_one(_reusable(latest["_id"], request.has_key, retry_seconds), {"_id": 1}):
                return GatewayCall.from_document(latest), False
            elif latest["status"] == GatewayCallStatus.DONE.value:
                begun = await self._insert(request, latest["number"] + 1, lease_seconds)
            else:
                begun = await self._take_over(latest, request, lease_seconds)
            if begun is not None:
                return begun, True
        raise StoreError(
            f"a request of {request.record} could not be begun: others began it {_TRIES} times",
            hint="send it again",
        )

    @database_call
    async def renew(self, call: GatewayCall, lease_seconds: float) -> None:
        """Extend the time to answer a request. Raises LeaseLostError if another gateway has taken it over."""
        update: list[Json] = [{"$set": {"expires_at": after(lease_seconds)}}]
        result = await self._collection(GATEWAY_CALL).update_one(answering(call), update)
        if not result.matched_count:
            raise LeaseLostError(f"another gateway answers the request {call.id}")

    @database_call
    async def fail(self, call: GatewayCall) -> None:
        """End a request without an answer; the same request starts again."""
        update = {"$set": {"status": GatewayCallStatus.FAILED.value}}
        await self._collection(GATEWAY_CALL).update_one(answering(call), update)

    @database_call
    async def forget(self, call: GatewayCall) -> None:
        """Delete a request to a trajectory that has ended, and may be withdrawn: its name stays nowhere."""
        await self._collection(GATEWAY_CALL).delete_one(answering(call))

    @database_call
    async def get(self, call_id: str) -> tuple[GatewayCall | None, bool]:
        """Return a request, and whether its gateway is late: it may be taken over."""
        calls = self._latest(GATEWAY_CALL)
        document = await calls.find_one({"_id": call_id})
        if document is None:
            return None, True
        is_late = await calls.find_one({"_id": call_id, **_EXPIRED}, {"_id": 1}) is not None
        return GatewayCall.from_document(document), is_late

    @database_call
    async def latest_after(self, record: str, digests: Sequence[str]) -> dict[str, GatewayCall]:
        """Return the latest answered request for each digest of a conversation that has one."""
        if not digests:
            return {}
        query = {"record": record, "after": {"$in": list(digests)}}
        calls = await self._all(GatewayCall, GATEWAY_CALL, query, sort=[("finished_at", ASCENDING)])
        return {str(call.after): call for call in calls}

    @database_call
    async def by_answer(self, record: str, answer_ids: Sequence[str]) -> dict[str, GatewayCall]:
        """Return the answered requests of a trajectory with these answer ids, by answer id."""
        query = {"record": record, "answer_id": {"$in": list(answer_ids)}, "call": {"$ne": None}}
        return {call.answer_id: call for call in await self._all(GatewayCall, GATEWAY_CALL, query)}

    async def _insert(self, request: CallRequest, number: int, lease_seconds: float) -> GatewayCall | None:
        """Insert a request; return None if another gateway did."""
        call = request.call(number)
        try:
            await self._collection(GATEWAY_CALL).update_one(
                {"_id": call.id, "digest": {"$exists": False}},
                [{"$set": _stored(call, lease_seconds)}],
                upsert=True,
            )
        except DuplicateKeyError:
            return None
        return call

    async def _begin_batch(self, batch: Sequence[tuple[GatewayCall, float]]) -> list[bool]:
        """Store requests, given with the seconds of their leases; return for each whether it is new."""
        is_new = {"$eq": [{"$type": "$digest"}, "missing"]}
        updates = [
            UpdateOne(
                {"_id": call.id},
                [{"$replaceWith": {"$cond": [
                    is_new, {"$mergeObjects": ["$$ROOT", _stored(call, lease_seconds)]}, "$$ROOT",
                ]}}],
                upsert=True,
            )
            for call, lease_seconds in batch
        ]  # fmt: skip
        result = await self._latest(GATEWAY_CALL).bulk_write(updates, ordered=False)
        inserted = result.upserted_ids or {}
        return [index in inserted for index in range(len(batch))]

    async def _calls_batch(self, session_ids: Sequence[str]) -> list[int | None]:
        """Return ``live_calls`` for each session."""
        claimed = {
            "$and": [
                slots.LIVE,
                *({"$eq": [f"$$slot.{name}", f"$${name}"]} for name in ("traj_id", "attempt", "owner")),
            ]
        }
        names = {name: f"${name}" for name in ("traj_id", "attempt", "owner")}
        pipeline: list[Json] = [
            {"$match": {"_id": {"$in": list(set(session_ids))}, "closed_at": None}},
            {"$lookup": {
                "from": TASK, "localField": "task", "foreignField": "_id", "let": names, "as": "task",
                "pipeline": [{"$match": slots.any_slot(claimed)}, {"$project": {"_id": 1}}],
            }},
            {"$match": {"task": {"$ne": []}}},
            {"$lookup": {
                "from": GATEWAY_CALL, "localField": "record", "foreignField": "record", "as": "calls",
                "pipeline": [{"$match": {"status": {"$in": _LIVE_CALLS}}}, {"$count": "count"}],
            }},
            {"$project": {"count": {"$ifNull": [{"$first": "$calls.count"}, 0]}}},
        ]  # fmt: skip
        cursor = await self._latest(GATEWAY_SESSION).aggregate(pipeline)
        counts = {session["_id"]: int(session["count"]) async for session in cursor}
        return [counts.get(session_id) for session_id in session_ids]

    def _latest(self, name: str) -> AsyncCollection[Json]:
        """Return a collection whose reads see, and whose writes are, not yet journaled."""
        return self._connection.collection(
            name, read_concern=ReadConcern("local"), write_concern=WriteConcern(w=1, j=False)
        )

    async def _take_over(
        self, latest: Json, request: CallRequest, lease_seconds: float
    ) -> GatewayCall | None:
        free: Json = {"$or": [{"status": GatewayCallStatus.FAILED.value}, _EXPIRED]}
        taken = {
            "gateway": literal(request.gateway), "status": GatewayCallStatus.RUNNING.value,
            "expires_at": after(lease_seconds),
        }  # fmt: skip
        document = await self._collection(GATEWAY_CALL).find_one_and_update(
            {"_id": latest["_id"], **free}, [{"$set": taken}], return_document=ReturnDocument.AFTER
        )
        return None if document is None else GatewayCall.from_document(document)


def _stored(call: GatewayCall, lease_seconds: float) -> Json:
    """Return the fields of a new request as expressions; its lease ends in the server's time."""
    fields = call.to_document()
    values = {name: literal(value) for name, value in fields.items() if name != "_id"}
    return {**values, "expires_at": after(lease_seconds)}


_EXPIRED: Json = {"status": GatewayCallStatus.RUNNING.value, "$expr": expired("$expires_at")}


def answering(call: GatewayCall) -> Json:
    """Return a filter for a request; it matches only while its gateway answers it."""
    return {"_id": call.id, "gateway": call.gateway, "status": GatewayCallStatus.RUNNING.value}


def _reusable(call_id: str, has_key: bool, retry_seconds: float) -> Json:
    """Return a filter for a request whose answer a retry gets."""
    recent: Json = {"$gt": ["$finished_at", after(-retry_seconds)]}
    done: Json = {"status": GatewayCallStatus.DONE.value, **({} if has_key else {"$expr": recent})}
    running: Json = {"status": GatewayCallStatus.RUNNING.value, "$expr": live("$expires_at")}
    return {"_id": call_id, "$or": [done, running]}
