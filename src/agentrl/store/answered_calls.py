"""Store the model calls of gateways: each under the next index of its Record, with the end of its request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pymongo import UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.gateway import GatewayCall, GatewayCallStatus
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Claim
from agentrl.store.blobs import Blobs
from agentrl.store.connection import Connection, Json, Repository, database_call
from agentrl.store.lease import literal
from agentrl.store.model_calls import LARGE, count_call, encoded
from agentrl.store.names import GATEWAY_CALL, MODEL_CALL, RECORD
from agentrl.store.slots import lease_lost, lost_claims
from agentrl.store.write_coalescer import WriteCoalescer


@dataclass(frozen=True, slots=True)
class _Answer:
    """A model call without an index, and the request that it answers."""

    claim: Claim
    call: DispatchedSamplingTask
    request: GatewayCall
    after: str

    @property
    def is_large(self) -> bool:
        """Return whether the model call gets a transaction of its own."""
        return len(self.call.context_ids) + len(self.call.output_ids) > LARGE

    @property
    def running(self) -> Json:
        """Return a filter for the claim's Record; it matches only while calls may be added."""
        return {
            "_id": self.claim.record_id, "owner": self.claim.owner, "status": RecordStatus.RUNNING.value,
        }  # fmt: skip

    @property
    def mine(self) -> Json:
        """Return a filter for the request; it matches only while its gateway answers it."""
        return {
            "_id": self.request.id, "gateway": self.request.gateway,
            "status": GatewayCallStatus.RUNNING.value,
        }  # fmt: skip

    def numbered(self, index: int) -> DispatchedSamplingTask:
        """Return the model call with its index."""
        return replace(self.call, id=f"{self.claim.record_id}/{index}", index=index)

    def end(self, call: DispatchedSamplingTask) -> Json:
        """Return the update that ends the request."""
        fields: Json = {"status": GatewayCallStatus.DONE.value, "call": call.id, "after": self.after}
        return {"$set": fields, "$currentDate": {"finished_at": True}}


class AnsweredCalls(Repository):
    """The calls of the store on model calls that answer a gateway's requests."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._blobs = Blobs(connection, MODEL_CALL)
        self._adding = WriteCoalescer(self._add_batch, self._add)

    @database_call
    async def add(
        self, claim: Claim, call: DispatchedSamplingTask, request: GatewayCall, after: str
    ) -> DispatchedSamplingTask:
        """Store the model call of a gateway's request under the next index, and end the request.

        Both are one transaction, so that a request has one model call whoever answers it; answers of several
        trajectories share one. Return the call with its index. Raises LeaseLostError if the claim is lost,
        the Record is not running, or another gateway has taken the request over.
        """
        answer = _Answer(claim, call, request, after)
        return await (self._add(answer) if answer.is_large else self._adding.write(answer))

    async def _add(self, answer: _Answer) -> DispatchedSamplingTask:
        record = answer.claim.record_id
        next_id: Json = {"$concat": [literal(f"{record}/"), {"$toString": {"$size": "$traj"}}]}

        async def write(session: AsyncClientSession) -> DispatchedSamplingTask:
            lost, before = await asyncio.gather(
                lost_claims(self._connection, [answer.claim]),
                self._collection(RECORD).find_one_and_update(
                    answer.running, count_call(answer.call, next_id), {"traj": 1}, session=session
                ),
            )
            if lost or before is None:
                return await self._stored_before(answer, session)
            call = answer.numbered(len(before["traj"]))
            ended = await self._collection(GATEWAY_CALL).update_one(
                answer.mine, answer.end(call), session=session
            )
            if ended.matched_count == 0:
                return await self._stored_before(answer, session)
            await self._collection(MODEL_CALL).insert_one(await encoded(self._blobs, call), session=session)
            return call

        return await self._connection.transaction(write)

    async def _stored_before(self, answer: _Answer, session: AsyncClientSession) -> DispatchedSamplingTask:
        """Return the call that an earlier transaction wrote, whose answer an outage lost.

        Raises LeaseLostError if there is none.
        """
        done = await self._collection(GATEWAY_CALL).find_one(
            {"_id": answer.request.id, "gateway": answer.request.gateway, "call": {"$ne": None}},
            session=session,
        )
        if done is None:
            raise lease_lost(answer.claim)
        found = await self._collection(MODEL_CALL).find_one({"_id": done["call"]}, session=session)
        await session.abort_transaction()
        assert found is not None  # the same transaction wrote it
        return DispatchedSamplingTask.from_document(await self._blobs.restore(found))

    async def _add_batch(self, answers: Sequence[_Answer]) -> Sequence[DispatchedSamplingTask] | None:
        """Store the answers of several trajectories; return None if some must be stored on their own."""
        records = [answer.claim.record_id for answer in answers]
        if len(set(records)) < len(records):
            return None

        async def write(session: AsyncClientSession) -> list[DispatchedSamplingTask] | None:
            query = {"_id": {"$in": records}}
            found = self._collection(RECORD).find(query, {"size": {"$size": "$traj"}}, session=session)
            sizes = {record["_id"]: record["size"] for record in await found.to_list()}
            if len(sizes) < len(records):
                return None
            calls = [answer.numbered(sizes[answer.claim.record_id]) for answer in answers]
            counts = [
                UpdateOne(answer.running, count_call(call, literal(call.id)))
                for answer, call in zip(answers, calls, strict=True)
            ]
            ends = [
                UpdateOne(answer.mine, answer.end(call)) for answer, call in zip(answers, calls, strict=True)
            ]
            lost, counted = await asyncio.gather(
                lost_claims(self._connection, [answer.claim for answer in answers]),
                self._collection(RECORD).bulk_write(counts, session=session),
            )
            ended = await self._collection(GATEWAY_CALL).bulk_write(ends, session=session)
            if lost or counted.matched_count < len(calls) or ended.matched_count < len(calls):
                await session.abort_transaction()
                return None
            documents = [await encoded(self._blobs, call) for call in calls]
            await self._collection(MODEL_CALL).insert_many(documents, session=session)
            return calls

        return await self._connection.transaction(write)
