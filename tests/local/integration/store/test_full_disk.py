"""The disk of the embedded server fills while a process writes: what it says, and what is kept."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.config.schema import RunConfig
from agentrl.documents.images import Image
from agentrl.errors import StoreError
from agentrl.local import mongod as embedded
from agentrl.local.mongod import EmbeddedMongo
from agentrl.store.client import Store, open_store
from agentrl.store.mechanics.retry import retry_outages

pytestmark = [pytest.mark.integration, pytest.mark.attack, pytest.mark.timeout(300)]


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 500 MiB, in memory; not in pytest's folder, which cannot remove a killed test's mount."""
    folder = Path(tempfile.mkdtemp(prefix="agentrl-test-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", "size=500m", "agentrl-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        folder.rmdir()
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
    folder.rmdir()


async def test_a_disk_that_fills_is_named_and_nothing_is_lost(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded, "_FREE_BYTES", 50 << 20)
    mongo, filler = EmbeddedMongo(small_disk / "m"), small_disk / "filler"
    run = RunConfig(run_name="full", mongo_dir=str(mongo.directory), db_timeout_seconds=5)

    def room(free: int) -> None:
        """Leave so many bytes free."""
        filler.unlink(missing_ok=True)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - free)

    try:
        await asyncio.to_thread(mongo.up)
        async with await open_store(run) as store:
            await asyncio.to_thread(room, 10 << 20)
            stored: list[Image] = []
            with retry_outages(240), caplog.at_level(logging.WARNING):
                writing = asyncio.create_task(_fill(store, stored))
                await _until(lambda: "the database is unavailable" in caplog.text)
                for part in (
                    f"the disk of {mongo.directory} has",
                    "MiB free, and the embedded MongoDB needs 50",
                ):
                    assert part in caplog.text
                if not mongo.status().running:  # it may refuse writes for a while before it ends
                    with pytest.raises(StoreError, match="free some space there, then: agentrl mongo up"):
                        await asyncio.to_thread(mongo.up)
                    with pytest.raises(StoreError, match="free some space there, then: agentrl mongo up"):
                        await open_store(run)
                before = len(stored)
                filler.unlink()

                def goes_on() -> bool:
                    mongo.up()  # it may have been about to end
                    return len(stored) > before + 1

                await _until(goes_on)
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
        async with await open_store(run) as store:
            assert len(await store.images.get([image.id for image in stored])) == len(stored)
    finally:
        await asyncio.to_thread(mongo.down)


async def _fill(store: Store, stored: list[Image]) -> None:
    """Store images of 4 MiB, and note those that the server has acknowledged."""
    while True:
        data = os.urandom(4 << 20)
        image = Image(
            id=hashlib.sha256(data).hexdigest(), media_type="image/png", width=1, height=1, data=data
        )
        await store.images.put(image)
        stored.append(image)
        await asyncio.sleep(0.1)


async def _until(condition: Callable[[], bool]) -> None:
    """Wait up to 120 s: a busy machine takes long to fill a disk."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
