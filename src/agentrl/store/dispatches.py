"""DispatchedSamplingTasks: the model calls of a trajectory, written one by one as they happen."""

from __future__ import annotations

from pymongo import ASCENDING
from pymongo.asynchronous.client_session import AsyncClientSession

from agentrl.documents.dispatch import DispatchedSamplingTask
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Claim
from agentrl.store import slots
from agentrl.store.blobs import Blobs
from agentrl.store.claims import lease_lost
from agentrl.store.connection import Connection, Json, Part, database_call
from agentrl.store.names import CALL, RECORD, TASK


class Dispatches(Part):
    """Model calls, in the order of ``Record.traj``."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._blobs = Blobs(connection, CALL)

    @database_call
    async def add(self, claim: Claim, call: DispatchedSamplingTask) -> None:
        """Store a call and count it in its Record, in one transaction; repeating it changes nothing.

        Raises LeaseLostError when the claim no longer holds or the Record is not running.
        """
        document = await self._blobs.offload(call.to_document())
        running = {"_id": claim.record_id, "owner": claim.owner, "status": RecordStatus.RUNNING.value}

        async def write(session: AsyncClientSession) -> None:
            held = await self._collection(TASK).find_one(slots.held(claim), {"_id": 1}, session=session)
            record = await self._collection(RECORD).find_one(running, {"traj": 1}, session=session)
            if held is None or record is None:
                raise lease_lost(claim)
            if call.id in record["traj"]:
                return
            await self._collection(CALL).insert_one(document, session=session)
            await self._collection(RECORD).update_one(running, _count(call), session=session)

        await self._connection.transaction(write)

    @database_call
    async def of_record(self, record_id: str) -> list[DispatchedSamplingTask]:
        """The calls of a Record, by index."""
        return (await read_calls(self._connection, [record_id])).get(record_id, [])


async def read_calls(
    connection: Connection, record_ids: list[str]
) -> dict[str, list[DispatchedSamplingTask]]:
    """The calls of several Records, by index."""
    blobs = Blobs(connection, CALL)
    calls: dict[str, list[DispatchedSamplingTask]] = {record_id: [] for record_id in record_ids}
    query = {"record": {"$in": record_ids}}
    async for document in connection.collection(CALL).find(
        query, sort=[("record", ASCENDING), ("index", ASCENDING)]
    ):
        call = DispatchedSamplingTask.from_document(await blobs.restore(document))
        calls[call.record].append(call)
    return calls


def _count(call: DispatchedSamplingTask) -> list[Json]:
    versions = [span.version for span in call.versions]
    context_reset = int(call.parent is None and call.index > 0)
    return [
        {
            "$set": {
                "traj": {"$concatArrays": ["$traj", [slots.literal(call.id)]]},
                "turns": {"$add": ["$turns", 1]},
                "tool_calls": {"$add": ["$tool_calls", len(call.tool_executions)]},
                "context_resets": {"$add": ["$context_resets", context_reset]},
                "prompt_tokens": call.prompt_tokens,
                "generated_tokens": {"$add": ["$generated_tokens", call.generated_tokens]},
                "min_version": {"$min": [*versions, "$min_version"]},
                "max_version": {"$max": [*versions, "$max_version"]},
            }
        }
    ]
