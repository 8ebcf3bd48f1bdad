"""Test the limit of open groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.schema import SamplingConfig, TrainConfig
from agentrl.rollout.setup import AdmissionLimit
from agentrl.store.claims import GroupLimit


def store(version: int | None, version_step: int = 0, last_step: int | None = None) -> Any:
    async def latest() -> Any:
        return None if version is None else SimpleNamespace(id=version, step=version_step)

    async def last() -> Any:
        return None if last_step is None else SimpleNamespace(step=last_step)

    async def get(number: int) -> Any:
        """Up to the newest version, one was published after each step."""
        return SimpleNamespace(id=number, step=number)

    policies = SimpleNamespace(latest=latest, get=get)
    return SimpleNamespace(policy_versions=policies, steps=SimpleNamespace(last=last))


def served(engine: int | None) -> list[int]:
    return [] if engine is None else [engine]


def admission(*, sync: bool, **flags: int) -> AdmissionLimit:
    return AdmissionLimit(SamplingConfig(sync_sampling=sync, **flags), TrainConfig(groups_per_step=4))


@pytest.mark.parametrize(("max_staleness", "groups"), [(0, 4), (1, 8), (3, 16)])
async def test_staleness_bounds_the_groups_ahead(max_staleness: int, groups: int) -> None:
    allowed = admission(sync=False, max_staleness=max_staleness)
    assert await allowed.groups_allowed(store(5, 5, 5), [5]) == GroupLimit(groups, after_step=5)


@pytest.mark.parametrize(
    ("state", "engine", "groups"),
    [
        (store(5, 5, last_step=6), 5, 4),
        (store(6, 6, last_step=6), 5, 4),
        (store(6, 6, last_step=7), 5, 0),
        (store(6, 6, last_step=6), 6, 8),
        (store(9, 9, last_step=9), 2, 0),
    ],
)
async def test_an_engine_that_lags_uses_up_the_allowance(state: Any, engine: int, groups: int) -> None:
    assert (await admission(sync=False).groups_allowed(state, served(engine))).groups == groups


@pytest.mark.parametrize(("step", "groups"), [(4, 16), (5, 12), (7, 4), (8, 0), (12, 0)])
async def test_every_step_that_is_not_published_uses_up_the_allowance(step: int, groups: int) -> None:
    allowed = admission(sync=False, max_staleness=3)
    assert (await allowed.groups_allowed(store(1, 4, last_step=step), [1])).groups == groups


async def test_an_engine_lags_by_steps_not_by_versions() -> None:
    allowed = admission(sync=False, max_staleness=7)
    assert (await allowed.groups_allowed(store(2, 8, last_step=8), [1])).groups == 4


async def test_the_engine_of_the_earliest_step_counts_whatever_its_number() -> None:
    """Version 20 is of step 20, which was undone; 21 and 22 are of the steps 11 and 12 that came after."""
    steps = {20: 20, 21: 11, 22: 12}
    state = store(22, 12, last_step=12)

    async def get(number: int) -> Any:
        return SimpleNamespace(id=number, step=steps[number])

    state.policy_versions.get = get
    allowed = admission(sync=False, max_staleness=3)
    groups = [(await allowed.groups_allowed(state, engines)).groups for engines in ([20], [22], [20, 21])]
    assert groups == [16, 16, 12]


@pytest.mark.parametrize(("engine", "lags"), [(5, True), (6, False), (7, False), (None, False)])
async def test_room_says_whether_it_grows_once_engines_have_loaded(engine: int | None, lags: bool) -> None:
    room = await admission(sync=False).groups_allowed(store(6, 6, last_step=6), served(engine))
    assert room.engines_lag is lags


@pytest.mark.parametrize(
    ("state", "engine", "groups"),
    [
        (store(None), None, 4),
        (store(0), 0, 4),
        (store(0, 0, last_step=1), 0, 0),
        (store(None, last_step=1), None, 0),
        (store(1, 1, last_step=1), 0, 0),
        (store(1, 1, last_step=1), 1, 4),
        (store(1, 1, last_step=1), None, 4),
    ],
)
async def test_synchronous_sampling_waits_for_weights_and_engines(
    state: Any, engine: int | None, groups: int
) -> None:
    assert (await admission(sync=True).groups_allowed(state, served(engine))).groups == groups


@pytest.mark.parametrize(("state", "groups"), [(store(5, 5, 5), 7), (store(6, 6, last_step=7), 0)])
async def test_oversampled_groups_come_on_top_of_those_that_may_begin_at_all(state: Any, groups: int) -> None:
    allowed = admission(sync=True, oversample_groups=3)
    assert (await allowed.groups_allowed(state, [6])).groups == groups
