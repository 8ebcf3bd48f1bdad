"""Test that ages count steps, although version numbers jump when a trainer resumes."""

from __future__ import annotations

from typing import Any

import pytest
from fake_store import FakeStore

from agentrl.data.stream import VersionSteps


@pytest.fixture
def store() -> Any:
    """Resumed at step 10 of 20, and at 12: versions 21, 22, 23 are of steps 11, 12, 13, and 24 is of 13."""
    store = FakeStore()
    store.publish({number: number for number in range(21)}, withdrawn=range(11, 21))
    store.publish({21: 11, 22: 12, 23: 13, 24: 13}, withdrawn=[23])
    return store


@pytest.mark.parametrize(
    ("step", "ranges"),
    [
        (0, ()),
        (1, ((0, 0),)),
        (11, ((0, 10),)),
        (12, ((0, 11), (21, 21))),
        (13, ((0, 12), (21, 22))),
        (20, ((0, 19), (21, 24))),
        (21, ((0, 24),)),
    ],
)
async def test_versions_before_a_step_are_ranges(
    store: FakeStore, step: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    assert await VersionSteps(store).published_before(step) == ranges


async def test_an_age_is_never_negative_and_only_that_of_a_published_version(store: Any) -> None:
    steps = VersionSteps(store)
    assert await steps.ages([9, 20, 21, 24, 99], 14) == {9: 5, 20: 0, 21: 3, 24: 1}


async def test_every_version_is_read_once(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    steps_above = store.policy_versions.steps_above

    async def count(version: int) -> dict[int, int]:
        found = await steps_above(version)
        read.extend(found)
        return found

    monkeypatch.setattr(store.policy_versions, "steps_above", count)
    steps = VersionSteps(store)
    for step in range(3):
        await steps.published_before(step)
        await steps.ages([1, 2, 99], step)
    store.publish({25: 14})
    assert await steps.ages([25], 16) == {25: 2}
    assert read == list(range(26))
