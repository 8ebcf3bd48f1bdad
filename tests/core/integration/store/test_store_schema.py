"""Validators and indexes on a real server: what is wrong is refused by name, what is missing is made."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config.schema import RunConfig
from agentrl.documents.task import Slot, Task
from agentrl.errors import StoreError
from agentrl.store.client import Store, open_store
from agentrl.store.schema import INDEXES, VALIDATORS, VIEWS

pytestmark = pytest.mark.integration


TASK = Task(
    id="train/0/a", task_id="a", split="train", epoch=0, order=0, query="?", slots=(Slot(traj_id=0),)
)  # fmt: skip

WRONG: dict[str, dict[str, Any]] = {
    "query: Task.query is text (found 3)": {"query": 3},
    "slots.0.owner: Slot.owner is text, or null (found 7)": {"slots": [{"traj_id": 0, "owner": 7}]},
    "status: Task.status is one of created, running, waiting, completed (found 'odd')": {"status": "odd"},
    "order: Task.order is a whole number (found 1.5)": {"order": 1.5},
}


@pytest.mark.parametrize("message", WRONG)
async def test_a_refusal_names_the_field_and_what_it_should_be(
    store: Store, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    broken = TASK.to_document() | WRONG[message]
    monkeypatch.setattr(Task, "to_document", lambda _: broken)
    with pytest.raises(StoreError) as caught:
        await store.tasks.load([TASK])
    assert caught.value.message == f"tasks: insert: document 'train/0/a' is refused: {message}"


@pytest.mark.parametrize("collection", VALIDATORS)
async def test_every_collection_refuses_what_no_document_has(store: Store, collection: str) -> None:
    schema = VALIDATORS[collection]["$jsonSchema"]
    assert schema["additionalProperties"] is False
    for name, field in schema["properties"].items():
        assert field["title"].endswith(f".{name}")
        assert field["description"].startswith(f"{field['title']} is ")
    with pytest.raises(Exception, match="failed validation"):
        await store.database[collection].insert_one({"odd": 1})


async def test_a_second_opening_makes_nothing_and_a_lost_index_comes_back(
    store: Store, run_config: RunConfig
) -> None:
    await store.database["Task"].drop_indexes()
    async with await open_store(run_config) as again:
        for name, indexes in INDEXES.items():
            present = {index["name"] async for index in await again.database[name].list_indexes()}
            assert {index.document["name"] for index in indexes} <= present


async def test_a_registered_view_is_made_at_the_next_opening_and_a_run_needs_none(
    store: Store, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VIEWS, "_registered", {})
    for name in await views_of(store):
        await store.database.drop_collection(name)
    async with await open_store(run_config) as without:
        assert await views_of(without) == {}
        await without.tasks.load([TASK])
    pipeline = [{"$project": {"query": 1}}]
    VIEWS.add(("Task", pipeline), "questions")
    async with await open_store(run_config) as again:
        assert await views_of(again) == {"questions": {"viewOn": "Task", "pipeline": pipeline}}
        assert await again.database["questions"].find().to_list() == [{"_id": TASK.id, "query": "?"}]


async def views_of(store: Store) -> dict[str, Any]:
    cursor = await store.database.list_collections(filter={"type": "view"})
    return {entry["name"]: entry["options"] async for entry in cursor}
