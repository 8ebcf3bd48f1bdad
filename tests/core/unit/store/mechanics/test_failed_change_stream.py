"""A change stream that fails by a defect is logged and begun again, instead of ending in silence."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.store.mechanics import change_stream
from agentrl.store.mechanics.change_stream import Changes


async def test_a_wait_begins_a_failed_stream_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = []

    class Feed:
        """A feed that fails the first time."""

        def __init__(self, key: str, collections: list[str], follow: Any, notify: Any) -> None:
            self.collections, self.notify = collections, notify

        async def run(self) -> None:
            begun.append(self.collections)
            if len(begun) == 1:
                raise ValueError("a defect")
            await self.notify(self.collections)
            await asyncio.sleep(60)

    monkeypatch.setattr(change_stream, "HostFeed", Feed)
    connection: Any = SimpleNamespace(host="h", database=SimpleNamespace(name="run"))
    changes = Changes(connection)
    assert not await changes.wait("Task", timeout=0.01)
    assert await changes.wait("Task", timeout=10)
    assert begun == [["Task"], ["Task"]]
    assert "a defect" in caplog.text
    await changes.close()
