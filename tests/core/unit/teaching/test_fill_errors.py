"""A failure of what runs beside a Filler reaches its caller."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.schema import ClaimConfig
from agentrl.errors import StoreError
from agentrl.teaching.teach import Filler


class Columns:
    """Nothing to fill."""

    async def claim(self, *_: Any, **__: Any) -> list[Any]:
        return []


class Store:
    """A run whose changes cannot be read."""

    columns = Columns()

    async def wait_for_change(self, *_: str, timeout: float) -> bool:
        await asyncio.sleep(0.01)
        raise StoreError("no changes")

    def take_past_outages(self) -> list[Any]:
        return []


async def test_a_filler_ends_with_the_error_of_its_watch() -> None:
    teaching: Any = SimpleNamespace(engine=SimpleNamespace(name="teacher"))
    filler = Filler(store=Store(), teaching=teaching, claims=ClaimConfig())  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="no changes"):
        await asyncio.wait_for(filler.run(asyncio.Event()), 10)
