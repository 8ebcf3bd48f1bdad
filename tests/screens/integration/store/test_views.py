"""The rows that commands and notebooks read are those of the views that Compass shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import small_run as run

from agentrl.documents.base import Root
from agentrl.screens.views.read import Views
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

NOW_DEPENDENT = {"seconds_since_heartbeat"}


async def equals_view(store: Store, view: str, rows: Sequence[Root]) -> bool:
    shown = {document["_id"]: document async for document in store.database[view].find()}
    read = {document["_id"]: document for document in (row.to_document() for row in rows)}
    assert shown.keys() == read.keys()
    for key, document in shown.items():
        assert document.keys() <= read[key].keys()
        differing = {name for name in document if document[name] != read[key][name]}
        assert differing <= NOW_DEPENDENT
    return bool(rows)


async def test_rows_equal_the_views(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    views = Views(store.connection)
    assert await equals_view(store, "audit_trajectories", await views.trajectories())
    assert await equals_view(store, "audit_groups", await views.groups())
    assert await equals_view(store, "audit_tasks", await views.tasks())
    assert await equals_view(store, "audit_steps", await views.steps())


async def test_rows_are_filtered_and_limited(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    views = Views(store.connection)
    newest = await views.trajectories()
    assert [row.created_at for row in newest] == sorted((row.created_at for row in newest), reverse=True)
    assert {row.status for row in await views.trajectories(status="failed")} == {"failed"}
    assert len(await views.trajectories(limit=2)) == 2
    assert await views.trajectories(step=99) == []
    assert [row.step for row in await views.steps(last=1)] == [1]
    assert [row.split for row in await views.groups(split="eval")] == ["eval"]
