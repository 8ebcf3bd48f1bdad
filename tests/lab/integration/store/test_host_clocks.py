"""A run whose hosts have clocks that are ten minutes wrong: stored and shown times are the database's."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import small_run as run

from agentrl.config.schema import RunConfig
from agentrl.documents import document
from agentrl.documents.images import Image
from agentrl.documents.run import InferenceService
from agentrl.lab.deletion import Retention
from agentrl.screens.snapshot import SnapshotReader
from agentrl.store.client import Store, open_store

pytestmark = [pytest.mark.integration, pytest.mark.attack]

NEAR = timedelta(seconds=2 * run.LEASE)


@pytest.fixture(params=[-600.0, 600.0], ids=["behind", "ahead"])
async def host(
    request: pytest.FixtureRequest,
    run_config: RunConfig,
    drop_later: Callable[[str], object],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Store]:
    """The store of a process on a host whose clock is wrong."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + request.param)
    monkeypatch.setattr(document, "_clock", document._Clock())
    assert abs(document.now() - datetime.fromtimestamp(real(), UTC)) > timedelta(minutes=9)
    async with await open_store(run_config) as store:
        yield store
    drop_later(run_config.run_name)


def moments(value: Any) -> Iterator[datetime]:
    """Yield every time in a document."""
    if isinstance(value, datetime):
        yield value
    elif isinstance(value, dict):
        yield from (moment for item in value.values() for moment in moments(item))
    elif isinstance(value, list):
        yield from (moment for item in value for moment in moments(item))


async def test_every_stored_time_is_the_database_s(host: Store, tmp_path: Path) -> None:
    await run.build(host, tmp_path / "weights")
    hello = await host.database.client.admin.command("hello")
    here = hello["localTime"].replace(tzinfo=UTC)
    found = [
        (name, moment)
        for name in await host.database.list_collection_names(filter={"type": "collection"})
        if name != "system.views"
        async for document in host.database[name].find()
        for moment in moments(document)
    ]
    assert len(found) > 50
    assert [(name, moment) for name, moment in found if abs(moment - here) > NEAR] == []


async def test_screens_and_retention_follow_the_database_s_clock(host: Store, tmp_path: Path) -> None:
    engine = InferenceService(id="e", url="http://h:1", engine="local", model="/m", host="h", pid=1)
    await host.services.register(engine)
    await run.build(host, tmp_path / "weights")
    await host.images.put(Image(id="0" * 64, data=b"x", media_type="image/png", width=1, height=1))
    snapshot = await SnapshotReader(host).read(alive_seconds=60)
    assert abs(snapshot.liveness.at - snapshot.engines[0].heartbeat) < NEAR
    assert snapshot.rates.trajectories > 0
    assert await Retention(host.connection).prune_images(grace=timedelta(minutes=5)) == (0, 0)
