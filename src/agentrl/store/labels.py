"""Store what people say of trajectories: a label, a note and a score, beside the Record."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from pymongo import ASCENDING

from agentrl.documents.base import replace_surrogates
from agentrl.documents.record import Label, check_label, label_key
from agentrl.errors import StoreError
from agentrl.processes import user_name
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.mechanics.lease import literal
from agentrl.store.names import LABEL, RECORD

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
