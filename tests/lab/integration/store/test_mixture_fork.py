"""A fork of a mixture goes on as its parent did after that step: turns, gates and what is set aside."""

from __future__ import annotations

from pathlib import Path

import pytest
from db_command import violations
from small_run import STEP, write_checkpoint
from test_mixture import Mixed
from test_store_training import make_step

from agentrl.documents.run import PARENT, PolicyVersion, Relative
from agentrl.documents.status import StepStatus
from agentrl.lab.fork import Fork
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

SOURCES = """a:
    {path: a.jsonl, weight: 3, pools: {rest: {threshold: 0.9, weight: 1}, easy: {threshold: 1, weight: 0}}}
  b: {path: b.jsonl}
  c: {path: c.jsonl, gate: {source: a, pass_rate: 0.8, groups: 4}}"""


async def test_a_fork_takes_the_turns_that_its_parent_took_after_the_step(
    store: Store, tmp_path: Path
) -> None:
    parent = Mixed(store, tmp_path, epochs=3)
    await parent.load(SOURCES, {"a": 8, "b": 30, "c": 30})
    assert await parent.run(6) == "aabaaa"
    await store.database["Task"].update_many(
        {"status": "completed"}, {"$set": {"group.counted_at_step": 1, "group.trained": 0}}
    )
    step = make_step(1, [], "1")
    await store.database["TrainStep"].insert_one(
        {**step.to_document(), "_id": STEP, "status": StepStatus.COMMITTED.value}
    )
    after = await parent.run(24, {"a": 1.0})
    assert "c" in after
    assert "c" not in after[:4]
    checkpoint = tmp_path / "output" / "checkpoint-000001"
    write_checkpoint(checkpoint, 1, (STEP,))
    (checkpoint / "model").mkdir()
    begun = Relative(id=PARENT, run=store.run_name, kind="fork", step=1, checkpoint=str(checkpoint))
    model = PolicyVersion(id=0, step=0, location=str(checkpoint / "model"), files=(), train_step=None)
    name = f"{store.run_name}_child"
    try:
        await Fork(store.connection).begin(name, begun, model)
        forked = Mixed(store.beside(name), tmp_path, epochs=3)
        sources = await forked.store.mixtures.sources()
        assert [(each.name, each.begun, each.opened) for each in sources] == [
            ("a", 5, None), ("b", 1, None), ("c", 0, None),
        ]  # fmt: skip
        assert await forked.store.tasks.epochs("train") == [0], "later epochs of a source are the child's own"
        assert await forked.run(24, {"a": 1.0}) == after
        assert [text for text in await violations(forked.store) if "Epoch" in text] == []
    finally:
        await store.connection.client.drop_database(name)
