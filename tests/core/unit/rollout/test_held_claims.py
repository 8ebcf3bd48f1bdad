"""The last writes of a process are bounded, and none of their errors is lost."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.errors import StoreError
from agentrl.rollout import held_claims
from agentrl.rollout.held_claims import bounded


async def fails(error: Exception) -> None:
    raise error


async def test_only_an_error_that_is_no_store_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert not await bounded(fails(StoreError("the caller has logged it")))
    assert caplog.records == []
    assert not await bounded(fails(ValueError("a defect")))
    assert "a defect" in caplog.text


async def test_a_database_that_does_not_answer_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(held_claims, "RELEASE_SECONDS", 0.01)
    assert not await bounded(asyncio.sleep(10))
    assert "does not answer" in caplog.text
    assert await bounded(asyncio.sleep(0))
