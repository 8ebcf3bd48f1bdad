"""Bad training data on a real server: set aside with the reason, shown, legal, and in nobody's way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_run as run
from db_command import violations
from ready_data import statuses
from snapshots import printed

from agentrl.data.planner import packing_problem
from agentrl.data.stream import DataStream, Freshness, StreamSettings
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.status import DataStatus
from agentrl.screens.run_screens import render_tables
from agentrl.screens.snapshot import SnapshotReader
from agentrl.screens.trajectory_page import render_rows
from agentrl.screens.views.counts import Details
from agentrl.screens.views.read import Views
from agentrl.store.client import Store
from agentrl.store.mechanics import blobs

pytestmark = pytest.mark.integration

BAD, GOOD = f"{run.READY}/0/1", f"{run.READY}/1/1"


async def lose_file(store: Store) -> None:
    """Move the arrays of one datum to GridFS, then lose a file of them."""
    document = await store.database["DBRecordData"].find_one({"_id": BAD})
    assert document is not None
    moved = await blobs.Blobs(store.connection, "DBRecordData").offload(document)
    await store.database["DBRecordData"].replace_one({"_id": BAD}, moved)
    result = await store.database["DBRecordData.packed.chunks"].delete_many({})
    assert result.deleted_count > 0


def set_fields(**fields: Any) -> Callable[[Store], Awaitable[Any]]:
    return lambda store: store.database["DBRecordData"].update_one({"_id": BAD}, {"$set": fields})


DAMAGES: dict[str, tuple[Callable[[Store], Awaitable[Any]], str]] = {
    "outside the vocabulary": (set_fields(input_ids=pack_ids([10**6] * 12)), "outside the vocabulary"),
    "corrupt": (set_fields(input_ids=b"\x01\x02\x03"), "cannot be read"),
    "NaN": (set_fields(behavior_logprobs=pack_floats([float("nan")] * 8)), "not finite"),
    "no file": (lose_file, "missing from GridFS"),
}


def take_from(store: Store) -> DataStream:
    settings = StreamSettings(
        groups_per_step=1, num_epochs=1, wait_seconds=20.0, freshness=Freshness(max_staleness=1),
        problem_of=partial(packing_problem, vocab_size=1000, max_tokens=4096),
    )  # fmt: skip
    return DataStream(store, settings)


@pytest.mark.parametrize("name", DAMAGES)
async def test_one_bad_datum_is_set_aside_and_the_rest_of_its_group_is_trained(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    damage, why = DAMAGES[name]
    await run.build(store, tmp_path / "weights", unfinished=False)
    if damage is lose_file:
        monkeypatch.setattr(blobs, "_LIMIT", 8)
    await damage(store)
    batch = await take_from(store).take(2)
    assert [item.id for item in batch.data] == [GOOD]
    assert (await statuses(store))[DataStatus.QUARANTINED] == 1
    assert await violations(store) == []
    reader = SnapshotReader(store)
    assert why in printed(render_tables(await reader.read(), await Details(store.connection).read()), 250)
    assert "quarantined: " in printed(render_rows(await Views(store.connection).trajectories(limit=20)), 250)
    trajectory = await store.database["audit_trajectories"].find_one({"_id": BAD})
    assert why in trajectory["quarantined_because"]
