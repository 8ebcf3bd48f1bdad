"""``--task_selection`` on a real server: by pass rate copies begin early, once; by curriculum, in levels."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack

import pytest
import small_run as run
from db_command import violations

from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.data.finalize_group import GroupRules
from agentrl.documents.status import RecordStatus, TaskStatus
from agentrl.documents.task import Claim, Slot, Task, task_key
from agentrl.lab.regroup import NewScore, Reopening, Rescoring
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.screens.views.counts import Details, GroupCount
from agentrl.store.claims import GroupAdmission, Needs
from agentrl.store.client import Store, open_store
from agentrl.store.epochs import MASTERED_GROUPS, PASS_RATE, Selection

pytestmark = pytest.mark.integration

EPOCHS = Selection(3)


async def load(store: Store, count: int) -> None:
    for order in range(count):
        await run.add_task(store, task_key("train", 0, str(order)), order)


async def take(store: Store, limit: int, selection: Selection | None = EPOCHS) -> Claim | None:
    claimed = await store.claims.claim(
        split="train", owner="s", lease_seconds=60.0, max_groups_open=limit, selection=selection
    )
    if claimed is not None:
        await store.records.create(claimed)
        await store.records.advance(claimed, RecordStatus.RUNNING)
    return claimed


async def admit_one_by_one(store: Store, scores: Mapping[str, tuple[float, float]], groups: int) -> list[str]:
    """Sample group after group, finalize each, and return what was begun and by what, in order."""
    begun = []
    for _ in range(groups):
        for place in range(2):
            claimed = await take(store, 1 + await store.groups.count_open("train") - bool(place))
            await run.score(store, claimed, scores.get(claimed.task.task_id, (1.0, 1.0))[place])
            await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting()
        begun.append(f"{claimed.task.epoch}/{claimed.task.task_id} {claimed.task.begun.by}")
    return begun


async def test_a_task_with_spread_is_begun_again_before_the_next_unknown_one(store: Store) -> None:
    await load(store, 8)
    begun = await admit_one_by_one(store, {"1": (0.0, 1.0)}, 8)
    first = ["0/0 order", "0/1 order", "0/2 order", "0/3 order"]
    assert begun == [*first, "1/1 pass_rate", "2/1 pass_rate", "0/4 order", "0/5 order"]
    copy = await store.tasks.get("train/1/1")
    assert (copy.query, len(copy.slots), copy.status) == ("What is 2 + 2?", 2, TaskStatus.COMPLETED)
    assert copy.ease is None, "its own copy was begun: it is not a candidate"
    assert copy.begun.ease < 0
    places = await store.tasks.sort_keys(["train/0/4", "train/1/1", "train/0/0"])
    assert sorted(places, key=places.__getitem__) == ["train/0/0", "train/1/1", "train/0/4"]
    assert await Details(store.connection).groups() == [
        GroupCount(by="order", groups=6, abandoned_groups=5, trajectories=12, trained=2, pass_rate=11 / 12),
        GroupCount(by="pass_rate", groups=2, abandoned_groups=0, trajectories=4, trained=4, pass_rate=0.5),
    ]
    assert await violations(store) == []


async def test_an_epoch_begun_early_is_opened_with_what_is_missing(store: Store) -> None:
    await load(store, 4)
    await admit_one_by_one(store, {"1": (0.0, 1.0)}, 5)
    assert await store.epochs.next("train", 3) == 1
    assert not [text for text in await violations(store, is_final=True) if "Epoch" in text]
    assert await store.epochs.open("train", 1, 0, 2) == 3
    assert await store.epochs.next("train", 3) == 2
    assert await store.epochs.open("train", 2, 0, 2) == 4
    assert await store.epochs.next("train", 3) is None
    assert await violations(store) == []
    while claimed := await take(store, 100):
        await run.score(store, claimed, 1.0)
        await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting()
    assert await store.tasks.unfinished("train") == 0
    numbers = [task.begun.number for task in await store.tasks.find("train") if task.begun is not None]
    assert sorted(numbers) == list(range(1, 13))
    assert await violations(store) == []


async def test_claimers_at_once_begin_each_copy_once(store: Store, run_config: RunConfig) -> None:
    await load(store, 6)
    await admit_one_by_one(store, {"0": (0.0, 1.0), "1": (1.0, 0.0)}, 2)
    async with AsyncExitStack() as stack:
        stores = [store, *[await stack.enter_async_context(await open_store(run_config)) for _ in range(3)]]
        taken: list[Claim] = []

        async def work(own: Store) -> None:
            while claimed := await take(own, 5):
                taken.append(claimed)

        await asyncio.gather(*(work(own) for own in stores), store.epochs.open("train", 1, 0, 2))
    slots = Counter((claimed.task.id, claimed.traj_id) for claimed in taken)
    assert set(slots.values()) == {1}
    assert len({claimed.task.id for claimed in taken}) == 3, (
        "two groups wait to be trained, and five may be open"
    )
    numbers = [task.begun.number for task in await store.tasks.find("train") if task.begun is not None]
    assert sorted(numbers) == [1, 2, 3, 4, 5]
    assert await violations(store) == []


async def test_a_task_whose_copy_was_begun_by_order_is_no_candidate(store: Store) -> None:
    await load(store, 1)
    await store.epochs.open("train", 1, 0, 2)
    for _ in range(2):
        for value in (0.0, 1.0):
            claimed = await take(store, 5)
            assert claimed is not None
            await run.score(store, claimed, value)
    await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting()
    claimed = await take(store, 5)
    assert (claimed.task.id, claimed.task.begun and claimed.task.begun.by) == ("train/2/0", PASS_RATE)
    first = await store.tasks.get("train/0/0")
    assert first.ease is None, "its copy was begun before it was finalized: unmarked once it is met"
    assert await take(store, 5) is not None
    assert await take(store, 5) is None


async def test_a_group_that_is_opened_again_is_not_selected_until_it_is_finished(store: Store) -> None:
    await load(store, 2)
    claimed = await take(store, 1)
    assert claimed is not None
    await run.fail(store, claimed, max_attempts=1)
    claimed = await take(store, 1)
    assert claimed is not None
    await run.score(store, claimed, 1.0)
    await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting()
    await Reopening(store.connection).reopen()
    again = await store.tasks.get("train/0/0")
    assert (again.status, again.ease is None) == (TaskStatus.RUNNING, False)
    claimed = await take(store, 100)
    assert claimed.task.id == "train/0/0"
    following = await take(store, 100)
    assert following.task.id == "train/0/1"
    assert await violations(store) == []


async def test_a_new_score_changes_what_is_known_of_the_task(store: Store) -> None:
    await load(store, 2)
    await admit_one_by_one(store, {}, 1)
    before = await store.tasks.get("train/0/0")
    scores = {f"train/0/0/{n}/1": NewScore(score=0.0, details={"scorer": "new"}) for n in range(2)}
    rules = GroupRules(config=GroupConfig(), seed=0)
    assert (
        await Rescoring(store.connection).apply("train/0/0", scores, lambda _: rules.decide)
    ).decided_again
    after = await store.tasks.get("train/0/0")
    assert (before.ease or 0) > 0 > (after.ease or 0)


async def test_by_order_nothing_is_selected_numbered_or_asked(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(store, 3)
    admission: GroupAdmission = store.claims._admission
    monkeypatch.setattr(admission, "_selection", None)
    for value in (0.0, 1.0):
        claimed = await take(store, 1, None)
        assert claimed is not None
        await run.score(store, claimed, value)
    await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting()
    task = await store.tasks.get("train/0/0")
    assert (task.begun, task.ease) == (None, None)
    assert (await store.tasks.sort_keys(["train/0/0"])) == {"train/0/0": (0, 0, 0)}


async def test_tasks_that_need_what_is_down_are_neither_begun_nor_begun_again(store: Store) -> None:
    await load(store, 8)
    search = {"$set": {"tools": ["search"]}}
    await store.database["Task"].update_many({"task_id": {"$in": ["1", "4"]}}, search)
    await store.database["Task"].update_many({"task_id": {"$nin": ["1", "4"]}}, {"$set": {"tools": []}})
    assert (await admit_one_by_one(store, {"1": (0.0, 1.0)}, 4))[-1] == "0/3 order"
    begun = []
    for without in (Needs(frozenset({"search"})), Needs(known=frozenset({"calc"})), Needs()):
        limit = 1 + await store.groups.count_open("train")
        for _ in range(2):
            claimed = await store.claims.claim(
                split="train", owner="s", lease_seconds=60.0, max_groups_open=limit, selection=EPOCHS,
                without=without,
            )  # fmt: skip
        begun.append(claimed.task.id)
    assert begun == ["train/0/5", "train/0/6", "train/1/1"]


BY_LEVEL = Selection(1, by_level=True)


async def load_levels(store: Store, levels: list[int | None]) -> None:
    slots = (Slot(traj_id=0), Slot(traj_id=1))
    tasks = [
        Task(
            id=task_key("train", 0, f"{order}"), task_id=f"{order}", split="train", epoch=0, order=order,
            query="?", meta={} if level is None else {"level": level}, slots=slots,
        )
        for order, level in enumerate(levels)
    ]  # fmt: skip
    await store.tasks.load(tasks)


async def levels_of(store: Store, groups: int, *scores: float) -> list[int | None]:
    """Sample groups one after the other; return the level of each."""
    levels = []
    for _ in range(groups):
        for place in range(2):
            limit = 1 + await store.groups.count_open("train") - bool(place)
            claimed = await take(store, limit, BY_LEVEL)
            await run.score(store, claimed, scores[place])
            await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting()
        levels.append(claimed.task.meta.get("level"))
    return levels


async def test_the_next_level_begins_when_recent_groups_pass(store: Store) -> None:
    easy = MASTERED_GROUPS + 2
    await load_levels(store, [1] * 3 + [0] * easy + [2] * 2)
    assert await levels_of(store, MASTERED_GROUPS, 1.0, 1.0) == [0] * MASTERED_GROUPS
    assert await levels_of(store, 3, 0.0, 1.0) == [1, 1, 1]
    # Level 1 has no task left: the next one that has any and is not mastered is 2.
    assert await levels_of(store, 2, 1.0, 1.0) == [2, 2]
    assert await levels_of(store, 2, 1.0, 1.0) == [0, 0]
    assert await take(store, 100, BY_LEVEL) is None
    assert await violations(store, is_final=True) == []


async def test_a_level_that_is_not_mastered_is_kept_while_it_has_tasks(store: Store) -> None:
    await load_levels(store, [1, *[0] * (MASTERED_GROUPS + 1)])
    assert await levels_of(store, MASTERED_GROUPS + 2, 0.0, 1.0) == [*[0] * (MASTERED_GROUPS + 1), 1]


async def test_tasks_without_levels_are_sampled_in_order_after_those_with_one(store: Store) -> None:
    await load_levels(store, [None, 3, None])
    assert await levels_of(store, 3, 1.0, 1.0) == [3, None, None]
