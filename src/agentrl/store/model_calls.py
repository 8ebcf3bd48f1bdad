"""Store the model calls of trajectories, each as a DispatchedSamplingTask, and the images that they show."""

from __future__ import annotations

import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bson.raw_bson import RawBSONDocument
from pymongo import ASCENDING, ReplaceOne, UpdateOne
from pymongo.errors import DuplicateKeyError

from agentrl.base.batches import weighed_batches
from agentrl.documents.document import now
from agentrl.documents.images import Image
from agentrl.documents.model_call import DispatchedSamplingTask, Spent
from agentrl.documents.record import GatewayCall, GatewayCallStatus
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Claim, record_key
from agentrl.errors import ImageError
from agentrl.store.gateways import answering
from agentrl.store.mechanics.blobs import CHECKSUMS, Blobs, sealed
from agentrl.store.mechanics.connection import (
    GATEWAY_CALL,
    IMAGE,
    MODEL_CALL,
    RECORD,
    Connection,
    Json,
    Repository,
    WriteCoalescer,
    abort,
    database_call,
)
from agentrl.store.mechanics.lease import lease_lost, literal, lost_claims
from agentrl.store.mechanics.retry import is_outage
from agentrl.store.records import running_record
from agentrl.store.settings import Ancestry

_CACHED_BYTES = 256 * 2**20
_FRESH_SECONDS = 600.0
"""Time for which an image that this process has put need not be marked as used again."""


class Images(Repository):
    """The images of tasks, tool results and requests. Large ones lie in GridFS."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._blobs = Blobs(connection, IMAGE)
        self._cached: OrderedDict[str, Image] = OrderedDict()
        self._bytes = 0
        self._put_at: dict[str, float] = {}

    @database_call
    async def put(self, *images: Image) -> None:
        """Store images. Idempotent; an image that is stored already is marked as used now."""
        for image in images:
            if time.monotonic() - self._put_at.get(image.id, -math.inf) < _FRESH_SECONDS:
                continue
            # Mark a stored image as used: pruning deletes what nothing names yet unless it was put lately.
            marked = await self._collection(IMAGE).update_one({"_id": image.id}, {"$set": {"used_at": now()}})
            if not marked.matched_count:
                document = await self._blobs.offload(image.to_document())
                with contextlib.suppress(DuplicateKeyError):  # another process stored it now
                    await self._collection(IMAGE).insert_one(document)
            self._put_at[image.id] = time.monotonic()
            self._keep(image)

    @database_call
    async def get(self, hashes: Collection[str]) -> dict[str, Image]:
        """Return images by hash. Raises ImageError for one that is not stored."""
        images = {key: self._cached[key] for key in hashes if key in self._cached}
        missing = sorted(set(hashes) - set(images))
        if missing:
            images |= await self._read(missing)
        lost: Sequence[str] = [key for key in missing if key not in images]
        if lost and (parent := await Ancestry(self._connection).parent()) is not None:
            # a child's tasks show the images of its parent
            images |= await Images(self._connection.beside(parent.run)).get(lost)
            lost = ()
        if lost:
            raise ImageError(
                f"{len(lost)} images are not stored, the first is {lost[0][:12]}…",
                hint="load the tasks again; `agentrl db prune` keeps images that tasks and calls name",
            )
        return images

    async def _read(self, hashes: Sequence[str]) -> dict[str, Image]:
        images = {}
        async for document in self._collection(IMAGE).find({"_id": {"$in": list(hashes)}}):
            image = Image.from_document(await self._blobs.restore(document))
            self._keep(image)
            images[image.id] = image
        return images

    def _keep(self, image: Image) -> None:
        if image.id in self._cached:
            return
        self._cached[image.id] = image
        self._bytes += len(image.data)
        while self._bytes > _CACHED_BYTES and len(self._cached) > 1:
            _, old = self._cached.popitem(last=False)
            self._bytes -= len(old.data)


LARGE = 256 * 1024
"""Bytes of the model calls that a trajectory adds at a time; a larger one gets a transaction of its own."""


@dataclass(frozen=True, slots=True)
class _Addition:
    """A model call to store under a claim, and its encoded document."""

    claim: Claim
    call: DispatchedSamplingTask
    document: RawBSONDocument
    new_executions: int
    """Tool runs that the stored document does not have; all of a new one's."""
    new_spent: Mapping[str, float]
    """What the stored document does not count, by field of the Record."""

    @property
    def is_new(self) -> bool:
        return self.call.revision == 0

    @property
    def count(self) -> UpdateOne:
        """Return the update that counts it in its Record, which also meets an adoption of the Record."""
        running, call = running_record(self.claim), self.call
        if self.is_new:
            return UpdateOne({**running, "traj": {"$ne": call.id}}, count_call(call))
        added = {"tool_calls": self.new_executions, **self.new_spent}
        return UpdateOne({**running, "traj": call.id}, {"$inc": added})

    @property
    def replacement(self) -> ReplaceOne[Any]:
        """Return the write that replaces its stored document."""
        # Compare revisions: the answer to an earlier try of this write may have been lost in an outage.
        return ReplaceOne({"_id": self.call.id, "revision": {"$lt": self.call.revision}}, self.document)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A model call without an index, and the request of a gateway that it answers."""

    claim: Claim
    call: DispatchedSamplingTask
    request: GatewayCall
    after: str
    key: str

    def numbered(self, index: int) -> DispatchedSamplingTask:
        """Return the model call with its index."""
        return replace(self.call, id=f"{self.claim.record_id}/{index}", index=index)

    def end(self, call: DispatchedSamplingTask) -> Json:
        """Return the update that ends the request."""
        fields: Json = {
            "status": GatewayCallStatus.DONE.value, "call": call.id, "after": self.after, "key": self.key,
        }  # fmt: skip
        return {"$set": fields, "$currentDate": {"finished_at": True}}


class ModelCalls(Repository):
    """The calls of the store on model calls, which are in the order of ``Record.traj``."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._blobs = Blobs(connection, MODEL_CALL)
        self._adding = WriteCoalescer(self._add_batch, self._add_each)
        self._answering = WriteCoalescer(self._answer_batch, self._answer)

    @database_call
    async def by_id(self, call_id: str) -> DispatchedSamplingTask | None:
        """Return one model call; None if it does not exist."""
        document = await self._collection(MODEL_CALL).find_one({"_id": call_id})
        if document is None:
            return None
        return DispatchedSamplingTask.from_document(await self._blobs.restore(document))

    async def by_record(self, record_id: str) -> list[DispatchedSamplingTask]:
        """Return the model calls of a Record, by index, with the texts and tokens that GridFS holds."""
        return (await self.by_records([record_id]))[record_id]

    @database_call
    async def by_records(self, record_ids: Sequence[str]) -> dict[str, list[DispatchedSamplingTask]]:
        """Return the model calls of each Record, as ``by_record``."""
        return await read_model_calls(self._connection, record_ids)

    @database_call
    async def add(
        self, claim: Claim, *calls: DispatchedSamplingTask, new_executions: Sequence[int] | None = None,
        new_spent: Sequence[Mapping[str, float]] | None = None,
    ) -> None:  # fmt: skip
        """Store model calls in order and count them in their Record. Idempotent.

        One with a ``revision`` replaces its stored document; ``new_executions`` counts the tool runs that the
        stored document of each lacks, and ``new_spent`` has what else it does not count. A call and its count
        share a transaction, and so do concurrent additions of several trajectories. Raises LeaseLostError if
        the claim is lost or the Record is not running, StoreError if no document can hold a call; the calls
        before it are stored.
        """
        added = [len(call.tool_executions) for call in calls] if new_executions is None else new_executions
        spent = [{}] * len(calls) if new_spent is None else new_spent
        additions: list[_Addition] = []
        error: Exception | None = None
        for call, executions, more in zip(calls, added, spent, strict=True):
            try:
                document = await encoded(self._blobs, call)
            except Exception as problem:  # noqa: BLE001  raised when the calls before it are stored
                error = problem
                break
            additions.append(_Addition(claim, call, document, executions, more))
        for group in weighed_batches(additions, lambda each: len(each.document.raw), LARGE):
            if len(group[0].document.raw) > LARGE:
                await self._add(group[0])
            else:
                await self._adding.write(group)
        if error is not None:
            raise error

    @database_call
    async def note_snapshot(self, call_id: str, attempt: int | None, reference: str | None) -> None:
        """Note where files are kept as they were after a model call that the claim ``attempt`` made.

        A late owner may do so: the call that took its place after another way has another attempt.
        """
        calls = self._collection(MODEL_CALL)
        found = await calls.find_one({"_id": call_id, "attempt": attempt})
        if found is None:
            return
        document = sealed(MODEL_CALL, {**found, "snapshot": reference}, "all")
        await calls.update_one(
            # Leave one that was written again meanwhile: the checksum is that of this one.
            {"_id": call_id, "attempt": attempt, "revision": found["revision"]},
            {"$set": {name: document[name] for name in ("snapshot", CHECKSUMS)}},
        )

    @database_call
    async def drop(self, claim: Claim, first: int) -> int:
        """Take the model calls from index ``first`` on out of the claim's trajectory; return how many.

        The trajectory went another way there. What it was until then is kept as the Record of this attempt,
        which has no other: all its calls, released, never trained. Raises LeaseLostError.
        """
        connection = self._connection
        kept_as = record_key(claim.task.id, claim.traj_id, claim.attempt)

        async def write() -> int:
            # Read in the transaction: the trajectory's writer may add what a tool has done meanwhile.
            calls = (await read_model_calls(connection, [claim.record_id]))[claim.record_id]
            copies = [await encoded(self._blobs, _moved(call, claim.record_id, kept_as)) for call in calls]
            kept, dropped = calls[:first], [call.id for call in calls[first:]]
            records = self._collection(RECORD)
            record = await records.find_one(running_record(claim))
            if record is None:
                raise lease_lost(claim)
            if await records.find_one({"_id": kept_as}, {"_id": 1}) is not None:
                return 0  # an earlier try did it, whose answer an outage lost
            traj = [kept_as + key.removeprefix(claim.record_id) for key in record["traj"]]
            branch = {
                "_id": kept_as, "attempt": claim.attempt, "traj": traj, "partial": None, "owners": [],
                "status": RecordStatus.RELEASED.value,
            }  # fmt: skip
            await records.insert_one({**record, **branch})
            await self._collection(MODEL_CALL).insert_many(copies)
            await self._collection(MODEL_CALL).delete_many({"_id": {"$in": dropped}})
            await self._blobs.delete(dropped)
            noted = {"owners.$[own].diverged_at": first, "owners.$[own].dropped": len(dropped)}
            await records.update_one(
                running_record(claim),
                {"$set": {"traj": [call.id for call in kept], **counts_of(kept), **noted}},
                array_filters=[{"own.attempt": claim.attempt}],
            )  # fmt: skip
            return len(dropped)

        return await connection.transaction(write)

    async def _add_each(self, additions: Sequence[_Addition]) -> None:
        """Store the additions of one trajectory, in one transaction or else one by one to the first error."""
        if len(additions) > 1:
            try:
                if await self._add_batch([additions]) is not None:
                    return
            except Exception as error:
                if is_outage(error):
                    raise
        for addition in additions:
            await self._add(addition)

    async def _add(self, addition: _Addition) -> None:
        claim = addition.claim
        if await self._add_batch([[addition]]) is not None:
            return
        # Look for what an earlier call has written, whose answer an outage lost.
        counted = {**running_record(claim), "traj": addition.call.id}
        written = {"_id": addition.call.id, "revision": {"$gte": addition.call.revision}}
        for collection, query in ((RECORD, counted), (MODEL_CALL, written)):
            if await self._collection(collection).find_one(query, {"_id": 1}) is None:
                raise lease_lost(claim)
        if await lost_claims(self._connection, [claim]):
            raise lease_lost(claim)

    async def _add_batch(self, groups: Sequence[Sequence[_Addition]]) -> Sequence[None] | None:
        """Store the additions of several trajectories; return None if some must be stored on their own."""
        additions = [each for group in groups for each in group]
        counts = [each.count for each in additions]
        again = [each.replacement for each in additions if not each.is_new]
        new = [each.document for each in additions if each.is_new]

        async def write() -> bool:
            # Do not read the slots: what ends a claim writes its Record too, which then does not match.
            if (await self._collection(RECORD).bulk_write(counts)).matched_count < len(counts):
                await abort()
                return False
            if new:
                await self._collection(MODEL_CALL).insert_many(new)
            if again and (await self._collection(MODEL_CALL).bulk_write(again)).matched_count < len(again):
                await abort()
                return False
            return True

        return [None] * len(groups) if await self._connection.transaction(write) else None

    @database_call
    async def answer(
        self, claim: Claim, call: DispatchedSamplingTask, request: GatewayCall, *, after: str, key: str
    ) -> DispatchedSamplingTask:
        """Store the model call of a gateway's request under the next index, and end the request.

        Both are one transaction, so that a request has one model call whoever answers it; answers of several
        trajectories share one. Return the call with its index. Raises LeaseLostError if the claim is lost,
        the Record is not running, or another gateway has taken the request over.
        """
        answer = _Answer(claim, call, request, after, key)
        packed = (call.context_ids, call.output_ids, call.sampling_mask, call.routing)
        is_large = sum(map(len, packed)) > LARGE
        return await (self._answer(answer) if is_large else self._answering.write(answer))

    async def _answer(self, answer: _Answer) -> DispatchedSamplingTask:
        """Store one answer, or return the call of an earlier one of it, whose confirmation an outage lost."""
        if (stored := await self._answer_batch([answer])) is not None:
            return stored[0]
        done = await self._collection(GATEWAY_CALL).find_one(
            {"_id": answer.request.id, "gateway": answer.request.gateway, "call": {"$ne": None}}
        )
        earlier = None if done is None else await self.by_id(done["call"])
        if earlier is None:
            raise lease_lost(answer.claim)
        return earlier

    async def _answer_batch(self, answers: Sequence[_Answer]) -> Sequence[DispatchedSamplingTask] | None:
        """Store the answers of several trajectories; return None if some must be stored on their own."""
        records = [answer.claim.record_id for answer in answers]
        # Refuse two answers of one trajectory: both would get the next index.
        if len(set(records)) < len(records):
            return None

        async def write() -> list[DispatchedSamplingTask] | None:
            query = {"_id": {"$in": records}}
            # Number by what the Record holds: an addition since this read conflicts, and all is repeated.
            cursor = self._collection(RECORD).find(query, {"size": {"$size": "$traj"}})
            sizes = {record["_id"]: record["size"] async for record in cursor}
            if len(sizes) < len(records):
                return None
            calls = [answer.numbered(sizes[answer.claim.record_id]) for answer in answers]
            counts = [
                UpdateOne(running_record(answer.claim), count_call(call))
                for answer, call in zip(answers, calls, strict=True)
            ]
            ends = [
                UpdateOne(answering(answer.request), answer.end(call))
                for answer, call in zip(answers, calls, strict=True)
            ]
            counted = await self._collection(RECORD).bulk_write(counts)
            ended = await self._collection(GATEWAY_CALL).bulk_write(ends)
            if counted.matched_count < len(calls) or ended.matched_count < len(calls):
                await abort()
                return None
            documents = [await encoded(self._blobs, call) for call in calls]
            await self._collection(MODEL_CALL).insert_many(documents)
            return calls

        return await self._connection.transaction(write)


async def read_model_calls(
    connection: Connection, record_ids: Sequence[str], *, readable: bool = True
) -> dict[str, list[DispatchedSamplingTask]]:
    """Return {record id: model calls by index}; without ``readable``, texts in GridFS stay excerpts."""
    blobs = Blobs(connection, MODEL_CALL)
    calls: dict[str, list[DispatchedSamplingTask]] = {record_id: [] for record_id in record_ids}
    query = {"record": {"$in": list(record_ids)}}
    async for document in connection.collection(MODEL_CALL).find(
        query, sort=[("record", ASCENDING), ("index", ASCENDING)]
    ):
        call = DispatchedSamplingTask.from_document(await blobs.restore(document, readable=readable))
        calls[call.record].append(call)
    return calls


async def encoded(blobs: Blobs, call: DispatchedSamplingTask) -> RawBSONDocument:
    """Return the document of a model call with its checksum, after its large fields were moved to GridFS."""
    # Encode once: the checksum is of these bytes, batches weigh them, and the driver sends them as they are.
    return RawBSONDocument(await blobs.encode(call.to_document()))


def _moved(call: DispatchedSamplingTask, record: str, to: str) -> DispatchedSamplingTask:
    """Return the model call as one of the Record ``to``, which has the same calls as ``record``."""
    parent, follows = (
        None if key is None else to + key.removeprefix(record) for key in (call.parent, call.follows)
    )
    return replace(call, id=f"{to}/{call.index}", record=to, parent=parent, follows=follows)


SPENT: Final = ("generate_seconds", *Spent._fields)
"""What a Record counts of the time and the money of its model calls."""


def spent_on(call: DispatchedSamplingTask) -> dict[str, float]:
    """Return what a Record counts of the time and the money of a model call."""
    generated = 0.0 if call.fixed else call.generate_seconds
    return {"generate_seconds": generated, **call.spent._asdict()}


def counts_of(calls: Sequence[DispatchedSamplingTask]) -> Json:
    """Return the counts of a Record with these model calls: what ``count_call`` makes of a new one."""
    versions = [span.version for call in calls for span in call.versions]
    return {
        "turns": len(calls),
        "tool_calls": sum(len(call.tool_executions) for call in calls),
        "context_resets": sum(call.is_context_reset for call in calls),
        "prompt_tokens": next((call.prompt_tokens for call in reversed(calls) if not call.fixed), 0),
        "input_tokens": sum(call.prompt_tokens for call in calls),
        "cached_tokens": sum(call.cached_tokens for call in calls),
        "generated_tokens": sum(call.generated_tokens for call in calls),
        **{name: sum(spent_on(call)[name] for call in calls) for name in SPENT},
        "min_version": min(versions, default=None),
        "max_version": max(versions, default=None),
    }


def count_call(call: DispatchedSamplingTask) -> list[Json]:
    """Return the update of a Record that counts a model call; what was kept of it before is used up."""
    versions = [span.version for span in call.versions]
    later = replace(call, index=1)
    is_reset = {"$cond": [{"$gt": [{"$size": "$traj"}, 0]}, int(later.is_context_reset), 0]}
    return [
        {
            "$set": {
                "traj": {"$concatArrays": ["$traj", [literal(call.id)]]},
                "turns": {"$add": ["$turns", 1]},
                "tool_calls": {"$add": ["$tool_calls", len(call.tool_executions)]},
                "context_resets": {"$add": ["$context_resets", is_reset]},
                "prompt_tokens": "$prompt_tokens" if call.fixed else call.prompt_tokens,
                "input_tokens": {"$add": ["$input_tokens", call.prompt_tokens]},
                "cached_tokens": {"$add": ["$cached_tokens", call.cached_tokens]},
                "generated_tokens": {"$add": ["$generated_tokens", call.generated_tokens]},
                **{
                    name: {"$add": [{"$ifNull": [f"${name}", 0]}, amount]}
                    for name, amount in spent_on(call).items()
                },
                "min_version": {"$min": [*versions, "$min_version"]},
                "max_version": {"$max": [*versions, "$max_version"]},
                "partial": None,
            }
        }
    ]
