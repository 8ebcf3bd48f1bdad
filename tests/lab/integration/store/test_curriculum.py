"""``--task_selection curriculum`` on a real server: the level follows stored results, for every sampler."""

from __future__ import annotations

import pytest
import small_run as run
from test_task_selection import take, violations

from agentrl.config.schema import GroupConfig
from agentrl.documents.task import Slot, Task, task_key
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store
from agentrl.store.epochs import MASTERED_GROUPS, Selection

pytestmark = pytest.mark.integration

BY_LEVEL = Selection(1, by_level=True)


async def load(store: Store, levels: list[int | None]) -> None:
    slots = (Slot(traj_id=0), Slot(traj_id=1))
    tasks = [
        Task(
            id=task_key("train", 0, f"{order}"), task_id=f"{order}", split="train", epoch=0, order=order,
            query="?", meta={} if level is None else {"level": level}, slots=slots,
        )
        for order, level in enumerate(levels)
    ]  # fmt: skip
    await store.tasks.load(tasks)


async def sample(store: Store, groups: int, *scores: float) -> list[int | None]:
    """Sample groups one after the other; return the level of each."""
    levels = []
    for _ in range(groups):
        for place in range(2):
            limit = 1 + await store.groups.count_open("train") - bool(place)
            claimed = await take(store, limit, BY_LEVEL)
            assert claimed is not None
            await run.score(store, claimed, scores[place])
            await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting()
        levels.append(claimed.task.meta.get("level"))
    return levels


async def test_the_next_level_begins_when_recent_groups_pass(store: Store) -> None:
    easy = MASTERED_GROUPS + 2
    await load(store, [1] * 3 + [0] * easy + [2] * 2)
    assert await sample(store, MASTERED_GROUPS, 1.0, 1.0) == [0] * MASTERED_GROUPS
    assert await sample(store, 3, 0.0, 1.0) == [1, 1, 1]
    # Level 1 has no task left: the next one that has any and is not mastered is 2.
    assert await sample(store, 2, 1.0, 1.0) == [2, 2]
    assert await sample(store, 2, 1.0, 1.0) == [0, 0]
    assert await take(store, 100, BY_LEVEL) is None
    assert await violations(store, is_final=True) == []


async def test_a_level_that_is_not_mastered_is_kept_while_it_has_tasks(store: Store) -> None:
    await load(store, [1, *[0] * (MASTERED_GROUPS + 1)])
    assert await sample(store, MASTERED_GROUPS + 2, 0.0, 1.0) == [*[0] * (MASTERED_GROUPS + 1), 1]


async def test_tasks_without_levels_are_sampled_in_order_after_those_with_one(store: Store) -> None:
    await load(store, [None, 3, None])
    assert await sample(store, 3, 1.0, 1.0) == [3, None, None]
