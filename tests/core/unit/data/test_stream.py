"""Test which data the stream gives to a step, when, and with which weight; and what a step reports."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fake_store import FakeStore
from model_calls import TASK, record
from token_batches import step_loss
from training_data import group, sampled_by

from agentrl.config.schema import GroupConfig
from agentrl.data.forest import forest_from_data
from agentrl.data.planner import build_micro_batches, packing_problem
from agentrl.data.stream import (
    DataStream,
    Freshness,
    StepData,
    StreamSettings,
    VersionSteps,
    Window,
    choose_groups,
    step_window,
    trajectory_means,
    whiten,
    window_metrics,
)
from agentrl.documents.model_call import SamplingMask, pack_floats, pack_ids, unpack_ids
from agentrl.documents.status import DataStatus
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.errors import ConfigError, TrainingError
from agentrl.losses.settings import LossSettings
from agentrl.scoring.groups import decide_group
from agentrl.train.step import count_step, split_updates, token_batch


def stream(store: Any, replay: dict[int, tuple[str, ...]] | None = None, **changes: Any) -> DataStream:
    fresh = Freshness(max_staleness=1, policy="drop")
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
    [
        ("drop", ("b",), 4, 8),
        ("mask", ("a", "b"), 2, 12),
        ("decay", ("old", "a"), 0, 16),
        ("keep", ("old", "a"), 0, 16),
    ],
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


async def test_a_path_above_max_tokens_is_set_aside_by_name_and_what_can_be_cut_is_trained(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Both have 16 tokens and micro-batches 10: one as a single path, one as two branches of 10."""
    (long, wide), others = group("a"), group("b")
    ids = pack_ids([1] * 10 + [2] * 6)
    long = replace(long, tokens=16, nodes=(Node(start=0, end=16),), input_ids=ids)
    long = replace(long, spans=(replace(long.spans[0], start=12, end=16),))
    branches = (Node(start=0, end=4), Node(start=4, end=10, parent=0), Node(start=10, end=16, parent=0))
    spans = tuple(replace(wide.spans[0], start=end - 2, end=end, call=end // 10) for end in (10, 16))
    wide = replace(wide, tokens=16, nodes=branches, spans=spans, input_ids=ids)
    store.add(long, wide, *others)
    problem_of = partial(packing_problem, vocab_size=256, max_tokens=10)
    batch = await stream(store, problem_of=problem_of).take(1)
    assert [item.id for item in batch.data] == [wide.id, *(item.id for item in others)]
    why = "a sequence of 16 tokens is longer than a micro-batch of --max_tokens 10"
    assert f"trajectory {long.id} is quarantined, and its group is trained without it: {why}" in caplog.text
    parts = build_micro_batches(batch.data, 10, vocab_size=256)
    assert max(part.tokens for part in parts) == 10
    assert sum(part.trainable_tokens for part in parts) == sum(item.trainable_tokens for item in batch.data)


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


def of_three_versions() -> DBRecordData:
    """Ten tokens, seven of them trainable, from the versions 1, 2 and 4."""
    spans = (
        TrainableSpan(start=start, end=end, call=call, version=version, advantage=2.0, temperature=1.0)
        for call, (start, end, version) in enumerate(((2, 4, 1), (4, 7, 2), (8, 10, 4)))
    )
    return replace(
        group("a")[0], min_version=1, max_version=4, trainable_tokens=7, spans=tuple(spans),
        behavior_logprobs=pack_floats([-0.1 * n for n in range(1, 8)]),
    )  # fmt: skip


def ages(step: int) -> dict[int, int]:
    """Of the versions, each of which was published at the step of its number."""
    return {version: max(0, step - version) for version in (1, 2, 4)}


def fresh(policy: Any, max_staleness: int = 2, decay: float | None = 0.5) -> Freshness:
    return Freshness(max_staleness=max_staleness, policy=policy, decay=decay)


@pytest.mark.parametrize("policy", ["drop", "decay", "mask", "keep"])
def test_data_without_an_old_token_are_trained_as_they_are(policy: str) -> None:
    for data in (of_three_versions(), *group("b", version=4)):
        assert fresh(policy).weigh(data, ages(3)) is data


def test_masked_tokens_are_context() -> None:
    masked = fresh("mask").weigh(of_three_versions(), ages(4))
    assert [(span.start, span.end, span.version) for span in masked.spans] == [(4, 7, 2), (8, 10, 4)]
    forest = forest_from_data([masked])
    assert (forest.tokens, forest.trainable_tokens) == (10, 5)
    assert forest.behavior_logprob.tolist() == pytest.approx([-0.3, -0.4, -0.5, -0.6, -0.7])
    assert count_step([forest]).tokens == 5
    ids = unpack_ids(of_three_versions().input_ids)[[2, 3, 4, 5, 6, 8, 9]]
    truncated = replace(of_three_versions(), sampling_mask=SamplingMask.of([[int(id)] for id in ids]).pack())
    mask = forest_from_data([fresh("mask").weigh(truncated, ages(4))]).sampling_mask
    assert mask.ids.tolist() == ids[2:].tolist()
    assert set(forest.version.tolist()) == {2, 4}


def test_decayed_tokens_lose_weight_with_every_step_beyond_the_limit() -> None:
    decayed = fresh("decay").weigh(of_three_versions(), ages(5))
    expected = [2.0 * math.exp(-0.5 * 2)] * 2 + [2.0 * math.exp(-0.5)] * 3 + [2.0] * 2
    assert forest_from_data([decayed]).advantage.tolist() == pytest.approx(expected)
    assert decayed.behavior_logprobs == of_three_versions().behavior_logprobs


def test_kept_tokens_are_trained_with_all_their_weight() -> None:
    data = of_three_versions()
    assert fresh("keep", max_staleness=0, decay=None).weigh(data, ages(9)) is data


def test_the_age_counts_and_not_the_number_of_the_version() -> None:
    """Version 4 was published at step 1, after a resume."""
    masked = fresh("mask").weigh(of_three_versions(), {1: 1, 2: 0, 4: 3})
    assert [span.version for span in masked.spans] == [1, 2]
    decayed = fresh("decay").weigh(of_three_versions(), {1: 1, 2: 0, 4: 4})
    assert [span.advantage for span in decayed.spans] == [2.0, 2.0, 2.0 * math.exp(-0.5 * 2)]


@pytest.mark.parametrize(
    ("policy", "spans"), [("drop", "any"), ("mask", "all"), ("decay", None), ("keep", None)]
)
def test_what_makes_data_stale(policy: str, spans: str | None) -> None:
    assert fresh(policy).stale_spans == spans


def test_a_decay_needs_its_rate() -> None:
    with pytest.raises(ConfigError, match="decay needs the rate"):
        fresh("decay", decay=None)
    assert fresh("drop", decay=None).policy == "drop"


def test_a_loss_is_linear_in_the_weight_of_a_decayed_token() -> None:
    old = group("b", version=1)[0]
    whole, decayed = loss_of(old), loss_of(fresh("decay").weigh(old, ages(5)))
    assert decayed == pytest.approx(whole * math.exp(-0.5 * 2))


def loss_of(item: DBRecordData) -> float:
    forest = forest_from_data([item], ages=ages(5))
    settings = LossSettings(importance_weight_cap_ratio=math.inf)
    logprobs = torch.linspace(-0.9, -0.2, forest.trainable_tokens, requires_grad=True)
    return step_loss(token_batch(forest, logprobs, settings), settings)[0].item()


def test_groups_are_trained_in_the_order_they_were_begun() -> None:
    finished_last = group("long")
    members = [*group("b"), *group("c"), *finished_last]
    places = {"long": (0, 0), "b": (0, 1), "c": (0, 2)}
    assert list(choose_groups(members, 2, places)) == ["long", "b"]


def test_groups_that_have_been_trained_come_behind_those_that_have_not() -> None:
    members = [*(replace(item, trained_count=1) for item in group("a")), *group("b")]
    assert list(choose_groups(members, 2, {"a": (0, 0), "b": (0, 1)})) == ["b", "a"]


def test_an_epoch_is_trained_before_the_next() -> None:
    members = [*group("next"), *group("last")]
    assert list(choose_groups(members, 1, {"next": (1, 0), "last": (0, 7)})) == ["last"]


def test_a_choice_among_the_same_data_is_always_the_same() -> None:
    members = [*group("a", size=3), *group("b", size=3)]
    places = {"a": (0, 0), "b": (0, 1)}
    chosen = choose_groups(members, 2, places)
    again = choose_groups(members[::-1], 2, places)
    assert list(again.items()) == list(chosen.items())


LENGTHS = (3, 1, 5, 2, 4, 7)
"""Trainable tokens of six trajectories, in two groups."""
SCORES = (1.0, 0.0, 1.0, 0.0, 0.0, 0.0)


def trajectory(name: str, place: int, tokens: int, advantage: float, version: int = 0) -> DBRecordData:
    """Two context tokens and ``tokens`` trainable ones, all with one advantage."""
    record = f"{name}/{place}/1"
    first = group(name)[0]
    return replace(
        first, id=record, record=record, advantage=advantage, tokens=tokens + 2, trainable_tokens=tokens,
        nodes=(Node(start=0, end=tokens + 2),), min_version=version, max_version=version,
        spans=(replace(first.spans[0], start=2, end=tokens + 2, advantage=advantage, version=version),),
        input_ids=pack_ids(list(range(tokens + 2))), behavior_logprobs=pack_floats([-1.0] * tokens),
    )  # fmt: skip


def step(advantages: Sequence[float] = SCORES) -> list[DBRecordData]:
    return [
        trajectory("ab"[place // 3], place, tokens, advantage)
        for place, (tokens, advantage) in enumerate(zip(LENGTHS, advantages, strict=True))
    ]


def per_token(data: Sequence[DBRecordData]) -> np.ndarray:
    """float64[N], the advantage of every trainable token, in the order of ``data``."""
    spans = [span for item in data for span in item.spans]
    return np.repeat([span.advantage for span in spans], [span.end - span.start for span in spans])


def group_advantages(estimator: str) -> list[float]:
    """What samplers give the trajectories of ``SCORES`` in their two groups."""
    config = GroupConfig(advantage=estimator, min_score_spread=0.0)  # type: ignore[arg-type]
    records = [record(place, score) for place, score in enumerate(SCORES)]
    decided = [d for part in (records[:3], records[3:]) for d in decide_group(part, config, random.Random(0))]
    return [d.advantage for d in decided if d.advantage is not None]


@pytest.mark.parametrize("estimator", ["reward", "dr_grpo"])
def test_advantages_are_whitened_over_the_steps_tokens(estimator: str) -> None:
    """``reward``: REINFORCE++; ``dr_grpo``: REINFORCE++-baseline."""
    advantages = group_advantages(estimator)
    raw = per_token(step(advantages))
    found = per_token(whiten(step(advantages)))
    assert found == pytest.approx((raw - raw.mean()) / raw.std())
    assert found.mean() == pytest.approx(0.0, abs=1e-12)
    assert found.std() == pytest.approx(1.0)
    openrlhf = (raw - raw.mean()) / math.sqrt(max(((raw - raw.mean()) ** 2).sum() / raw.size, 1e-8))
    assert found == pytest.approx(openrlhf)
    verl = (raw - raw.mean()) / math.sqrt(raw.var(ddof=1) + 1e-8)  # the sample's variance
    assert found == pytest.approx(verl * math.sqrt(raw.size / (raw.size - 1)))


def test_long_trajectories_count_with_their_tokens() -> None:
    data = whiten([trajectory("a", 0, 9, 1.0), trajectory("a", 1, 1, 0.0)])
    assert [item.spans[0].advantage for item in data] == pytest.approx([1 / 3, -3.0])


def test_a_faulty_call_gets_no_positive_advantage_and_changes_no_other() -> None:
    """Scores 1, 1, 0, 0 under ``dr_grpo``; a malformed call in the first, and one in the last trajectory."""
    rows = ((2, 0.5), (2, 0.5), (8, -0.5), (8, -0.5))
    data = [trajectory("a", place, tokens, value) for place, (tokens, value) in enumerate(rows)]
    clean = [item.spans[0].advantage for item in whiten(data)]
    capped = replace(data[0], faulty_calls=(0,), spans=(replace(data[0].spans[0], advantage=0.0),))
    found = whiten([capped, *data[1:3], replace(data[3], faulty_calls=(0,))])
    assert [item.spans[0].advantage for item in found] == [0.0, *clean[1:]]


def test_only_spans_change_and_the_forest_holds_the_new_advantages() -> None:
    before, after = step(), whiten(step())
    assert [replace(item, spans=()) for item in after] == [
        replace(item, spans=(), created_at=same.created_at) for item, same in zip(before, after, strict=True)
    ]
    assert forest_from_data(after).advantage == pytest.approx(per_token(after).astype(np.float32))


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
def test_equal_advantages_whiten_to_zero(value: float) -> None:
    assert per_token(whiten(step([value] * 6))).tolist() == [0.0] * sum(LENGTHS)
    rounded = [value * (1 + 1e-15 * (place % 2)) for place in range(6)]
    assert per_token(whiten(step(rounded))).tolist() == [0.0] * sum(LENGTHS)


def test_a_step_without_a_token_stays_as_it_is() -> None:
    empty = [replace(item, spans=()) for item in step()]
    assert whiten(empty) == tuple(empty)
    assert whiten([]) == ()


def test_the_order_of_the_data_changes_no_value() -> None:
    generator = random.Random(3)
    data = [trajectory("a", place, 1 + place % 7, generator.gauss(0, 3)) for place in range(40)]
    values = {item.id: item.spans[0].advantage for item in whiten(data)}
    generator.shuffle(data)
    assert {item.id: item.spans[0].advantage for item in whiten(data)} == values


async def take(data: Sequence[DBRecordData], replay: Any = None, step: int = 1, **freshness: Any) -> StepData:
    """A step that whitens the advantages of ``data``."""
    store: Any = FakeStore()
    store.publish({version: version for version in range(6)})
    store.add(*data)
    settings = StreamSettings(
        groups_per_step=2, num_epochs=1, freshness=Freshness(**{"max_staleness": 2, **freshness}),
        whitens=True, wait_seconds=30.0,
    )  # fmt: skip
    found = await DataStream(store, settings, replay).take(step)
    assert found is not None
    return found


async def test_a_step_is_whitened_once_over_all_of_its_groups() -> None:
    batch = await take(step())
    assert batch.data == whiten(
        [replace(i, created_at=b.created_at) for i, b in zip(step(), batch.data, strict=True)]
    )
    parts = split_updates(batch.data, 2)
    assert len(parts) == 2
    assert sorted(np.concatenate([per_token(part) for part in parts])) == sorted(per_token(batch.data))
    assert all(abs(per_token(part).mean()) > 0.1 for part in parts)


async def test_a_replayed_step_has_the_same_advantages() -> None:
    first = await take(step())
    others = [trajectory("0", place, 3, 5.0) for place in range(3)]
    again = await take([*others, *step()], {1: tuple(item.id for item in first.data)})
    assert per_token(again.data).tolist() == per_token(first.data).tolist()


def of_two_versions() -> list[DBRecordData]:
    old = replace(trajectory("a", 0, 4, 1.0), max_version=5)
    first = replace(old.spans[0], end=4)
    spans = (first, replace(first, start=4, end=6, version=5))
    return [replace(old, spans=spans), *(trajectory("b", place, 2, 0.0, 5) for place in range(2))]


async def test_masked_tokens_are_in_no_mean() -> None:
    batch = await take(of_two_versions(), step=6, policy="mask")
    assert per_token(batch.data) == pytest.approx([2**0.5] * 2 + [-(0.5**0.5)] * 4)


async def test_decay_comes_after_whitening() -> None:
    batch = await take(of_two_versions(), step=6, policy="decay", decay=0.5)
    decayed = math.exp(-0.5 * 3)
    assert per_token(batch.data) == pytest.approx([decayed, decayed, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0])


@pytest.fixture
def resumed() -> Any:
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
    resumed: FakeStore, step: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    assert await VersionSteps(resumed).published_before(step) == ranges


async def test_an_age_is_never_negative_and_only_that_of_a_published_version(resumed: Any) -> None:
    steps = VersionSteps(resumed)
    assert await steps.ages([9, 20, 21, 24, 99], 14) == {9: 5, 20: 0, 21: 3, 24: 1}


async def test_every_version_is_read_once(resumed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    steps_above = resumed.policy_versions.steps_above

    async def count(version: int) -> dict[int, int]:
        found = await steps_above(version)
        read.extend(found)
        return found

    monkeypatch.setattr(resumed.policy_versions, "steps_above", count)
    steps = VersionSteps(resumed)
    for step in range(3):
        await steps.published_before(step)
        await steps.ages([1, 2, 99], step)
    resumed.publish({25: 14})
    assert await steps.ages([25], 16) == {25: 2}
    assert read == list(range(26))


def summary(mean: float, scored: int, minute: int, task: str = "t") -> dict[str, Any]:
    return {
        "task": task, "mean_score": mean, "pass_rate": mean, "scored": scored,
        "finalized_at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute),
        "trained": scored if 0 < mean < 1 else 0,
    }  # fmt: skip


def finalized(store: FakeStore, task: str, mean: float, scored: int, minute: int) -> None:
    store.summaries.append(summary(mean, scored, minute, task))
    group = {key: value for key, value in store.summaries[-1].items() if key != "task"}
    store.group_tasks[task] = replace(TASK, id=task, task_id=task, group=group)


async def test_a_step_reports_on_all_groups_since_the_last_step_up_to_its_own(store: Any) -> None:
    finalized(store, "a", 1.0, 6, 1)
    finalized(store, "abandoned", 0.0, 2, 2)
    finalized(store, "b", 0.5, 4, 3)
    finalized(store, "later", 0.5, 4, 4)
    first = await step_window(store, "train", ["b"])
    assert first.tasks == ["a", "abandoned", "b"]
    metrics = await window_metrics(store, first, [])
    assert metrics["reward"] == pytest.approx(8 / 12)
    store.counted = {"a": 1}
    second = await step_window(store, "train", ["b"])
    assert second.tasks == ["abandoned", "b"]
    store.counted = dict.fromkeys(("a", "abandoned", "b"), 1)
    third = await step_window(store, "train", ["a"])
    assert third.tasks == ["a"]


async def test_a_step_reports_the_pass_rate_of_each_source_of_a_mixture(store: Any) -> None:
    for task, mean, scored in (("a", 1.0, 6), ("b", 0.5, 2), ("c", 0.0, 3), ("d", 0.0, 0)):
        finalized(store, task, mean, scored, 1)
    for kept, source in zip(store.summaries, ("easy", "easy", "hard", "unscored"), strict=True):
        kept["source"] = source
    metrics = await window_metrics(store, await step_window(store, "train", ["a"]), [])
    assert metrics["source_pass_rate"] == {"easy": pytest.approx(7 / 8), "hard": 0.0}
    assert metrics["pass_rate"] == pytest.approx(7 / 11)


async def test_the_length_bias_compares_what_is_trained_with_all_that_was_sampled(store: Any) -> None:
    store.data = {
        item.id: replace(item, trainable_tokens=length, task="a")
        for item, length in zip(group("a", size=3), (10, 20, 90), strict=True)
    }
    finalized(store, "a", 0.5, 3, 1)
    window = await step_window(store, "train", ["a"])
    metrics = await window_metrics(store, window, ["a/0/1", "a/1/1"])
    assert metrics["length_bias"] == pytest.approx(15 / 40)
    assert "length_bias" not in await window_metrics(store, window, [])


async def test_a_step_counts_the_calls_that_were_not_trained(store: Any) -> None:
    masked = [{"because": "top_p 0.9", "calls": 3}, {"because": "temperature 0", "calls": 1}]
    window = Window(groups=[summary(0.5, 2, 1, "a") | {"masked_calls": masked}, summary(0.5, 2, 2, "b")])
    metrics = await window_metrics(store, window, [])
    assert metrics["masked_calls"] == 4


def test_groups_without_a_score_have_no_reward() -> None:
    failed = {"mean_score": None, "pass_rate": None, "scored": 0, "trained": 0}
    assert trajectory_means([failed]) == {}
    means = trajectory_means([failed, summary(0.5, 2, 0)])
    assert (means["reward"], means["pass_rate"]) == (0.5, 0.5)


def test_a_step_reports_what_was_abandoned() -> None:
    agreed, filtered = summary(1.0, 8, 0), {**summary(0.5, 8, 0), "trained": 6}
    means = trajectory_means([agreed, filtered, summary(0.5, 4, 0)])
    assert means["abandoned_fraction"] == pytest.approx(10 / 20)
    assert means["abandoned_groups"] == pytest.approx(1 / 3)
