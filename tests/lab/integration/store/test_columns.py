"""Columns: claimed and filled under leases; groups wait for them; given up, reopened, checked, pruned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import small_run as run
from db_command import Db, violations
from ready_data import ready_data

from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.data.finalize_group import verifier
from agentrl.data.forest import forest_from_data
from agentrl.data.stream import Freshness
from agentrl.documents.record import TopLogprobs
from agentrl.documents.status import ColumnStatus, RecordStatus, TaskStatus
from agentrl.documents.training import DBRecordData
from agentrl.errors import LeaseLostError
from agentrl.lab.transfer import Transfer
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store, open_connection
from agentrl.store.groups import ColumnClaim

pytestmark = pytest.mark.integration

TASK = "train/0/late"
VALUES = np.arange(8, dtype=np.float32) / -4
TOP = TopLogprobs.of([{token: -0.5} for token in range(8)])


@pytest.fixture
async def finalizer(store: Store, tmp_path: Path) -> GroupFinalizer:
    """A group of two scored Records that wait for the column ``teacher``."""
    await run.publish(store, tmp_path / "weights", 0, step=0, train_step=None)
    await run.add_task(store, TASK, 0)
    for value in (0.0, 1.0):
        await run.score(store, await run.claim(store), value)
    finalizer = GroupFinalizer(store, GroupConfig(columns="teacher"), split="train", seed=0)
    assert await finalizer.run_waiting() == 0
    return finalizer


async def claim(
    store: Store, owner: str = "filler", *, seconds: float = 60.0, limit: int = 1
) -> list[ColumnClaim]:
    return await store.columns.claim("teacher", owner=owner, lease_seconds=seconds, limit=limit)


async def statuses(store: Store) -> list[str]:
    return [item["status"] async for item in store.database["Column"].find({}, sort=[("_id", 1)])]


async def test_a_group_is_trained_with_the_columns_that_it_waited_for(
    store: Store, finalizer: GroupFinalizer, run_config: RunConfig, tmp_path: Path
) -> None:
    assert await store.groups.waiting("train") == []
    assert await store.columns.waiting("teacher") == {"": 2}
    first, second = await claim(store, limit=8)
    await store.columns.fill(first, VALUES.tolist(), TOP, by="models/teacher")
    await store.columns.fill(first, VALUES.tolist(), TOP, by="models/teacher")
    assert await finalizer.run_waiting() == 0
    await store.columns.fill(second, VALUES.tolist(), by="models/teacher")
    assert await finalizer.run_waiting() == 1
    assert await violations(store) == []
    data = await store.training.fetch([item.id for item in await ready_data(store, "train")])
    assert await verifier(store)(data) == {}
    forest = forest_from_data(data)
    np.testing.assert_array_equal(forest.columns.values["teacher"], np.tile(VALUES, 2))
    assert forest.columns.top["teacher"].ids.counts.tolist() == [1] * 8 + [0] * 8
    forged = DBRecordData(**{**_fields(data[0]), "columns": data[1].columns})
    assert "columns: " in (await verifier(store)([forged, data[1]]))[TASK]

    copy = RunConfig(
        run_name=f"{run_config.run_name}_copy", db_connection_string=run_config.db_connection_string
    )
    await Transfer(store.connection).export(tmp_path / "export")
    connection = await open_connection(copy)
    await Transfer(connection).load(tmp_path / "export")
    assert await connection.collection("Column").count_documents({"status": "filled"}) == 2
    await connection.client.drop_database(copy.run_name)
    await connection.close()


def _fields(data: DBRecordData) -> dict[str, object]:
    return {name: getattr(data, name) for name in data.__dataclass_fields__}


async def test_tokens_that_are_too_old_leave_with_their_columns(
    store: Store, finalizer: GroupFinalizer
) -> None:
    for each in await claim(store, limit=2):
        await store.columns.fill(each, VALUES.tolist(), by="m")
    assert await finalizer.run_waiting() == 1
    (first, *_) = await store.training.fetch([item.id for item in await ready_data(store, "train")])
    masked = Freshness(max_staleness=0, policy="mask").weigh(first, {0: 1})
    assert (masked.trainable_tokens, masked.spans) == (0, ())


async def test_the_column_of_a_filler_that_died_is_filled_by_another_one(
    store: Store, finalizer: GroupFinalizer
) -> None:
    (dead,) = await claim(store, "dead", seconds=0.0)
    (other,) = await claim(store, "other")
    assert other.column.id == dead.column.id
    with pytest.raises(LeaseLostError):
        await store.columns.fill(dead, VALUES.tolist(), by="m")
    with pytest.raises(LeaseLostError):
        await store.columns.renew(dead, 60.0)
    await store.columns.renew(other, 60.0)
    await store.columns.release(other)
    (again,) = await claim(store, "third")
    assert again.column.id == dead.column.id
    await store.columns.fill(again, VALUES.tolist(), by="m")
    assert await statuses(store) == ["filled", "open"]
    assert await violations(store) == []


async def test_a_column_that_is_given_up_abandons_its_record_until_it_is_reopened(
    store: Store, finalizer: GroupFinalizer, db: Db
) -> None:
    first, second = await claim(store, limit=2)
    await store.columns.fill(second, VALUES.tolist(), by="m")
    why = "HTTP 400"
    assert (
        await store.columns.fail(first, "down", max_attempts=2, backoff_seconds=0.0, counts=False) == "open"
    )
    for expected in (ColumnStatus.OPEN, ColumnStatus.FAILED):
        (again,) = await claim(store)
        assert await store.columns.fail(again, why, max_attempts=2, backoff_seconds=0.0) is expected
    assert await finalizer.run_waiting() == 1
    record = await store.records.get(first.column.record)
    assert record.status is RecordStatus.ABANDONED
    assert record.abandoned_because == f"its column teacher was given up: {why}"
    assert await violations(store) == []

    assert "1 columns that were given up" in await db("reopen", "--failure_kind", "column")
    task = await store.tasks.get(TASK)
    assert task.status is TaskStatus.WAITING
    (again,) = await claim(store)
    await store.columns.fill(again, VALUES.tolist(), by="m")
    assert await finalizer.run_waiting() == 1
    assert len(await ready_data(store, "train")) == 2
    assert await violations(store) == []


async def test_a_task_names_the_filler_of_its_columns(store: Store, finalizer: GroupFinalizer) -> None:
    await store.database["Column"].update_many({}, {"$set": {"filler": "math"}})
    columns = store.columns
    assert await columns.claim("teacher", owner="a", lease_seconds=9.0) == []
    assert await columns.claim("teacher", owner="a", lease_seconds=9.0, filler="code") == []
    assert len(await columns.claim("teacher", owner="a", lease_seconds=9.0, filler="math", limit=5)) == 2
    assert await columns.waiting() == {"math": 2}


async def test_a_check_finds_columns_that_contradict_their_records(
    store: Store, finalizer: GroupFinalizer
) -> None:
    first, second = await claim(store, limit=2)
    await store.columns.fill(first, [-1.0], by="m")
    await store.database["Column"].update_one({"_id": second.column.id}, {"$set": {"owner": None}})
    found = "\n".join(await violations(store))
    assert "what='bytes of values', expected=32, found=4" in found
    assert "what='owner, since it is running', expected='a value', found=None" in found
