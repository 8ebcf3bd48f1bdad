"""What comes to trajectories from outside: base URLs, requests, conversations, feedback, labels."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pymongo import ASCENDING, DESCENDING, ReturnDocument, UpdateOne
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import DuplicateKeyError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from agentrl.base.processes import user_name
from agentrl.documents.document import now, plain, replace_surrogates
from agentrl.documents.record import (
    GatewayCall,
    GatewayCallStatus,
    GatewaySession,
    Label,
    ReportedReward,
    check_label,
    label_key,
)
from agentrl.documents.status import RecordStatus, SlotStatus, TaskStatus, values
from agentrl.documents.task import CONVERSATIONS, FEEDBACK, Claim, Slot, Task, task_key
from agentrl.errors import LeaseLostError, StoreError
from agentrl.store.mechanics import lease
from agentrl.store.mechanics.blobs import sealed
from agentrl.store.mechanics.connection import (
    GATEWAY_CALL,
    GATEWAY_SESSION,
    LABEL,
    RECORD,
    TASK,
    Connection,
    Json,
    Repository,
    WriteCoalescer,
    database_call,
)
from agentrl.store.mechanics.lease import after, expired, literal, live
from agentrl.store.records import new_record

_WRITES = {"insert", "update", "remove"}


class Labels(Repository):
    """The calls on Labels. Only users with the role ``agentrl_annotator``, or an administrator, may write."""

    @database_call
    async def put(
        self, record_id: str, *, by: str, label: str, note: str = "", score: float | None = None
    ) -> Label:
        """Store a person's label of a Record in place of the person's earlier one, and return it. Idempotent.

        Raises ConfigError for a bad text or score, StoreError if there is no such Record.
        """
        by, label, note = (replace_surrogates(text.strip()) for text in (by, label, note))
        check_label(label=label, note=note, by=by, score=score)
        if await self._collection(RECORD).find_one({"_id": record_id}, {"_id": 1}) is None:
            raise StoreError(f"there is no Record {record_id[:200]!r} to label")
        fields: Json = {
            "record": literal(record_id), "by": literal(by), "label": literal(label),
            "note": literal(note), "score": score,
            "written_by": literal(await self._writer()),
            "created_at": {"$ifNull": ["$created_at", "$$NOW"]}, "updated_at": "$$NOW",
        }  # fmt: skip
        key = label_key(record_id, by)
        await self._collection(LABEL).update_one({"_id": key}, [{"$set": fields}], upsert=True)
        return Label.from_document(await self._collection(LABEL).find_one({"_id": key}) or {})

    @database_call
    async def remove(self, record_id: str, *, by: str) -> bool:
        """Delete a person's label of a Record; return whether there was one."""
        result = await self._collection(LABEL).delete_one({"_id": label_key(record_id, by.strip())})
        return result.deleted_count > 0

    @database_call
    async def of_records(self, record_ids: Sequence[str]) -> dict[str, list[Label]]:
        """Return {Record id: its labels, oldest first}; Records without one are absent."""
        query, oldest = {"record": {"$in": list(record_ids)}}, [("created_at", ASCENDING), ("_id", ASCENDING)]
        labels: dict[str, list[Label]] = {}
        for label in await self._all(Label, LABEL, query, sort=oldest):
            labels.setdefault(label.record, []).append(label)
        return labels

    @database_call
    async def scores(self) -> dict[str, float]:
        """Return {Record id: the mean score of its labels} of every Record with a label that has a score."""
        mean = {"$group": {"_id": "$record", "score": {"$avg": "$score"}}}
        groups = await self._aggregate(LABEL, {"$match": {"score": {"$ne": None}}}, mean)
        return {group["_id"]: group["score"] for group in groups}

    @database_call
    async def writers(self) -> dict[str, int]:
        """Return {who: number of labels with a score}: the name given, and who wrote it."""
        groups = await self._aggregate(
            LABEL,
            {"$match": {"score": {"$ne": None}}},
            {"$group": {"_id": {"by": "$by", "written_by": "$written_by"}, "count": {"$sum": 1}}},
            {"$sort": {"count": -1, "_id": 1}},
        )
        return {
            f"{who['_id']['by']} (written by {who['_id'].get('written_by') or 'unknown'})": who["count"]
            for who in groups
        }

    @database_call
    async def counts(self) -> dict[str, int]:
        """Return {label: number of trajectories}, the most frequent first."""
        groups = await self._aggregate(LABEL, {"$sortByCount": "$label"}, {"$limit": 200})
        return {group["_id"]: group["count"] for group in groups}

    @database_call
    async def may_write(self) -> bool:
        """Return whether this connection's user may write labels; without authentication everybody may."""
        info = await self._connection_status()
        if not info["authenticatedUsers"]:
            return True
        return allowed_actions(info, self._connection.database.name, LABEL) >= _WRITES

    async def _writer(self) -> str:
        """Return who writes: the user of this process and its host, and the database user."""
        users = (await self._connection_status())["authenticatedUsers"]
        names = ", ".join(user["user"] for user in users) or "without authentication"
        return f"{user_name()} on {socket.gethostname()}, database user {names}"

    async def _connection_status(self) -> Json:
        status = await self._connection.database.command({"connectionStatus": 1, "showPrivileges": True})
        info: Json = status["authInfo"]
        return info


def allowed_actions(info: Json, database: str, collection: str | None = None) -> set[str]:
    """Return what the user of ``authInfo`` may do in a collection of a database; None: in any of them."""
    allowed: set[str] = set()
    for privilege in info.get("authenticatedUserPrivileges", ()):
        resource = privilege["resource"]
        covers = resource.get("db") in ("", database)
        covers &= collection is None or resource.get("collection") in ("", collection)
        if covers or resource.get("anyResource"):
            allowed |= set(privilege["actions"])
    return allowed


_CLOSE_SECONDS = 60.0
"""Lease of a process that ends a conversation; another one ends it if that process dies."""
_TAKES_FEEDBACK = values((RecordStatus.RUNNING, RecordStatus.COMPLETED))


class Conversations(Repository):
    """The calls on conversations and on feedback.

    A conversation is a Task of the epoch ``CONVERSATIONS`` with one slot, which is running while the
    conversation is: its owner is the conversation itself, not a process, and its lease is the time that a
    user may be silent. So any gateway serves it, and none has to live as long. Samplers leave it alone.
    """

    @database_call
    async def open(
        self, name: str, session: GatewaySession, *, query: str, meta: dict[str, Any], train: str,
        order: int, idle_seconds: float,
    ) -> Claim:  # fmt: skip
        """Store a conversation with its base URL, and return its claim. ``order`` sorts conversations."""
        task = Task(
            id=session.task, task_id=name, split=session.task.partition("/")[0], epoch=CONVERSATIONS,
            order=order, query=query, scorer=FEEDBACK, meta=meta, slots=(Slot(traj_id=session.traj_id),),
        )  # fmt: skip

        async def write() -> Claim:
            document = sealed(TASK, task.to_document(), "content")
            await self._collection(TASK).insert_one(document)
            claimed = await self._collection(TASK).find_one_and_update(
                {"_id": task.id}, lease.claim_slots(lease.OPEN, [session.owner], idle_seconds),
                return_document=ReturnDocument.AFTER,
            )  # fmt: skip
            assert claimed is not None  # the same transaction inserted it
            (claim,) = lease.new_claims(claimed, [session.owner])
            record = replace(new_record(claim), status=RecordStatus.RUNNING, train_rule=train)
            await self._collection(RECORD).insert_one(record.to_document())
            await self._collection(GATEWAY_SESSION).insert_one(session.to_document())
            return claim

        return await self._connection.transaction(write)

    @database_call
    async def running(self, split: str, name: str) -> Claim | None:
        """Return the claim of a conversation that has not ended; None if it has, or never was."""
        task = await self._one(Task, TASK, {"_id": task_key(split, CONVERSATIONS, name)})
        return None if task is None else _running(task)

    @database_call
    async def take_silent(self, split: str) -> Claim | None:
        """Return the claim of a conversation whose user has been silent for too long; None if there is none.

        The caller ends it. If it dies, the conversation is returned again after a minute.
        """
        query = {
            "split": split, "status": TaskStatus.RUNNING.value, "epoch": CONVERSATIONS,
            **lease.overdue(lease.EXPIRED),
        }  # fmt: skip
        update = lease.change_slots(lease.EXPIRED, {"lease_expires_at": after(_CLOSE_SECONDS)})
        found = await self._collection(TASK).find_one_and_update(
            query, update, return_document=ReturnDocument.AFTER
        )
        return None if found is None else _running(Task.from_document(found))

    @database_call
    async def give_feedback(self, record_id: str, reward: ReportedReward) -> RecordStatus | None:
        """Store the feedback for a trajectory without a score; the last one counts.

        A running one is scored when it ends, a sampled one now. Return None; or the status of a Record that
        takes none, because it has a score or has failed. Raises StoreError if there is no such Record, and if
        its task is not scored by feedback.
        """
        unread = {"status": RecordStatus.SCORING.value, "reported_reward": None}
        query = {"_id": record_id, "$or": [{"status": {"$in": _TAKES_FEEDBACK}}, unread]}
        waits: Json = {"$and": [lease.SAMPLED, {"$eq": ["$$slot.record_id", {"$literal": record_id}]}]}

        async def write() -> Json | None:
            found = await self._collection(RECORD).find_one({"_id": record_id}, {"task": 1}) or {}
            task = await self._collection(TASK).find_one({"_id": found.get("task")}, {"scorer": 1}) or {}
            if task.get("scorer", FEEDBACK) != FEEDBACK:
                raise StoreError(
                    f"{record_id[:200]} is scored by {task['scorer']}: it takes no feedback",
                    hint="a Label with a score and `agentrl db rescore --from_labels` change a score",
                )
            record = await self._collection(RECORD).find_one_and_update(
                query, {"$set": {"reported_reward": plain(reward)}}, {"task": 1, "status": 1}
            )
            if record is not None and record["status"] == RecordStatus.COMPLETED.value:
                await self._collection(TASK).update_one(
                    {"_id": record["task"], **lease.any_slot(waits)},
                    lease.change_slots(waits, {"not_before": None}),
                )
            return record

        if await self._connection.transaction(write) is not None:
            return None
        found = await self._collection(RECORD).find_one({"_id": record_id}, {"status": 1})
        if found is None:
            raise StoreError(
                f"there is no trajectory {record_id[:200]!r} that could get feedback",
                hint="give the id of a conversation, or the _id of a Record",
            )
        return RecordStatus(found["status"])


def _running(task: Task) -> Claim | None:
    """Return the claim of the conversation ``task``."""
    slot = task.slots[0]
    if slot.status is not SlotStatus.RUNNING or slot.owner is None:
        return None
    return lease.claim_of(task, slot, slot.owner)


_TRIES = 64
_LIVE_CALLS = [GatewayCallStatus.RUNNING.value, GatewayCallStatus.DONE.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """A request as a gateway received it; the fields are those of GatewayCall."""

    record: str
    attempt: int
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
            id=f"{self.record}:{self.digest}:{number}", record=self.record, attempt=self.attempt,
            digest=self.digest, number=number, answer_id=f"{self.answer_id}{number:x}", dialect=self.dialect,
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

        Those of earlier owners do not count, unless its program sent them again. None if the session is
        closed, or its claim is lost.
        """
        return await self._asking.write(session_id)

    @database_call
    async def calls_before(self, call: GatewayCall) -> int:
        """Return the number of live requests of its owner that are answered or began before ``call``."""
        began = {"$or": [
            {"status": GatewayCallStatus.DONE.value},
            {"created_at": {"$lt": call.created_at}},
            {"created_at": call.created_at, "_id": {"$lt": call.id}},
        ]}  # fmt: skip
        live_calls = {
            "record": call.record, "attempt": call.attempt, "_id": {"$ne": call.id},
            "status": {"$in": _LIVE_CALLS},
        }  # fmt: skip
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
            elif await calls.find_one(
                _reusable(latest["_id"], request.has_key, retry_seconds), {"_id": 1}
            ) and not await self._is_repeated(latest, request.has_key):
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
    async def take_earlier(self, call: GatewayCall, key: str) -> GatewayCall | None:
        """Return the first answered request of earlier owners with this key; None if there is none.

        Each is taken once under an attempt, by ``call``. Idempotent.
        """
        mine = {"replayed_by": call.id, "replayed_in": call.attempt}
        query = _earlier(call.record, key, call.attempt)
        query["$or"].append(mine)
        document = await self._collection(GATEWAY_CALL).find_one_and_update(
            query, {"$set": mine}, sort=[("created_at", ASCENDING), ("_id", ASCENDING)]
        )
        return None if document is None else GatewayCall.from_document(document)

    @database_call
    async def replay(self, call: GatewayCall, earlier: GatewayCall) -> None:
        """End a request with the model call of ``earlier``. Idempotent.

        Raises LeaseLostError if another gateway has taken the request over.
        """
        # Match what an earlier try has written too: an outage may have lost its confirmation.
        mine: Json = {
            "_id": call.id, "gateway": call.gateway,
            "$or": [{"status": GatewayCallStatus.RUNNING.value}, {"replays": earlier.id}],
        }  # fmt: skip
        fields: Json = {
            "status": GatewayCallStatus.DONE.value, "call": earlier.call, "after": earlier.after,
            "key": earlier.key, "replays": earlier.id,
        }  # fmt: skip
        result = await self._collection(GATEWAY_CALL).update_one(
            mine, {"$set": fields, "$currentDate": {"finished_at": True}}
        )
        if not result.matched_count:
            raise LeaseLostError(f"another gateway answers the request {call.id}")

    @database_call
    async def answered(self, record: str, attempt: int) -> list[str]:
        """Return the model calls that the requests under ``attempt`` got, also those of earlier owners."""
        query = {"record": record, "attempt": attempt, "call": {"$ne": None}}
        calls: list[str] = await self._collection(GATEWAY_CALL).distinct("call", query)
        return calls

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

    async def _is_repeated(self, latest: Json, has_key: bool) -> bool:
        """Return whether an earlier owner's program sent the replayed request ``latest`` once more.

        Time cannot tell its next sending from a retry: replayed answers come at once.
        """
        if has_key or latest.get("replays") is None:
            return False
        query = _earlier(latest["record"], latest["key"], latest["attempt"])
        return await self._latest(GATEWAY_CALL).find_one(query, {"_id": 1}) is not None

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
                lease.LIVE,
                *({"$eq": [f"$$slot.{name}", f"$${name}"]} for name in ("traj_id", "attempt", "owner")),
            ]
        }
        names = {name: f"${name}" for name in ("traj_id", "attempt", "owner")}
        of_this_owner = {"$eq": [{"$ifNull": ["$attempt", 1]}, "$$attempt"]}
        pipeline: list[Json] = [
            {"$match": {"_id": {"$in": list(set(session_ids))}, "closed_at": None}},
            {"$lookup": {
                "from": TASK, "localField": "task", "foreignField": "_id", "let": names, "as": "task",
                "pipeline": [{"$match": lease.any_slot(claimed)}, {"$project": {"_id": 1}}],
            }},
            {"$match": {"task": {"$ne": []}}},
            {"$lookup": {
                "from": GATEWAY_CALL, "localField": "record", "foreignField": "record", "as": "calls",
                "let": {"attempt": "$attempt"},
                "pipeline": [
                    {"$match": {"status": {"$in": _LIVE_CALLS}, "$expr": of_this_owner}},
                    {"$count": "count"},
                ],
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


def _earlier(record: str, key: str, attempt: int) -> Json:
    """Return a filter for answers to ``key`` that earlier owners got and no request under ``attempt`` has."""
    return {
        "record": record, "key": key, "attempt": {"$lt": attempt}, "replays": None, "call": {"$ne": None},
        "$or": [{"replayed_in": {"$ne": attempt}}],
    }  # fmt: skip


def answering(call: GatewayCall) -> Json:
    """Return a filter for a request; it matches only while its gateway answers it."""
    return {"_id": call.id, "gateway": call.gateway, "status": GatewayCallStatus.RUNNING.value}


def _reusable(call_id: str, has_key: bool, retry_seconds: float) -> Json:
    """Return a filter for a request whose answer a retry gets."""
    recent: Json = {"$gt": ["$finished_at", after(-retry_seconds)]}
    done: Json = {"status": GatewayCallStatus.DONE.value, **({} if has_key else {"$expr": recent})}
    running: Json = {"status": GatewayCallStatus.RUNNING.value, "$expr": live("$expires_at")}
    return {"_id": call_id, "$or": [done, running]}
