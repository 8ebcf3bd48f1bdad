"""What a run's database holds: its ready data, and how many documents have which status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from agentrl.documents.training import DBRecordData
from agentrl.store.client import Store
from agentrl.store.groups import GroupOutcome, StoredGroup


async def ready_data(store: Store, split: str = "train", *, step: int | None = None) -> list[DBRecordData]:
    """The ready data of a split, oldest first; with ``step``, those that this step may train."""
    query = {
        "split": split,
        "status": "ready",
        **({} if step is None else {"not_before_step": {"$lte": step}}),
    }
    cursor = store.database["DBRecordData"].find(query, sort=[("created_at", 1), ("_id", 1)])
    return [DBRecordData.from_document(document) async for document in cursor]


async def statuses(store: Store, collection: str = "DBRecordData") -> Counter[str]:
    """Status → the documents of the train split, of training data or another collection."""
    documents = store.database[collection].find({"split": "train"}, {"status": 1})
    return Counter([document["status"] async for document in documents])


async def finalize(store: Store, task_id: str, decide: Callable[[StoredGroup], GroupOutcome]) -> bool:
    """Finalize a group by ``decide``, as ``finalize_group`` does by the rules of a run."""
    group = await store.groups.to_decide(task_id)
    return group is not None and await store.groups.finalize(group, decide(group))
