"""Test which data the stream gives to a step, and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from fake_store import FakeStore
from training_data import group, sampled_by

from agentrl.data.stream import DataStream, Freshness, StreamSettings, choose_groups
from agentrl.documents.status import DataStatus
from agentrl.documents.training import DBRecordData
from agentrl.errors import TrainingError


def stream(store: Any, replay: dict[int, tuple[str, ...]] | None = None, **changes: Any) -> DataStream:
    fresh = Freshness(max_staleness=1)
    settings = StreamSettings(groups_per_step=2, num_epochs=1, freshness=fresh, wait_seconds=30.0)
    return DataStream(store, replace(settings, **changes), replay)


@pytest.fixture
async def store() -> FakeStore:
    store = FakeStore()
    store.unfinished_groups = 1
    store.publish({version: version for version in range(10)})
    return store


def test_freshness_counts_steps() -> None:
    assert [Freshness(max_staleness=2).oldest(step) for step in (0, 1, 2, 5)] == [0, 0, 0, 3]


def test_whole_groups_are_chosen_in_order() -> None:
    members = [*group("a"), *group("b"), *group("c")]
    assert choose_groups(members, 2) == {"a": ["a/0/1", "a/1/1"], "b": ["b/0/1", "b/1/1"]}


def test_groups_to_avoid_come_last() -> None:
    members = [*group("a"), *group("b")]
    assert list(choose_groups(members, 1, avoid={"a/1/1"})) == ["b"]
    assert list(choose_groups(members, 2, avoid={"a/1/1"})) == ["b", "a"]


async def test_a_step_waits_for_its_groups(store: FakeStore) -> None:
    store.add(*group("a"))
    waiting = asyncio.create_task(stream(store).take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    store.add(*group("b"), *group("c"))
    batch = await waiting
    assert batch.groups == ("a", "b")
    assert [item.id for item in batch.data] == ["a/0/1", "a/1/1", "b/0/1", "b/1/1"]
    assert not batch.is_rest


async def test_data_that_are_too_old_are_marked_and_not_trained(store: FakeStore) -> None:
    store.add(*group("old", version=1), *group("a", version=2), *group("b", version=3))
    batch = await stream(store).take(4)
    assert batch.groups == ("a", "b")
    assert store.with_status(DataStatus.STALE) == ["old/0/1", "old/1/1"]


async def test_the_rest_is_trained_when_sampling_has_ended(store: FakeStore) -> None:
    store.add(*group("a"))
    store.unfinished_groups = 0
    data = stream(store)
    batch = await data.take(1)
    assert batch.is_rest
    store.set_status(batch.data, DataStatus.TRAINED)
    assert await data.take(2) is None


async def test_an_epoch_that_is_not_open_yet_is_waited_for(store: FakeStore) -> None:
    store.unfinished_groups = 0
    with pytest.raises(TrainingError, match=r"fewer than 2 groups became ready within 0\.05 s"):
        await stream(store, num_epochs=2, wait_seconds=0.05).take(1)


async def test_the_next_step_is_fetched_ahead(store: FakeStore) -> None:
    store.add(*group("a"), *group("b"))
    data = stream(store)
    data.prefetch(2)
    batch = await data.take(2)
    assert batch.groups == ("a", "b")
    await data.close()


async def test_what_was_fetched_for_another_step_is_chosen_anew(store: FakeStore) -> None:
    store.add(*group("old", version=0), *group("a", version=1), *group("b", version=1))
    data = stream(store)
    data.prefetch(2)
    batch = await data.take(3)
    assert batch.groups == ("a", "b")


async def test_a_rest_that_was_fetched_ahead_is_chosen_anew(store: FakeStore) -> None:
    store.unfinished_groups = 0
    data = stream(store)
    data.prefetch(2)
    await asyncio.sleep(0)
    store.add(*group("again"))
    batch = await data.take(2)
    assert batch.groups == ("again",)


async def test_closing_ends_what_waits(store: FakeStore) -> None:
    data = stream(store)
    data.prefetch(2)
    await data.close()
    await data.close()


async def test_a_group_that_took_long_is_trained_before_it_goes_stale(store: FakeStore) -> None:
    """Four groups are open at a time, as admission has it; the first to begin is the last to be ready."""
    store.places = {name: (0, place) for place, name in enumerate("abcdefgh")}
    store.add(*(item for name in "bcd" for item in group(name, version=0)))
    data = stream(store)
    first = await data.take(1)
    assert first.groups == ("b", "c")
    store.set_status(first.data, DataStatus.TRAINED)
    store.add(*(item for name in "ef" for item in group(name, version=1)), *group("a", version=0))
    second = await data.take(2)
    assert second.groups == ("a", "d")
    assert data.count_stale() == 0
    store.set_status(second.data, DataStatus.TRAINED)
    third = await data.take(3)
    assert (third.groups, data.count_stale()) == (("e", "f"), 0)


def spanning(name: str, *versions: int) -> list[DBRecordData]:
    """A group whose trajectories have four tokens each, spread over ``versions``."""
    return [sampled_by(item, *versions) for item in group(name)]


@pytest.mark.parametrize(
    ("policy", "groups", "stale", "tokens"),
    [("drop", ("b",), 4, 8), ("mask", ("a", "b"), 2, 12), ("decay", ("old", "a"), 0, 16)],
)
async def test_old_data_are_set_aside_or_cut_or_weighed(
    store: FakeStore, policy: Any, groups: tuple[str, ...], stale: int, tokens: int
) -> None:
    store.unfinished_groups = 0
    store.places = {name: (0, place) for place, name in enumerate(("old", "a", "b"))}
    store.add(*spanning("old", 0, 1), *spanning("a", 1, 4), *spanning("b", 4))
    data = stream(store, freshness=Freshness(max_staleness=1, policy=policy, decay=1.0))
    batch = await data.take(5)
    assert batch.groups == groups
    assert (data.count_stale(), data.count_stale()) == (stale, 0)
    assert sum(item.trainable_tokens for item in batch.data) == tokens


async def test_an_undone_step_takes_what_it_took_whatever_else_is_ready(store: FakeStore) -> None:
    store.add(*group("new", version=9), *group("a", version=1), *group("b", version=1))
    data = stream(store, {10: ("b/1/1", "a/0/1"), 11: ("a/1/1",)})
    first = await data.take(10)
    assert [item.id for item in first.data] == ["b/1/1", "a/0/1"]
    second = await data.take(11)
    assert (second.groups, store.with_status(DataStatus.STALE)) == (("a",), [])


async def test_an_undone_step_whose_data_are_taken_chooses_anew(store: FakeStore) -> None:
    store.add(*group("a"), *group("b"))
    store.data["c/0/1"] = replace(group("c")[0], status=DataStatus.TRAINED)
    batch = await stream(store, {1: ("c/0/1",)}).take(1)
    assert batch.groups == ("a", "b")


async def test_a_datum_that_cannot_be_trained_is_set_aside_and_its_group_trained(store: FakeStore) -> None:
    store.add(*group("a"), *group("b"))
    data = stream(store, problem_of=lambda item: "too long" if item.id == "a/1/1" else None)
    batch = await data.take(1)
    assert [item.id for item in batch.data] == ["a/0/1", "b/0/1", "b/1/1"]
    assert store.with_status(DataStatus.QUARANTINED) == ["a/1/1"]
    assert (data.count_quarantined(), data.count_quarantined()) == (1, 0)


async def test_a_group_of_which_nothing_can_be_trained_makes_way(store: FakeStore) -> None:
    store.add(*group("a"), *group("b"), *group("c"))
    batch = await stream(store, problem_of=lambda item: "bad" if item.task == "a" else None).take(1)
    assert batch.groups == ("b", "c")


async def test_many_groups_in_a_row_that_cannot_be_trained_end_training(store: FakeStore) -> None:
    for name in "abcdefghijklm":
        store.add(*group(name))
    with pytest.raises(TrainingError, match=r"no trajectory of the last 8 groups can be trained; .*: bad"):
        await stream(store, problem_of=lambda _: "bad").take(1)
    assert len(store.with_status(DataStatus.QUARANTINED)) == 12


async def test_an_undone_step_leaves_out_what_cannot_be_trained_any_more(store: FakeStore) -> None:
    store.add(*group("a"), *group("b"))
    replay = {1: ("b/1/1", "a/0/1", "b/0/1")}
    data = stream(store, replay, problem_of=lambda item: "bad" if item.id == "a/0/1" else None)
    for _ in range(2):
        batch = await data.take(1)
        assert [item.id for item in batch.data] == ["b/1/1", "b/0/1"]
    assert store.with_status(DataStatus.QUARANTINED) == ["a/0/1"]


async def test_ages_count_from_the_step_that_a_version_was_published_at(store: FakeStore) -> None:
    store.publish({20: 20, 21: 11}, withdrawn=[20])
    store.add(*spanning("a", 20, 21), *spanning("b", 9, 21))
    batch = await stream(store, freshness=Freshness(max_staleness=4)).take(14)
    assert batch.ages == {9: 4, 20: 0, 21: 2}


async def test_data_of_a_version_that_was_never_published_are_set_aside(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.add(*group("a"), *group("b"))
    store.add(sampled_by(store.data["a/1/1"], 0, 77))
    batch = await stream(store).take(1)
    assert [item.id for item in batch.data] == ["a/0/1", "b/0/1", "b/1/1"]
    assert store.with_status(DataStatus.QUARANTINED) == ["a/1/1"]
    assert "no policy version 77 was published: it has no age" in caplog.text


async def test_a_version_that_was_published_since_is_read(store: FakeStore) -> None:
    store.add(*group("a"), *group("b"), *group("c", version=10), *group("d", version=10))
    data = stream(store)
    first = await data.take(1)
    store.set_status(first.data, DataStatus.TRAINED)
    store.publish({10: 1})
    batch = await data.take(2)
    assert (batch.groups, batch.ages) == (("c", "d"), {10: 0})
