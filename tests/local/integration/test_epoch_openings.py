"""Samplers open epochs on a server that is frozen meanwhile: every epoch is completed before the next."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pymongo.monitoring
import pytest
from test_sampling import Setting, quick, right_then_wrong, task

from agentrl.config.schema import RunConfig
from agentrl.documents.status import TaskStatus
from agentrl.errors import StoreUnavailableError
from agentrl.local.mongod import EmbeddedMongo
from agentrl.store import epochs
from agentrl.store.client import Store, open_store

pytestmark = pytest.mark.integration
__all__ = ["quick"]

TASKS, BATCH = 6, 2


class Freeze(pymongo.monitoring.CommandListener):
    """Sends SIGSTOP to mongod just before the second batch of an opening."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self._batches = 0

    def started(self, event: pymongo.monitoring.CommandStartedEvent) -> None:
        """Count batches."""
        stages = event.command.get("pipeline", [{}])
        if self.pid is None or not ("$merge" in stages[-1] or event.command.get("insert") == "Task"):
            return
        self._batches += 1
        if self._batches == 2:
            os.kill(self.pid, signal.SIGSTOP)

    def succeeded(self, event: pymongo.monitoring.CommandSucceededEvent) -> None:
        """Nothing is kept of answers."""

    def failed(self, event: pymongo.monitoring.CommandFailedEvent) -> None:
        """Nothing is kept of answers."""


FREEZE = Freeze()
pymongo.monitoring.register(FREEZE)


@pytest.fixture
def mongo(tmp_path: Path) -> Iterator[EmbeddedMongo]:
    """A server of this test's own, which it may freeze."""
    mongo = EmbeddedMongo(tmp_path / "mongo")
    pid = mongo.up().pid
    assert pid is not None
    yield mongo
    os.kill(pid, signal.SIGCONT)
    mongo.down()


@pytest.fixture
async def store(mongo: EmbeddedMongo, tmp_path: Path) -> AsyncIterator[Store]:
    run = RunConfig(
        run_name=f"frozen_{uuid.uuid4().hex[:8]}",
        db_connection_string=mongo.status().uri,
        db_timeout_seconds=1.0,
        log_dir=str(tmp_path / "logs"),
    )
    async with await open_store(run) as opened:
        yield opened


async def test_an_epoch_whose_opening_was_frozen_is_completed_before_the_next(
    store: Store, mongo: EmbeddedMongo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "_BATCH", BATCH)
    await store.tasks.load([task(name) for name in "abcdef"])
    FREEZE.pid = mongo.status().pid
    with pytest.raises(StoreUnavailableError):
        await store.epochs.open("train", 1, 0, 2)
    assert FREEZE.pid is not None
    os.kill(FREEZE.pid, signal.SIGCONT)
    FREEZE.pid = None
    setting = Setting(store, right_then_wrong(), epochs=3)
    await setting.run()
    for epoch in range(3):
        assert (await store.tasks.counts("train", epoch))[TaskStatus.COMPLETED] == TASKS
    assert setting.sampler.scored == 3 * 2 * TASKS
